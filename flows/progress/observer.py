"""Who watches a run: the screen, the run record that ``posttrain status`` reads, the page in Prefect."""

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from flows.planning.needs import asks
from flows.planning.plan import Plan, PlannedStage
from flows.planning.reads import claim, reads
from flows.planning.verdicts import judgements
from flows.progress.run_record import (
    Links,
    Outcome,
    RunRecord,
    StageRecord,
    StageState,
    SweepRecord,
    end_of,
    new_id,
    run_record_path,
    with_flow_run,
)
from lineage.errors import PipelineError
from lineage.mlflow.address import shown, tracking_uri
from lineage.owner import HEARTBEAT_SECONDS, Owner
from lineage.tracker import Tracker
from tasks.context import Metrics


class Observer(Protocol):
    """Is notified of the state of each stage of a run, from any thread. No method raises where its reader is gone.

    A stage goes by its title: its name, and in a sweep also the trial where only some trials have it.
    """

    def waiting(self, title: str, reason: str) -> None:
        """It waits for something; called repeatedly while it does."""

    def running(self, title: str, metrics: Path, total: int | None) -> None:
        """It began. ``metrics`` is its ``metrics.jsonl``, ``total`` its optimizer steps."""

    def reused(self, title: str) -> None:
        """Another run produced it meanwhile."""

    def done(self, title: str, seconds: float, metrics: Metrics) -> None:
        """It is committed."""

    def failed(self, title: str, cause: str) -> None:
        """It raised, or was stopped."""

    def pruned(self, title: str, cause: str) -> None:
        """It was pruned because other trials are better: no failure."""

    def announce(self, text: str) -> None:
        """Lines that belong to no single stage."""


class Observers:
    """Several observers as one."""

    def __init__(self, *each: Observer) -> None:
        self._each = each

    def waiting(self, title: str, reason: str) -> None:
        for observer in self._each:
            observer.waiting(title, reason)

    def running(self, title: str, metrics: Path, total: int | None) -> None:
        for observer in self._each:
            observer.running(title, metrics, total)

    def reused(self, title: str) -> None:
        for observer in self._each:
            observer.reused(title)

    def done(self, title: str, seconds: float, metrics: Metrics) -> None:
        for observer in self._each:
            observer.done(title, seconds, metrics)

    def failed(self, title: str, cause: str) -> None:
        for observer in self._each:
            observer.failed(title, cause)

    def pruned(self, title: str, cause: str) -> None:
        for observer in self._each:
            observer.pruned(title, cause)

    def announce(self, text: str) -> None:
        for observer in self._each:
            observer.announce(text)


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
    cpus, gpus = asks(planned)
    workers = planned.stage.resources.num_workers if planned.stage.method.trains else 1
    directory = str(plan.entry(planned).path) if title == name else ""
    return StageRecord(state="pending", since=now, workers=workers, cpus=cpus, gpus=gpus, directory=directory)


_BURST_SECONDS = 0.1  # changes that come together are one write
_TEXT_LENGTH = 4000


class RunRecorder:
    """Keeps the record of one run within its context; every method may be called from any thread.

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

    def waiting(self, title: str, reason: str) -> None:
        known = self._note.stages.get(title)
        if not (known and known.state == "waiting" and known.reason == reason):
            self._set(title, "waiting", reason=reason)

    def running(self, title: str, metrics: Path, total: int | None) -> None:
        self._set(title, "running", directory=metrics.parent, total=total)

    def reused(self, title: str) -> None:
        self._set(title, "reused")

    def done(self, title: str, seconds: float, metrics: Metrics) -> None:
        self._set(title, "done", seconds=seconds)

    def failed(self, title: str, cause: str) -> None:
        self._set(title, "failed", reason=cause[:_TEXT_LENGTH])

    def pruned(self, title: str, cause: str) -> None:
        self._set(title, "pruned", reason=cause[:_TEXT_LENGTH])

    def announce(self, text: str) -> None:
        with self._lock:
            self._note = replace(self._note, said=text.strip()[:_TEXT_LENGTH])
        self._changed.set()

    def _set(
        self, title: str, state: StageState, *, reason: str = "", directory: Path | None = None,
        total: int | None = None, seconds: float = 0.0,
    ) -> None:  # fmt: skip
        now = time.time()
        with self._lock:
            before = self._note.stages.get(title) or blank(self._plan, title, now)
            after = replace(
                before, state=state, since=now, reason=reason, seconds=seconds, total=total or before.total,
                directory=str(directory or before.directory),
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
