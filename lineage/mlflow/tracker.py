"""Records a run in MLflow beside it: no stage waits for MLflow, and none fails with it."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lineage.errors import PrunedError, StoppedError, TakenOverError
from lineage.manifest import Manifest
from lineage.mlflow.address import shown
from lineage.mlflow.open_records import OpenRecord
from lineage.mlflow.worker import Task, Worker
from lineage.tracker import Execution, RunIds, StageStart, TrialEnd

if TYPE_CHECKING:
    from lineage.mlflow.live import LiveRecord

POLL_SECONDS = 1.0
_RUN_IDS_SECONDS = 30.0  # a commit waits no longer than this for the run's id
_CLOSE_SECONDS = 60.0
_STOP_SECONDS = 5.0  # of the 30 that whoever stops us gives; stages that save have had most of them


class MlflowTracker:
    """The tracker of one execution; all that it is told goes to one thread, in order."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._worker = Worker(shown(uri), self._follow, POLL_SECONDS)
        self._live: LiveRecord | None = None
        self._was_stopped = False

    @contextlib.contextmanager
    def execution(self, execution: Execution) -> Iterator[None]:
        """Opens the record, beside all else that starts; closes it with what leaves the context."""
        note = OpenRecord(execution.store)
        with contextlib.suppress(OSError):  # a store that cannot be written is told by whoever needs it
            note.write()
        self._worker.start()
        self._worker.do(partial(self._open, execution))
        try:
            yield
        except BaseException as error:
            stopped = self._was_stopped or not isinstance(error, Exception) or isinstance(error, StoppedError)
            self._close(str(error) or type(error).__name__, stopped=stopped)
            raise
        else:
            self._close(None, stopped=False)
        finally:
            if not self._worker.has_failed():
                note.remove()

    def stage(self, start: StageStart) -> "MlflowStageTracker":
        """Begins the record of a stage; from any thread."""
        tracked = MlflowStageTracker(self, start)
        self.do(partial(self._open_stage, start, tracked.opened))
        return tracked

    def reused(self, title: str, manifest: Manifest) -> None:
        self.do(lambda: self.live().reuse(title, manifest))

    def trial_begins(self, number: int, params: Mapping[str, str]) -> None:
        self.do(lambda: self.live().open_trial(number, params))

    def trial_ends(self, number: int, end: TrialEnd) -> None:
        self.do(lambda: self.live().close_trial(number, end))

    def keep(self, files: Sequence[Path]) -> None:
        self.do(lambda: self.live().keep(files))

    def execution_id(self) -> str | None:
        return self._live.run_id or None if self._live else None

    def do(self, task: Task) -> None:
        """Asks the one thread that writes."""
        self._worker.do(task)

    def live(self) -> "LiveRecord":
        """For the one thread that writes.

        Raises:
            ConnectionError: the record was never opened.
        """
        if self._live is None or not self._live.run_id:
            raise ConnectionError("there is no run of this execution")
        return self._live

    def stopping(self) -> None:
        """A stage was stopped, so the execution is."""
        self._was_stopped = True

    def _open(self, execution: Execution) -> None:
        from lineage.mlflow.client import connect  # takes a second: in this thread, beside the other imports
        from lineage.mlflow.live import LiveRecord

        self._live = LiveRecord(connect(self._uri), shown(self._uri), execution)
        self._live.open()

    def _open_stage(self, start: StageStart, opened: "Future[RunIds]") -> None:
        try:
            opened.set_result(self.live().open_stage(start))
        except Exception:
            opened.set_result(RunIds())
            raise

    def _follow(self) -> None:
        if self._live:
            self._live.follow()

    def _close(self, cause: str | None, *, stopped: bool) -> None:
        self.do(lambda: self.live().close(cause, stopped=stopped))
        self._worker.close(_STOP_SECONDS if stopped else _CLOSE_SECONDS)


class MlflowStageTracker:
    """The record of one running stage."""

    def __init__(self, tracker: MlflowTracker, start: StageStart) -> None:
        self._tracker = tracker
        self._start = start
        self.opened: Future[RunIds] = Future()

    def run_ids(self) -> RunIds:
        """For the manifest; waits a moment for a run that is still being made."""
        try:
            return self.opened.result(_RUN_IDS_SECONDS)
        except TimeoutError:
            return RunIds()

    def finished(self, manifest: Manifest) -> None:
        self._tracker.do(lambda: self._tracker.live().close_stage(manifest))

    def failed(self, error: BaseException) -> None:
        stopped = not isinstance(error, Exception) or isinstance(error, StoppedError)
        if stopped:
            self._tracker.stopping()
        killed = stopped or isinstance(error, PrunedError)
        artifact = self._start.stage, self._start.fingerprint
        if isinstance(error, TakenOverError):
            self._tracker.do(lambda: self._tracker.live().leave_stage(artifact, str(error)))
        else:
            self._tracker.do(lambda: self._tracker.live().end_stage(artifact, str(error), killed=killed))
