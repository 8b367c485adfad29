"""Runs the trials of a sweep: asks for them, starts what is ready and has room, hears what became of it.

One thread, that which called ``drive``, keeps the graph and talks to the proposer; the stages' threads only tell.
"""

import queue
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from flows.stages.execute import execute
from flows.stages.run import Run
from flows.sweep.book import Book
from flows.sweep.graph import Graph, Open
from flows.sweep.planner import PlannedTrial, key_of
from flows.sweep.room import Room
from flows.sweep.trial import Outcome, Proposer, Trial, TrialState
from lineage.errors import ConfigError, PipelineError, PrunedError, StoppedError

Submit = Callable[[str], None]  # the title of a node, to be worked on in a thread that ends with `ended`


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a running stage has reported."""

    title: str
    step: int
    metrics: Mapping[str, float]


Events = queue.Queue[str | Report]
Ended = tuple[Open, TrialState, str]  # a trial, what became of it, and why


class Engine:
    """One execution of a sweep.

    Args:
        run: what all stages share; its plan is that of no trial in particular.
        plan: of a trial.
        first: a trial that the proposer was asked for already.
        limit: trials under way at once.
        events: titles of nodes whose work is over, and reports; from any thread.
    """

    def __init__(
        self, *, run: Run, room: Room, proposer: Proposer, plan: Callable[[Trial], PlannedTrial], book: Book,
        first: Trial | None, limit: int, events: Events,
    ) -> None:  # fmt: skip
        self._run, self._room, self._proposer, self._plan = run, room, proposer, plan
        self._book, self._first, self._limit, self._events = book, first, limit, events
        self._graph = Graph()
        self._errors: dict[str, BaseException | None] = {}  # title -> how its work ended
        self._is_exhausted = first is None

    def drive(self, submit: Submit) -> None:
        """Runs every trial to its end.

        Raises:
            KeyboardInterrupt: it was stopped; the stages still run.
        """
        while True:
            self._open_trials()
            self._start_ready(submit)
            if not self._graph.running():
                return
            event = self._events.get()
            ended = self._judge(event) if isinstance(event, Report) else self._finish(event)
            self._start_ready(submit)  # first: what is told of a trial, plots among it, may take a second
            for opened, state, cause in ended:
                self._end(opened, state, cause)

    def work(self, title: str) -> None:
        """One stage, in a thread of its own.

        Raises:
            PipelineError: it failed.
        """
        node = self._graph.nodes[title]
        run = replace(self._run, plan=node.of.plan, titles={node.planned.name: title})
        try:
            execute(run, node.planned)
            self._errors[title] = None
        except BaseException as error:
            self._errors[title] = error
            raise

    def ended(self, title: str) -> None:
        """The work on a stage is over, or never began; from any thread."""
        self._events.put(title)

    def _open_trials(self) -> None:
        while not self._is_exhausted and len(self._graph.open) < self._limit:
            trial, self._first = self._first or self._proposer.ask(), None
            if trial is None:
                self._is_exhausted = True
                return
            try:
                planned = self._plan(trial)
            except ConfigError as error:  # a sampler may propose what a method refuses
                self._tell(trial, Outcome(state="failed", manifests={}, seconds=0.0, cause=str(error)))
                continue
            for ended in map(_ended, self._graph.add(planned)):
                self._end(*ended)

    def _start_ready(self, submit: Submit) -> None:
        full = set()
        for node in self._graph.ready():
            place = self._room.place(node.planned)
            if place in full or not self._room.take(node.planned):
                full.add(place)  # there, what comes after it would overtake it for ever
                continue
            for opened in self._graph.begin(node):
                self._book.begins(opened.planned.trial)
            submit(node.title)

    def _finish(self, title: str) -> list[Ended]:
        """A stage has ended, and with it these trials."""
        error = self._errors.get(title, PipelineError(f"stage {title}: Prefect ended it before it began"))
        node = self._graph.nodes[title]
        self._room.give_back(node.planned)
        if error is None:
            return [_ended(opened) for opened in self._graph.finish(title)]
        if isinstance(error, StoppedError):
            raise error
        if node.planned.name not in node.of.own and not node.is_ending:
            self._is_exhausted = True  # whatever trial came next would need it too
        cause = error if isinstance(error, PipelineError) else PipelineError(f"stage {title}: {error!r}")
        return [_ended(opened) for opened in self._graph.fail(title, cause)]

    def _judge(self, report: Report) -> list[Ended]:
        """Lets the proposer say of each trial that a stage is part of whether it is to be pruned."""
        ended: list[Ended] = []
        node = self._graph.nodes.get(report.title)
        if node is None:  # it has ended since
            return ended
        for number in sorted(node.trials):
            opened = self._graph.open[number]
            if self._proposer.report(opened.planned.trial, node.planned.name, report.step, report.metrics):
                cause = f"pruned at step {report.step} of {report.title}"
                for unwanted in self._graph.drop(number):
                    self._graph.end(unwanted)
                    self._run.processes.end(unwanted.of.plan.entry(unwanted.planned).path, PrunedError(cause))
                ended.append((opened, "pruned", cause))
        return ended

    def _end(self, opened: Open, state: TrialState, cause: str) -> None:
        plan = opened.planned.plan
        found = {planned.name: planned for planned in plan.stages if key_of(planned) not in opened.left}
        manifests = {name: plan.entry(planned).manifest() for name, planned in found.items()}
        kept = {name: manifest for name, manifest in manifests.items() if manifest}
        times = [each.provenance for name, each in kept.items() if name in opened.planned.own]
        seconds = sum((each.end - each.start for each in times), start=0.0)
        self._tell(opened.planned.trial, Outcome(state=state, manifests=kept, seconds=seconds, cause=cause))

    def _tell(self, trial: Trial, outcome: Outcome) -> None:
        self._proposer.tell(trial, self._book.ends(trial, outcome))


def _ended(opened: Open) -> Ended:
    return (opened, "complete", "") if opened.error is None else (opened, "failed", str(opened.error))
