"""Events that a run emits for its listeners, and the tracker that records nothing."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lineage.errors import PrunedError, StoppedError
from lineage.store import Manifest

FINAL = "final/"  # before the name of a final metric, beside the curve of that name


@dataclass(frozen=True, kw_only=True)
class Execution:
    """One execution of a pipeline.

    Args:
        cli_args: the options and overrides of the command.
        reused: stage title -> manifest of the reused output.
        folder: folder of a sweep, where the id of its record is kept, so that a later execution continues it.
    """

    pipeline: str
    store: Path
    cli_args: list[str]
    reused: Mapping[str, Manifest]
    folder: Path | None = None


@dataclass(frozen=True, kw_only=True)
class StageStart:
    """A stage that starts.

    Args:
        manifest: as far as it is known at the start.
        directory: of the stage in the store; reports appear in its ``metrics.jsonl``.
        parents: name of a stage that it reads -> manifest of that stage's output.
        resumes: whether it resumes from a checkpoint and continues the MLflow run of the previous attempt.
    """

    manifest: Manifest
    directory: Path
    parents: Mapping[str, Manifest]
    resumes: bool = False


@dataclass(frozen=True, kw_only=True)
class Event:
    """What a run emits: the new state of one of its stages, or a message.

    Args:
        title: name of the stage; in a sweep with the trials that share it, unless all do.
        state: of the stage; ``waiting`` again where it waits for something else; ``reused``: another run has produced
            it meanwhile.
        text: what it waits for, why it failed or was stopped, or the message.
        start: of a running stage.
        num_steps: optimizer steps, or reports, of a running stage; None: not known.
        manifest: of a stage that is done or reused.
        error: of a failed or stopped stage.
    """

    title: str = ""
    state: Literal["message", "waiting", "running", "reused", "done", "failed", "pruned", "stopped"] = "message"
    text: str = ""
    start: StageStart | None = None
    num_steps: int | None = None
    manifest: Manifest | None = None
    error: BaseException | None = None

    @property
    def seconds(self) -> float:
        """Duration of a finished stage; 0 otherwise."""
        if self.state != "done" or self.manifest is None:
            return 0.0
        return self.manifest.provenance.end - self.manifest.provenance.start


Listener = Callable[[Event], None]  # may be called from any thread, and raises nothing


def end_event(title: str, error: BaseException) -> Event:
    """The event of a stage that failed, was pruned or was stopped."""
    if isinstance(error, PrunedError):
        return Event(title=title, state="pruned", text=str(error), error=error)
    is_stopped = not isinstance(error, Exception) or isinstance(error, StoppedError)
    return Event(title=title, state="stopped" if is_stopped else "failed", text=str(error), error=error)


@dataclass(frozen=True, kw_only=True)
class TrialEnd:
    """The result of a trial of a sweep.

    Args:
        manifests: stage -> manifest, of all finished stages.
        metrics: ``STAGE/METRIC`` and objectives -> value.
        cause: why it failed or was pruned.
    """

    state: Literal["complete", "pruned", "failed"]
    manifests: Mapping[str, Manifest]
    metrics: Mapping[str, float]
    cause: str


@dataclass(frozen=True, kw_only=True)
class RunIds:
    """MLflow run ids of a stage, its execution and its parent stages; None: not recorded."""

    stage: str | None = None
    execution: str | None = None
    parents: tuple[str, ...] = ()


class Tracker:
    """The tracker of one execution that records nothing (``tracking=none``).

    No method raises, since a tracking failure must not stop a training; all may be called from any thread.
    """

    def execution(self, execution: Execution) -> AbstractContextManager[None]:
        """Opens the record, and closes it as finished, failed or stopped at the end of the context."""
        return nullcontext()

    def on(self, event: Event) -> None:
        """Receives an event of the run."""

    def run_ids(self, title: str) -> RunIds:
        """The run ids of a running stage for its manifest; may wait shortly for a run that is being created."""
        return RunIds()

    def trial_begins(self, number: int, params: Mapping[str, str]) -> None:
        """Records the start of a trial of a sweep."""

    def trial_ends(self, number: int, end: TrialEnd) -> None:
        """Records the end of a trial, after ``trial_begins`` of that number."""

    def keep(self, files: Sequence[Path]) -> None:
        """Stores small files of the execution: tables, pages."""

    def execution_id(self) -> str | None:
        """The id of the record; None: not recorded."""
        return None

    @property
    def is_complete(self) -> bool:
        """Whether nothing is missing in the record, which it is not before the end."""
        return True
