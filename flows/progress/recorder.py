"""Keeps the record of a run, which ``posttrain status`` reads, up to date."""

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from flows.planning.advice import origins
from flows.planning.plan import Plan, PlannedStage
from flows.planning.reads import claim, reads
from flows.planning.verdicts import refusals
from flows.progress.run_record import Outcome, RunRecord, StageRecord, SweepRecord, end_of, new_id, run_record_path
from lineage.errors import PipelineError
from lineage.filesystem.owner import HEARTBEAT_SECONDS, Owner
from lineage.mlflow.address import shown, tracking_uri
from lineage.record.tracker import Event, Tracker

_BURST_SECONDS = 0.1  # changes that come together are one write
_TEXT_LENGTH = 4000
# Keys of values of stages, and of their common defaults.
_OF_STAGES = re.compile(
    r"stages\.[^.]+\.(method|evaluation)\.|(adapter|quantization|optimizer|lr_schedule|precision|save)\b"
)


class RunRecorder:
    """Keeps the record of one run: while it waits, while it runs a plan, and until Prefect knows how it ended.

    Args:
        store: of the record.
        cli_args: the options and overrides of the command.
        in_flow: whether Prefect orders its stages.
        command: of ``posttrain``.
    """

    def __init__(
        self, store: Path, pipeline: str, cli_args: Sequence[str], *, in_flow: bool = True, command: str = "run"
    ) -> None:
        self._store = store
        self._plan: Plan | None = None
        self._tracker = Tracker()
        self._lock = threading.RLock()  # around a change and its write
        self._changed = threading.Event()
        self._closed = threading.Event()
        self._written: RunRecord | None = None
        self.record = RunRecord(
            id=new_id(), pipeline=pipeline, cli_args=list(cli_args), driver=Owner.here(), started=time.time(),
            stages={}, in_flow=in_flow, command=command,
        )  # fmt: skip

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Starts the heartbeat; at the end writes the outcome, unless that of a plan is there."""
        thread = threading.Thread(target=self._keep, daemon=True, name="run-record")
        thread.start()
        try:
            with self._recorded_end():
                yield
        finally:
            self._closed.set()
            self._changed.set()
            thread.join()

    @contextlib.contextmanager
    def running(
        self, plan: Plan, tracker: Tracker, stages: Sequence[PlannedStage], sweep: SweepRecord | None = None
    ) -> Iterator[None]:
        """Records the run of a plan, and at its end the outcome.

        Args:
            stages: those that the run is to produce, which it shows before they begin, but for those that trials own.
            sweep: None: it is none.

        Raises:
            ArtifactError: what the plan reuses was deleted before the record protected it.
        """
        self._plan, self._tracker = plan, tracker
        mlflow = shown(tracking_uri(plan.pipeline.tracking.uri)) if plan.pipeline.tracking.mlflow else None
        names = list(dict.fromkeys(planned.name for planned in stages))
        waits = {each.name: plan.waits(each) for each in stages if not (sweep and each.name in sweep.own)}
        expected = {
            name: replace(self._blank(plan, name), after=[other for other in names if other in waits[name]])
            for name in waits
        }
        with self._recorded_end(lambda: self._verdict(replace(plan, stages=list(stages) or plan.stages))):
            with self._lock:
                links = replace(self.record.links, mlflow=mlflow)
                set_by = {key: place for key, place in origins(plan.pipeline).items() if _OF_STAGES.match(key)}
                self.record = replace(self.record, stages=expected, links=links, sweep=sweep, origins=set_by)
            self.claim([plan])
            yield

    @contextlib.contextmanager
    def _recorded_end(self, verdict: Callable[[], tuple[Outcome, str]] = lambda: ("done", "")) -> Iterator[None]:
        """Writes how a context ended, unless that is written."""
        end: tuple[Outcome, str] = "failed", ""
        try:
            yield
            end = verdict()
        except BaseException as error:
            end = end_of(error)
            raise
        finally:
            outcome, cause = end
            now = time.time()
            if self.record.outcome is None:
                self.change(lambda record: replace(record, outcome=outcome, cause=cause[:_TEXT_LENGTH], ended=now))

    def claim(self, plans: Sequence[Plan]) -> None:
        """Records what further plans read too, which ``gc`` then keeps while this run lives.

        Raises:
            ArtifactError: some of it was deleted since its plan was made.
        """
        with self._lock:
            noted = [*self.record.reads, *(key for plan in plans for key in reads(plan))]
            self.record = replace(self.record, reads=list(dict.fromkeys(noted)))
        claim(plans, self._write)

    def change(self, change: Callable[[RunRecord], RunRecord]) -> None:
        """Changes the record, and writes it before anything else happens."""
        with self._lock:
            before, self.record = self.record, change(self.record)
            if self.record != before:
                self._write()

    def on(self, event: Event) -> None:
        """Listens to the run."""
        title, state, text = event.title, event.state, event.text.strip()[:_TEXT_LENGTH]
        if state == "stopped" or self._plan is None:  # the outcome of the run says so
            return
        with self._lock:
            if state == "message":
                self.record = replace(self.record, message=text)
            else:
                before = self.record.stages.get(title) or self._blank(self._plan, title)
                after = replace(
                    before, state=state, since=time.time(), reason=text, seconds=event.seconds,
                    total=event.num_steps or before.total,
                    directory=str(event.start.directory) if event.start else before.directory,
                )  # fmt: skip
                self.record = replace(self.record, stages={**self.record.stages, title: after})
        self._changed.set()

    def _blank(self, plan: Plan, title: str) -> StageRecord:
        """What the plan says of a stage; of one that only a trial of a sweep has, by the stage's name."""
        name = title.partition("#")[0]
        for planned in plan.stages:
            if planned.name == name:
                cpus, gpus = planned.asks
                workers = planned.resources.num_workers
                directory = str(plan.entry(planned).path) if title == name else ""
                return StageRecord(
                    state="pending", since=time.time(), workers=workers, cpus=cpus, gpus=gpus, directory=directory
                )
        return StageRecord(state="pending", since=time.time(), directory="")

    def _keep(self) -> None:
        """Writes changes, or else touches the file, which is the heartbeat that other hosts see."""
        while not self._closed.is_set():
            self._changed.wait(HEARTBEAT_SECONDS)
            self._changed.clear()
            self._write()
            self._closed.wait(_BURST_SECONDS)

    def _write(self) -> None:
        with self._lock, contextlib.suppress(OSError):  # of the store: reported by the stage that needs it
            links = replace(self.record.links, mlflow_run=self._tracker.execution_id())
            record = self.record = replace(self.record, links=links, open_mlflow=not self._tracker.is_complete)
            if record == self._written:
                os.utime(run_record_path(self._store, record.id))
            else:
                record.write(self._store)
                self._written = record

    def _verdict(self, plan: Plan) -> tuple[Outcome, str]:
        """The outcome of a completed run, which may contain failed trials, or a model that its gate refused."""
        failed = [title for title, stage in self.record.stages.items() if stage.state == "failed"]
        if failed:
            return "failed", f"{', '.join(failed)} failed; see posttrain logs {failed[0]}"
        if self.record.sweep:
            return "done", ""  # gates judge trials, not the sweep
        try:
            refused = refusals(plan)
        except (PipelineError, OSError) as error:
            return "failed", str(error)
        return ("refused", refused[0]) if refused else ("done", "")
