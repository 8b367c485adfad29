"""TensorBoard, Weights & Biases and trackio beside MLflow: a run per stage, written while it reports.

One thread per tracker writes what the stages have reported; no stage waits for it, or fails because of it.
"""

import contextlib
import contextvars
import json
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from lineage.errors import StoppedError, TakenOverError
from lineage.filesystem.files import atomic_write
from lineage.fingerprint import short
from lineage.markup import markdown_table
from lineage.record.metrics_file import ReportFile, StageReport
from lineage.record.run_file import RunNames
from lineage.record.tracker import FINAL, Event, Execution, RunIds, StageStart, Tracker, TrialEnd
from lineage.secrets import first_line
from lineage.store import Entry

Status = Literal["finished", "failed", "killed"]
_POLL_SECONDS = 1.0
_CLOSE_SECONDS = 60.0
_STOP_SECONDS = 5.0  # at least; else those that a process manager leaves us, but for the end of Prefect's flow run
_FLOW_SECONDS = 6.0


@dataclass(frozen=True, kw_only=True)
class StageRun:
    """The run of a stage, as trackers name it.

    Args:
        id: of the run, which a resumed stage keeps.
        project, group: of the pipeline and of the execution.
        config: recipe, inputs and tags.
        folder: for the files of trackers.
    """

    id: str
    name: str
    project: str
    group: str
    config: Mapping[str, object]
    folder: Path


class Writer(Protocol):
    """The open run of one stage in a tracker.

    Attributes:
        last_step: that it has of earlier attempts, of which a kill may have lost the end; None: it writes each at once.
    """

    last_step: int | None

    def log(self, report: StageReport) -> None:
        """Adds the metrics of a step."""

    def end(self, status: Status, cause: str, metrics: Mapping[str, float]) -> None:
        """Ends the run, with the stage's final metrics where it has finished."""


class TensorBoard:
    """Event files below ``logs/tensorboard`` of the store: ``tensorboard --logdir`` shows them."""

    last_step: int | None = None

    def __init__(self, run: StageRun) -> None:
        from tensorboardX import SummaryWriter

        folder = run.folder / "tensorboard" / run.project / f"{run.name} {run.id}"
        self._writer = SummaryWriter(str(folder), filename_suffix=f".{time.time_ns()}")  # else named by the second
        rows = [(name, json.dumps(value)) for name, value in run.config.items()]
        self._writer.add_text("recipe", markdown_table(("field", "value"), rows))

    def log(self, report: StageReport) -> None:
        for name, value in report.metrics.items():
            self._writer.add_scalar(name, value, report.step, walltime=report.time)
        self._writer.flush()

    def end(self, status: Status, cause: str, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(f"{FINAL}{name}", value)
        self._writer.add_text("status", f"{status}: {cause}" if cause else status)
        self._writer.close()


class Wandb:
    """A run of Weights & Biases; ``WANDB_MODE=offline`` writes it below ``logs/wandb`` of the store.

    A resumed offline run is written anew: W&B keeps its last seconds in memory, and ``wandb sync`` uploads one folder.
    """

    def __init__(self, run: StageRun) -> None:
        import wandb

        run.folder.mkdir(parents=True, exist_ok=True)
        earlier = [*(run.folder / "wandb").glob(f"offline-run-*-{run.id}")]
        self._run = wandb.init(
            project=run.project, name=run.name, group=run.group, id=run.id, resume="allow", config=dict(run.config),
            dir=str(run.folder), reinit="create_new",
            settings=wandb.Settings(
                silent=True, console="off", x_disable_stats=True, disable_git=True, disable_code=True
            ),
        )  # fmt: skip
        self.last_step: int | None = self._run.starting_step - 1
        for each in earlier if self._run.offline else ():
            if each != Path(self._run.dir).parent:
                shutil.rmtree(each, ignore_errors=True)

    def log(self, report: StageReport) -> None:
        self._run.log(dict(report.metrics), step=report.step)

    def end(self, status: Status, cause: str, metrics: Mapping[str, float]) -> None:
        self._run.summary.update({f"{FINAL}{name}": value for name, value in metrics.items()} | {"cause": cause})
        self._run.finish(exit_code={"finished": 0, "failed": 1, "killed": 255}[status])  # 255: as by Ctrl-C


class Trackio:
    """A run of trackio, in the folder or on the server that its own variables name."""

    def __init__(self, run: StageRun) -> None:
        import trackio

        for module in (trackio, trackio.run, trackio.utils):  # stdout is ours: `run --json` prints one object there
            module.print = _silent
        # In a context of its own: it would end the run that this thread opened before.
        self._run = contextvars.Context().run(
            trackio.init, project=run.project, name=f"{run.name} {run.id}", group=run.group, config=dict(run.config),
            resume="allow", embed=False, auto_log_gpu=False, auto_log_cpu=False,
        )  # fmt: skip
        self._levels = trackio.AlertLevel
        held = getattr(self._run, "_next_step", 0) - 1
        is_known = held >= 0 or getattr(self._run, "_is_local", False)  # a server may not have answered
        self.last_step: int | None = held if is_known else None

    def log(self, report: StageReport) -> None:
        self._run.log(dict(report.metrics), step=report.step)

    def end(self, status: Status, cause: str, metrics: Mapping[str, float]) -> None:
        """It knows no states: the last alert of a run is its state."""
        if metrics:
            self._run.log({f"{FINAL}{name}": value for name, value in metrics.items()})
        level = {"finished": "INFO", "failed": "ERROR", "killed": "WARN"}[status]
        self._run.alert(title=status, text=cause, level=self._levels[level])
        self._run.finish()


def _silent(*words: object, **options: object) -> None:
    """In place of ``print``."""


class _Stage:
    """A stage whose run is open, or whose end is not written.

    Args:
        note: the file with the id of its run, and the last step that the tracker has.
    """

    def __init__(self, title: str, run: StageRun, start: StageStart, note: Path, last: int) -> None:
        self.title, self.run, self.note, self.last = title, run, note, last
        self.reports = ReportFile(Entry(start.directory).metrics)
        self.writer: Writer | None = None
        self.ended: tuple[Status, str, Mapping[str, float]] | None = None


class StageTracker(Tracker):
    """Records the stages of one execution in one tracker; what fails there is reported once, and the run continues.

    Args:
        name: of the tracker, as the settings have it.
        open_run: opens the run of a stage.
        names: of the execution.
        seconds_left: that a stop may still take.
    """

    def __init__(
        self, name: str, open_run: Callable[[StageRun], Writer], names: RunNames,
        seconds_left: Callable[[], float] = float,
    ) -> None:  # fmt: skip
        self._name, self._open_run, self._names, self._seconds_left = name, open_run, names, seconds_left
        self._stages: list[_Stage] = []
        self._woken = threading.Event()
        self._is_closing = False
        self._is_reported = False

    @contextlib.contextmanager
    def execution(self, execution: Execution) -> Iterator[None]:
        """Opens the record; at its end writes what is left, and ends the runs of stages that did not."""
        self._execution = execution
        self._names = self._names.filled(execution.pipeline, time.time())
        thread = threading.Thread(target=self._write, daemon=True, name=self._name)
        thread.start()
        end: tuple[Status, str] = "killed", "the run ended"
        is_stopped = False
        try:
            yield
        except BaseException as error:
            is_stopped = not isinstance(error, Exception) or isinstance(error, StoppedError)
            end = "killed" if is_stopped else "failed", str(error) or type(error).__name__
            raise
        finally:
            for stage in list(self._stages):
                stage.ended = stage.ended or (*end, {})
            self._is_closing = True
            self._woken.set()
            thread.join(max(_STOP_SECONDS, self._seconds_left() - _FLOW_SECONDS) if is_stopped else _CLOSE_SECONDS)
            if thread.is_alive():
                self._report("it did not take the end of the run in time")

    def on(self, event: Event) -> None:
        if event.start:
            self._stages.append(self._begun(event.title, event.start))
        elif event.state == "done" and event.manifest:
            self._end(event.title, "finished", "", event.manifest.metrics)
        elif event.error:
            is_killed = event.state != "failed" or isinstance(event.error, TakenOverError)
            self._end(event.title, "killed" if is_killed else "failed", event.text, {})
        self._woken.set()

    def _begun(self, title: str, start: StageStart) -> _Stage:
        """A stage that starts: a resumed one continues the run of the attempt before."""
        known, note = start.manifest, start.directory / f"{self._name}.json"
        held: dict[str, object] = {}
        with contextlib.suppress(OSError, ValueError):
            held = json.loads(note.read_text()) if start.resumes else {}
        own = f"{short(known.fingerprint)}-{int(known.provenance.start):x}"
        inputs = {slot: f"{each.artifact}@{short(each.fingerprint)}" for slot, each in known.inputs.items()}
        run = StageRun(
            id=str(held.get("id", own)), name=title.replace("/", "-"), project=self._names.experiment or known.pipeline,
            group=self._names.run_name or f"{known.pipeline} {time.strftime('%Y-%m-%d %H:%M:%S')}",
            config={"stage": known.stage, **known.recipe, "inputs": inputs, "tags": dict(self._names.tags)},
            folder=self._execution.store / "logs",
        )  # fmt: skip
        last = held.get("step", -1)
        return _Stage(title, run, start, note, last if isinstance(last, int) else -1)

    def _end(self, title: str, status: Status, cause: str, metrics: Mapping[str, float]) -> None:
        for stage in list(self._stages):
            if stage.title == title and stage.ended is None:
                stage.ended = status, cause, metrics

    def _write(self) -> None:
        """The thread."""
        is_last = False
        while not is_last:
            self._woken.wait(_POLL_SECONDS)
            self._woken.clear()
            is_last = self._is_closing
            for stage in list(self._stages):
                try:
                    self._sync(stage)
                except Exception as error:  # of a library of its own: no common base
                    self._report(first_line(error))
                    self._stages.remove(stage)

    def _sync(self, stage: _Stage) -> None:
        ended = stage.ended  # before the reports are read, so that none is lost
        if stage.writer is None:
            stage.writer = self._open_run(stage.run)
            if stage.writer.last_step is not None:
                stage.last = stage.writer.last_step
            atomic_write(stage.note, json.dumps({"id": stage.run.id, "step": stage.last}))
        new = [report for report in stage.reports.read() if report.step > stage.last]
        for report in new:
            stage.writer.log(report)
            stage.last = report.step
        if new:
            atomic_write(stage.note, json.dumps({"id": stage.run.id, "step": stage.last}))
        if ended:
            self._stages.remove(stage)
            stage.writer.end(*ended)

    def _report(self, cause: str) -> None:
        if not self._is_reported:
            self._is_reported = True
            with contextlib.suppress(OSError):  # stderr is closed
                print(
                    f"posttrain: tracking.{self._name}: {cause}; the run continues, and part of it is missing there",
                    file=sys.stderr, flush=True,
                )  # fmt: skip


class Trackers(Tracker):
    """Several trackers of one execution; the first one gives the ids."""

    def __init__(self, first: Tracker, others: Sequence[Tracker]) -> None:
        self._first, self._all = first, (first, *others)

    @contextlib.contextmanager
    def execution(self, execution: Execution) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for each in self._all:
                stack.enter_context(each.execution(execution))
            yield

    def on(self, event: Event) -> None:
        for each in self._all:
            each.on(event)

    def run_ids(self, title: str) -> RunIds:
        return self._first.run_ids(title)

    def trial_begins(self, number: int, params: Mapping[str, str]) -> None:
        self._first.trial_begins(number, params)

    def trial_ends(self, number: int, end: TrialEnd) -> None:
        self._first.trial_ends(number, end)

    def keep(self, files: Sequence[Path]) -> None:
        self._first.keep(files)

    def execution_id(self) -> str | None:
        return self._first.execution_id()

    @property
    def is_complete(self) -> bool:
        return self._first.is_complete


OPENERS: Mapping[str, Callable[[StageRun], Writer]] = {
    "tensorboard": TensorBoard, "wandb": Wandb, "trackio": Trackio
}  # fmt: skip
