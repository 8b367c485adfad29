"""Records a run in MLflow in one thread; no stage waits for it, or fails because of it."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lineage.errors import PipelineError, StoppedError, TakenOverError
from lineage.filesystem.owner import Owner
from lineage.mlflow.address import connect, shown
from lineage.record.run_file import UNNAMED, RunFile, RunNames
from lineage.record.tracker import Event, Execution, RunIds, StageStart, Tracker, TrialEnd
from lineage.secrets import first_line
from lineage.store import Entry

if TYPE_CHECKING:
    from lineage.mlflow.sync import Mirror

POLL_SECONDS = 1.0
_RUN_IDS_SECONDS = 30.0  # a commit waits no longer than this for the run's id
_CLOSE_SECONDS = 60.0
_STOP_SECONDS = 5.0  # of the 30 that a process manager gives before it kills; stages that save use most of them
_CAUSE_LENGTH = 200


class _Stage:
    """The record of one running stage in MLflow."""

    def __init__(self, title: str, start: StageStart) -> None:
        self.title, self.start, self.began = title, start, start.manifest.provenance.start
        self.entry = Entry(start.directory)
        self.ids: RunIds | None = None
        self.was_tried = False  # to write it
        self.ended: tuple[str, str] | None = None  # status and cause, which the start record has too

    def end(self, status: str, cause: str, writer: Owner) -> None:
        """Notes a failure in the start record, unless that is of another attempt by now."""

        def ended(note: RunFile) -> RunFile:
            is_ours = note.writer and note.writer.token == writer.token
            is_it = is_ours and note.start and note.start.provenance.start == self.began
            return replace(note, status=status, cause=cause) if is_it else note

        if status != "FINISHED":
            with contextlib.suppress(OSError):  # the store is full: the next command closes its run
                RunFile.change(self.start.directory, ended)
        self.ended = status, cause


class MlflowTracker(Tracker):
    """The record of one execution in MLflow.

    One thread writes what MLflow lacks, every second and whenever something happens; what fails is reported once on
    stderr and tried again the next time. What is left at the end, the next command or ``posttrain rebuild`` writes.
    """

    def __init__(self, uri: str, names: RunNames = UNNAMED) -> None:
        self._uri, self._names = uri, names
        self._me = Owner.here()
        self._mirror: Mirror | None = None
        self._stages: list[_Stage] = []  # that run, or whose end is not written
        self._tasks: list[Callable[[Mirror], None]] = []
        self._status: tuple[str, str] | None = None  # of the execution, at its end
        self._was_stopped = False
        self._is_written = True  # all was, the last time
        self._is_closed = False
        self._is_reported = False
        self._changed = threading.Condition()
        self._is_woken = False

    @contextlib.contextmanager
    def execution(self, execution: Execution) -> Iterator[None]:
        """Opens the record, beside all else that starts; closes it with what leaves the context."""
        self._execution, self._start = execution, time.time()
        self._names = self._names.filled(execution.pipeline, self._start)
        thread = threading.Thread(target=self._write, daemon=True, name="mlflow")
        for title, manifest in execution.reused.items():
            self.on(Event(title=title, state="reused", manifest=manifest))
        thread.start()
        status = "FINISHED", ""
        try:
            yield
        except BaseException as error:
            self._was_stopped |= not isinstance(error, Exception) or isinstance(error, StoppedError)
            status = "KILLED" if self._was_stopped else "FAILED", str(error) or type(error).__name__
            raise
        finally:
            for stage in [each for each in self._stages if each.ended is None]:
                stage.end("FAILED" if status[0] == "FAILED" else "KILLED", status[1] or "the run ended", self._me)
            self._status = status
            self.wake()
            seconds = _STOP_SECONDS if self._was_stopped or self._is_reported else _CLOSE_SECONDS
            thread.join(seconds)
            self._is_closed = not thread.is_alive()
            if not self._is_closed:
                self._report(f"no answer within {seconds:.0f} s")

    def on(self, event: Event) -> None:
        title, manifest, error = event.title, event.manifest, event.error
        if event.start:
            self._begin(title, event.start)
        elif event.state == "reused" and manifest:
            self._do(lambda mirror: mirror.runs.reuse(str(mirror.runs.current), {title: mirror.recorded(manifest)}))
        elif event.state == "done":
            self._end(title, "FINISHED", "")
        elif error:
            is_killed = event.state != "failed" or isinstance(error, TakenOverError)
            if self._end(title, "KILLED" if is_killed else "FAILED", event.text):
                self._was_stopped |= event.state == "stopped"

    def _begin(self, title: str, start: StageStart) -> None:
        before, uri = RunFile.read(start.directory), shown(self._uri)
        note = RunFile(
            uri=uri, run_id=before.run_id if before and start.resumes and before.uri == uri else "", execution_id="",
            cli_args=self._execution.cli_args, title=title, names=self._names, resumes=start.resumes, writer=self._me,
            start=start.manifest,
        )  # fmt: skip
        with contextlib.suppress(OSError):
            note.write(start.directory)
        self._stages.append(_Stage(title, start))
        self.wake()

    def _end(self, title: str, status: str, cause: str) -> bool:
        """Ends the record of a stage; False: it has none that is open."""
        stage = self._running(title)
        if stage:
            stage.end(status, cause, self._me)
            self.wake()
        return stage is not None

    def _running(self, title: str) -> _Stage | None:
        running = (each for each in list(self._stages) if each.title == title and each.ended is None)
        return next(running, None)

    def trial_begins(self, number: int, params: Mapping[str, str]) -> None:
        self._do(lambda mirror: mirror.runs.sync_trial(self._execution.pipeline, number, params, None, {}))

    def trial_ends(self, number: int, end: TrialEnd) -> None:
        def write(mirror: "Mirror") -> None:
            stages = {stage: mirror.recorded(manifest) for stage, manifest in end.manifests.items()}
            mirror.runs.sync_trial(self._execution.pipeline, number, {}, end, stages)

        self._do(write)

    def keep(self, files: Sequence[Path]) -> None:
        def write(mirror: "Mirror") -> None:
            for file in files:
                mirror.client.log_artifact(self.execution_id(), str(file))

        self._do(write)

    def execution_id(self) -> str | None:
        return self._mirror.runs.current if self._mirror else None

    @property
    def is_complete(self) -> bool:
        return self._is_closed and self._is_written

    def run_ids(self, title: str) -> RunIds:
        """Of a stage that runs; waits for them while nothing fails."""
        stage = self._running(title)
        if stage is None:
            return RunIds()
        with self._changed:
            self._changed.wait_for(lambda: stage.ids or stage.was_tried, _RUN_IDS_SECONDS)
        return stage.ids or RunIds()

    def wake(self) -> None:
        """Wakes the thread to write now."""
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()

    def _do(self, task: "Callable[[Mirror], None]") -> None:
        self._tasks.append(task)
        self.wake()

    def _write(self) -> None:
        """The thread."""
        status = None
        while status is None:
            with self._changed:
                self._changed.wait_for(lambda: self._is_woken, POLL_SECONDS)
                is_changed, self._is_woken = self._is_woken or not self._is_written, False
            status = self._status
            stages = list(self._stages)
            self._is_written = self._write_all(stages, status, is_changed) or (
                status is not None and self._write_all(list(self._stages), status, True)  # there is no next time
            )
            with self._changed:
                for stage in stages:
                    stage.was_tried = True
                self._changed.notify_all()

    def _write_all(self, stages: list[_Stage], status: tuple[str, str] | None, is_changed: bool) -> bool:
        """Writes what MLflow lacks; a failure does not prevent the other writes. Returns whether nothing failed."""
        if self._mirror is None and not self._attempt(self._open):
            return False
        mirror = self._mirror
        assert mirror
        results = [self._attempt(partial(self._sync_stage, mirror, stage)) for stage in stages]
        for task in list(self._tasks):
            results.append(self._attempt(partial(task, mirror)))
            if results[-1]:
                self._tasks.remove(task)
        results.append(self._attempt(partial(self._sync_execution, mirror, status, is_changed)))
        return all(results)

    def _open(self) -> None:
        from lineage.mlflow.executions import Executions  # takes a second: in this thread, beside the other imports
        from lineage.mlflow.sync import Mirror

        execution = self._execution
        runs = Executions(connect(self._uri), execution.store, self._me)
        runs.open(execution.pipeline, execution.cli_args, execution.folder, self._start, self._names)
        self._mirror = Mirror(runs)

    def _sync_stage(self, mirror: "Mirror", stage: _Stage) -> None:
        ended = stage.ended
        recorded = mirror.sync(stage.entry)
        if recorded:
            parents = tuple(mirror.recorded(each).run_id for each in stage.start.parents.values())
            stage.ids = RunIds(stage=recorded.run_id, execution=mirror.runs.current, parents=parents)
        elif ended:
            mirror.abandon(stage.entry, ended[1])
        if ended:
            self._stages.remove(stage)

    def _sync_execution(self, mirror: "Mirror", status: tuple[str, str] | None, is_changed: bool) -> None:
        runs = mirror.runs
        assert runs.current
        runs.close_rebuilt()
        if is_changed:
            runs.show(runs.current)
        if status:
            if self._execution.folder:
                runs.end_trials(self._execution.pipeline, status[1] or "the sweep ended")
            runs.end(runs.current, *status)

    def _attempt(self, write: Callable[[], None]) -> bool:
        try:
            write()
        except Exception as error:  # errors of MLflow, its HTTP library and its database have no common base
            cause = first_line(error)
            short = cause if len(cause) <= _CAUSE_LENGTH else f"{cause[:_CAUSE_LENGTH]} ..."
            self._report(str(error) if isinstance(error, PipelineError) else short)  # ours says what to do
            return False
        return True

    def _report(self, cause: str) -> None:
        if not self._is_reported:
            self._is_reported = True
            with contextlib.suppress(OSError):  # stderr is closed
                print(
                    f"posttrain: MLflow at {shown(self._uri)}: {cause}; the run continues, part of its record is "
                    "missing there; `posttrain rebuild` fills it in later from the manifests",
                    file=sys.stderr, flush=True,
                )  # fmt: skip
