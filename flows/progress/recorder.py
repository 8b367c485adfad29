"""Keeps the record of a run, which ``posttrain status`` reads, up to date."""

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from flows.planning.plan import Plan, PlannedStage
from flows.planning.reads import claim, reads
from flows.planning.verdicts import judgements
from flows.progress.run_record import (
    Links,
    Outcome,
    RunRecord,
    StageRecord,
    SweepRecord,
    end_of,
    new_id,
    run_record_path,
    with_flow_run,
)
from lineage.errors import PipelineError
from lineage.mlflow.address import shown, tracking_uri
from lineage.owner import HEARTBEAT_SECONDS, Owner
from lineage.tracker import Event, Tracker


def expected(plan: Plan, stages: Sequence[PlannedStage], own: Sequence[str], now: float) -> dict[str, StageRecord]:
    """Of the stages that a run is to make, each with those that come before it.

    Args:
        own: names of those that trials own, which are shown when they begin.
        now: in seconds since the epoch.
    """
    names = list(dict.fromkeys(planned.name for planned in stages))
    before = {planned.name: plan.waits(planned) for planned in stages if planned.name not in own}
    return {
        name: replace(blank(plan, name, now), after=[other for other in names if other in waits])
        for name, waits in before.items()
    }


def blank(plan: Plan, title: str, now: float) -> StageRecord:
    """What the plan says of a stage; of one that only a trial of a sweep has, by the stage's name."""
    name = title.partition("#")[0]
    planned = next((each for each in plan.stages if each.name == name), None)
    if planned is None:
        return StageRecord(state="pending", since=now, directory="")
    cpus, gpus = planned.asks
    workers = planned.stage.resources.num_workers if planned.stage.method.trains else 1
    directory = str(plan.entry(planned).path) if title == name else ""
    return StageRecord(state="pending", since=now, workers=workers, cpus=cpus, gpus=gpus, directory=directory)


_BURST_SECONDS = 0.1  # changes that come together are one write
_TEXT_LENGTH = 4000


class RunRecorder:
    """Keeps the record of one run within its context, as a listener.

    Args:
        words: the options and overrides of the command.
        stages: those that the run is to make, which it shows before they begin, but for those that trials own.
        sweep: None: it is none.
        in_flow: whether Prefect orders them.
        command: of ``posttrain``.
    """

    def __init__(
        self, plan: Plan, words: Sequence[str], tracker: Tracker, stages: Sequence[PlannedStage],
        sweep: SweepRecord | None = None, *, in_flow: bool = True, command: str = "run",
    ) -> None:  # fmt: skip
        self._plan = plan
        self._stages = stages
        self._tracker = tracker
        self._store = plan.home
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._changed = threading.Event()
        self._ended = threading.Event()
        self._written: RunRecord | None = None
        self._api = os.environ.get("PREFECT_API_URL")
        mlflow = shown(tracking_uri(plan.pipeline.tracking.uri)) if plan.pipeline.tracking.mlflow else None
        now = time.time()
        self._note = RunRecord(
            id=new_id(), pipeline=plan.pipeline.name, words=list(words), driver=Owner.here(), started=now,
            stages=expected(plan, stages, sweep.own if sweep else (), now), links=Links(mlflow=mlflow),
            sweep=sweep, in_flow=in_flow, command=command,
        )  # fmt: skip

    @property
    def run_id(self) -> str:
        return self._note.id

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Starts the record; at the end writes the outcome.

        Raises:
            ArtifactError: what the plan reuses was deleted before the record protected it.
        """
        self._link()
        thread = threading.Thread(target=self._keep, daemon=True, name="run-record")
        thread.start()
        outcome: Outcome = "done"
        cause = ""
        try:
            self.claim([self._plan])
            yield
            outcome, cause = self._verdict()
        except BaseException as error:
            outcome, cause = end_of(error)
            raise
        finally:
            self._ended.set()
            self._changed.set()
            thread.join()
            self._note = replace(self._note, outcome=outcome, cause=cause[:_TEXT_LENGTH], ended=time.time())
            self._write()

    def claim(self, plans: Sequence[Plan]) -> None:
        """Records what further plans read too, which ``gc`` then keeps while this run lives.

        Raises:
            ArtifactError: some of it was deleted since its plan was made.
        """
        with self._lock:
            noted = [*self._note.reads, *(key for plan in plans for key in reads(plan))]
            self._note = replace(self._note, reads=list(dict.fromkeys(noted)))
        claim(plans, self._write)

    def on(self, event: Event) -> None:
        """Listens to the run."""
        title, state, text = event.title, event.state, event.text.strip()[:_TEXT_LENGTH]
        if state == "stopped":  # the outcome of the run says so
            return
        with self._lock:
            if state == "message":
                self._note = replace(self._note, said=text)
            else:
                now = time.time()
                before = self._note.stages.get(title) or blank(self._plan, title, now)
                if state == "waiting" and (before.state, before.reason) == (state, text):
                    return
                after = replace(
                    before, state=state, since=now, reason=text, seconds=event.seconds,
                    total=event.num_steps or before.total,
                    directory=str(event.start.directory) if event.start else before.directory,
                )  # fmt: skip
                self._note = replace(self._note, stages={**self._note.stages, title: after})
        self._link()
        self._changed.set()

    def _link(self) -> None:
        is_ours = os.environ.get("PREFECT_API_URL") != self._api  # set since: a server was started for this run
        with self._lock:
            self._note = replace(self._note, links=with_flow_run(self._note.links, is_ours=is_ours))

    def _keep(self) -> None:
        """Writes what changed; else touches the file, which is the heartbeat that other hosts see."""
        while not self._ended.is_set():
            self._changed.wait(HEARTBEAT_SECONDS)
            self._changed.clear()
            self._write()
            self._ended.wait(_BURST_SECONDS)

    def _write(self) -> None:
        with self._writing:  # around the look at what is to be written: no older note comes after a newer one
            with self._lock:
                links = replace(self._note.links, mlflow_run=self._tracker.execution_id())
                note = self._note = replace(self._note, links=links)
            with contextlib.suppress(OSError):  # a store that cannot be written is reported by the stage that needs it
                if note == self._written:
                    os.utime(run_record_path(self._store, note.id))
                else:
                    note.write(self._store)
                    self._written = note

    def _verdict(self) -> tuple[Outcome, str]:
        """A run that came to its end may hold trials that failed, or a model that its gate refused."""
        stages = self._note.stages.items()
        failed = [title for title, stage in stages if stage.state == "failed"]
        if failed:
            return "failed", f"{', '.join(failed)} failed; see posttrain logs {failed[0]}"
        if self._note.sweep:
            return "done", ""  # a gate judges each trial, and none of them the sweep
        made = replace(self._plan, stages=list(self._stages) or self._plan.stages)
        try:
            refusals = [refusal for refusal in (each.refusal() for each in judgements(made)) if refusal]
        except (PipelineError, OSError) as error:
            return "failed", str(error)
        return ("refused", refusals[0]) if refusals else ("done", "")


class WaitingNote:
    """Tells whoever asks from another process of a run that waits, and lets them cancel it.

    Args:
        words: the options and overrides of its command.
    """

    def __init__(self, store: Path, pipeline: str, words: Sequence[str]) -> None:
        self._store = store
        self._note = RunRecord(
            id=new_id(), pipeline=pipeline, words=list(words), driver=Owner.here(), started=time.time(), stages={},
            links=with_flow_run(Links(), is_ours=False),
        )  # fmt: skip
        self._written = 0.0

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Ends the note with what cuts the wait off; else it is gone: a run that begins writes one with its stages."""
        try:
            yield
        except BaseException as error:
            outcome, cause = end_of(error)
            self._write(replace(self._note, outcome=outcome, cause=cause, ended=time.time()))
            raise
        with contextlib.suppress(OSError):
            run_record_path(self._store, self._note.id).unlink(missing_ok=True)

    def waits_for(self, what: str) -> None:
        """Call it at every look that was in vain: that is the heartbeat too, by which another host hears of it."""
        now = time.monotonic()
        if what != self._note.waits_for or now - self._written >= HEARTBEAT_SECONDS:
            self._write(replace(self._note, waits_for=what))
            self._written = now

    def _write(self, note: RunRecord) -> None:
        self._note = note
        with contextlib.suppress(OSError):  # a store that cannot be written is told by whoever needs it
            note.write(self._store)
