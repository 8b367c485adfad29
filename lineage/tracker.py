"""What a run emits while it goes: events for its listeners, and a record of nothing."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lineage.errors import PrunedError, StoppedError
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
class Event:
    """What a run emits: the new state of one of its stages, or a message.

    Args:
        title: of the stage: its name, and in a sweep also the trial where only some trials have it.
        state: of the stage; ``waiting`` comes repeatedly, ``reused``: another run produced it meanwhile.
        text: what it waits for, why it ended without an output, or the message.
        start: of one that runs.
        num_steps: optimizer steps of one that runs; None: it counts none.
        manifest: of one that is done or reused.
        error: that ended one.
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
        """That a stage took which is done."""
        if self.state != "done" or self.manifest is None:
            return 0.0
        return self.manifest.provenance.end - self.manifest.provenance.start


Listener = Callable[[Event], None]  # may be called from any thread, and raises nothing


def ending_of(title: str, error: BaseException) -> Event:
    """A stage that raised, or was stopped."""
    if isinstance(error, PrunedError):
        return Event(title=title, state="pruned", text=str(error), error=error)
    is_stopped = not isinstance(error, Exception) or isinstance(error, StoppedError)
    return Event(title=title, state="stopped" if is_stopped else "failed", text=str(error), error=error)


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


class Tracker:
    """The record of one execution: nothing (``tracking=none``).

    No method raises, since a lost record ends no training; all may be called from any thread.
    """

    def execution(self, execution: Execution) -> AbstractContextManager[None]:
        """Opens the record; closes it as failed, stopped or finished with what leaves the context."""
        return nullcontext()

    def on(self, event: Event) -> None:
        """Listens to the run."""

    def run_ids(self, title: str) -> RunIds:
        """Of a stage that runs, for its manifest; may wait a moment for a run that is still being created."""
        return RunIds()

    def trial_begins(self, number: int, params: Mapping[str, str]) -> None:
        """A trial of this execution, which is a sweep."""

    def trial_ends(self, number: int, end: TrialEnd) -> None:
        """After ``trial_begins`` of that number."""

    def keep(self, files: Sequence[Path]) -> None:
        """Small files that belong to the execution: tables, pages."""

    def execution_id(self) -> str | None:
        """The id of the record; None: unrecorded."""
        return None
