"""What a run tells whoever records it while it goes: MLflow, or nobody."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from lineage.manifest import InputRecord, Manifest


@dataclass(frozen=True, kw_only=True)
class Execution:
    """One execution of a pipeline.

    Args:
        words: the options and overrides of the command.
        reused: stage's title -> record of the finished output that is used as it is.
        folder: of a sweep: the record of its last execution is gone on with, found by a note there.
    """

    pipeline: str
    store: Path
    words: list[str]
    reused: Mapping[str, Manifest]
    folder: Path | None = None


@dataclass(frozen=True, kw_only=True)
class StageStart:
    """A stage that begins.

    Args:
        method: full name of the class.
        produces: kind of the output.
        directory: of the stage in the store; reports appear in its ``metrics.jsonl``.
        parents: name of a stage that it reads -> record of that stage's output.
        resumes: whether it goes on from a checkpoint, and so in the run of the attempt before.
        title: what it is called in this execution; empty: by its stage's name.
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


@dataclass(frozen=True, kw_only=True)
class TrialEnd:
    """What became of a trial of a sweep.

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
    """How a tracker names a stage's run, the execution's, and those of the stages that it reads; None: unrecorded."""

    stage: str | None = None
    execution: str | None = None
    parents: tuple[str, ...] = ()


class StageTracker(Protocol):
    """The record of one running stage. No method raises: a lost record ends no training."""

    def run_ids(self) -> RunIds:
        """For the manifest; may wait a moment for a run that is still being made."""

    def finished(self, manifest: Manifest) -> None:
        """After the commit: the last reports, the output, its links."""

    def failed(self, error: BaseException) -> None:
        """The stage raised, or was stopped."""


class Tracker(Protocol):
    """The record of one execution, open as long as its context. No method raises."""

    def execution(self, execution: Execution) -> AbstractContextManager[None]:
        """Opens the record; closes it as failed, stopped or finished with what leaves the context."""

    def stage(self, start: StageStart) -> StageTracker:
        """Begins the record of a stage; from any thread."""

    def reused(self, title: str, manifest: Manifest) -> None:
        """Another execution has made a stage meanwhile."""

    def trial_begins(self, number: int, params: Mapping[str, str]) -> None:
        """A trial of this execution, which is a sweep."""

    def trial_ends(self, number: int, end: TrialEnd) -> None:
        """After ``trial_begins`` of that number."""

    def keep(self, files: Sequence[Path]) -> None:
        """Small files that belong to the execution: tables, pages."""

    def execution_id(self) -> str | None:
        """How the record is found; None: unrecorded."""


class NoStageTracker:
    """Records nothing."""

    def run_ids(self) -> RunIds:
        return RunIds()

    def finished(self, manifest: Manifest) -> None:
        """Nothing to close."""

    def failed(self, error: BaseException) -> None:
        """Nothing to close."""


class NoTracker:
    """Records nothing: ``tracking=none``."""

    def execution(self, execution: Execution) -> AbstractContextManager[None]:
        return nullcontext()

    def stage(self, start: StageStart) -> StageTracker:
        return NoStageTracker()

    def reused(self, title: str, manifest: Manifest) -> None:
        """Nothing to link."""

    def trial_begins(self, number: int, params: Mapping[str, str]) -> None:
        """Nothing to open."""

    def trial_ends(self, number: int, end: TrialEnd) -> None:
        """Nothing to close."""

    def keep(self, files: Sequence[Path]) -> None:
        """Nothing to keep them in."""

    def execution_id(self) -> str | None:
        return None
