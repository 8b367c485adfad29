"""What a run reports to its record while it goes, and a record of nothing."""

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lineage.manifest import InputRecord, Manifest, Provenance


@dataclass(frozen=True, kw_only=True)
class Execution:
    """One execution of a pipeline.

    Args:
        words: the options and overrides of the command.
        reused: stage's title -> record of the finished output that is used as it is.
        folder: of a sweep: the record of its last execution is continued, by a note there.
    """

    pipeline: str
    store: Path
    words: list[str]
    reused: Mapping[str, Manifest]
    folder: Path | None = None


@dataclass(frozen=True, kw_only=True)
class StageStart:
    """A stage that starts.

    Args:
        method: full name of the class.
        produces: kind of the output.
        directory: of the stage in the store; reports appear in its ``metrics.jsonl``.
        parents: name of a stage that it reads -> record of that stage's output.
        resumes: whether it resumes from a checkpoint, and so continues the run of the attempt before.
        title: its name in this execution; empty: its stage's name.
    """

    stage: str
    method: str
    produces: str
    fingerprint: str
    recipe: Mapping[str, object]
    inputs: Mapping[str, InputRecord]
    directory: Path
    parents: Mapping[str, Manifest]
    resumes: bool = False
    title: str = ""

    def manifest(self, pipeline: str) -> Manifest:
        """What its manifest will say that is known now."""
        now = Provenance(
            start=time.time(), end=0.0, hosts=[], python="", libraries={}, git_commit=None, git_dirty=None,
            code_digest="", seed=None, resources={},
        )  # fmt: skip
        return Manifest(
            pipeline=pipeline, stage=self.stage, method=self.method, recipe=dict(self.recipe),
            fingerprint=self.fingerprint, inputs=dict(self.inputs), files={}, output_digest="", metrics={},
            provenance=now, produces=self.produces,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TrialEnd:
    """The result of a trial of a sweep.

    Args:
        manifests: stage -> record of its output, of all that is finished.
        metrics: ``STAGE/METRIC`` and objectives -> number.
        cause: of a failure or a pruning.
    """

    state: Literal["complete", "pruned", "failed"]
    manifests: Mapping[str, Manifest]
    metrics: Mapping[str, float]
    cause: str


@dataclass(frozen=True, kw_only=True)
class RunIds:
    """The ids of a stage's run, the execution's, and those of the stages that it reads; None: unrecorded."""

    stage: str | None = None
    execution: str | None = None
    parents: tuple[str, ...] = ()


class StageTracker:
    """The record of one running stage: nothing. No method raises: a lost record ends no training."""

    def run_ids(self) -> RunIds:
        """For the manifest; may wait a moment for a run that is still being created."""
        return RunIds()

    def finished(self, manifest: Manifest) -> None:
        """After the commit."""

    def failed(self, error: BaseException) -> None:
        """The stage raised, or was stopped."""


class Tracker:
    """The record of one execution: nothing (``tracking=none``). No method raises; all may come from any thread."""

    def execution(self, execution: Execution) -> AbstractContextManager[None]:
        """Opens the record; closes it as failed, stopped or finished with what leaves the context."""
        return nullcontext()

    def stage(self, start: StageStart) -> StageTracker:
        """Opens the record of a stage."""
        return StageTracker()

    def reused(self, title: str, manifest: Manifest) -> None:
        """Another execution has produced a stage meanwhile."""

    def trial_begins(self, number: int, params: Mapping[str, str]) -> None:
        """A trial of this execution, which is a sweep."""

    def trial_ends(self, number: int, end: TrialEnd) -> None:
        """After ``trial_begins`` of that number."""

    def keep(self, files: Sequence[Path]) -> None:
        """Small files that belong to the execution: tables, pages."""

    def execution_id(self) -> str | None:
        """The id of the record; None: unrecorded."""
        return None
