"""What a run tells whoever records it while it goes: MLflow, or nobody."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lineage.manifest import InputRecord, Manifest


@dataclass(frozen=True, kw_only=True)
class Execution:
    """One execution of a pipeline.

    Args:
        words: the options and overrides of the command.
        reused: stage -> record of the finished output that is used as it is.
    """

    pipeline: str
    store: Path
    words: list[str]
    reused: Mapping[str, Manifest]


@dataclass(frozen=True, kw_only=True)
class StageStart:
    """A stage that begins.

    Args:
        method: full name of the class.
        produces: kind of the output.
        directory: of the stage in the store; reports appear in its ``metrics.jsonl``.
        parents: name of a stage that it reads -> record of that stage's output.
        resumes: whether it goes on from a checkpoint, and so in the run of the attempt before.
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

    def failed(self, cause: str, *, stopped: bool) -> None:
        """The stage raised, or was stopped."""


class Tracker(Protocol):
    """The record of one execution, open as long as its context. No method raises."""

    def execution(self, execution: Execution) -> AbstractContextManager[None]:
        """Opens the record; closes it as failed, stopped or finished with what leaves the context."""

    def stage(self, start: StageStart) -> StageTracker:
        """Begins the record of a stage; from any thread."""

    def reused(self, stage: str, manifest: Manifest) -> None:
        """Another execution has made a stage meanwhile."""

    def execution_id(self) -> str | None:
        """How the record is found; None: unrecorded."""


class NoStageTracker:
    """Records nothing."""

    def run_ids(self) -> RunIds:
        return RunIds()

    def finished(self, manifest: Manifest) -> None:
        """Nothing to close."""

    def failed(self, cause: str, *, stopped: bool) -> None:
        """Nothing to close."""


class NoTracker:
    """Records nothing: ``tracking=none``."""

    def execution(self, execution: Execution) -> AbstractContextManager[None]:
        return nullcontext()

    def stage(self, start: StageStart) -> StageTracker:
        return NoStageTracker()

    def reused(self, stage: str, manifest: Manifest) -> None:
        """Nothing to link."""

    def execution_id(self) -> str | None:
        return None
