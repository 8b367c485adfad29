"""A sweep from the command line: the union of its trials executed, then the report."""

import contextlib
import json
import queue
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from flows.open_run import Trials, check_machine, note_before, open_run
from flows.prefect_server import embedded_server
from flows.progress.observer import Observers
from flows.progress.screen import Screen
from flows.reports.sweep import sweep_dict, sweep_summary, union_text
from flows.stages.launch import StageProcesses
from flows.stages.run import Run
from flows.stops import stoppable
from flows.sweep.book import Book
from flows.sweep.engine import Engine, Events
from flows.sweep.files import SweepFiles
from flows.sweep.folder import sweep_folder
from flows.sweep.planner import PlannedTrial
from flows.sweep.proposers import make_proposer
from flows.sweep.room import make_room
from flows.sweep.stated import Stated, read_sweep
from flows.sweep.trial import Trial
from flows.sweep.watcher import Watcher
from lineage.errors import PipelineError
from lineage.store import create_store
from lineage.tracker import Tracker

_KEPT = (".csv", ".yaml", ".html", ".md")  # of the sweep's folder: what goes to MLflow too


class _TrialsFailedError(PipelineError):
    """Some trials failed; each has said why."""


def run_sweep(overrides: Sequence[str], config_dir: Path | None, words: Sequence[str], *, as_json: bool) -> int:
    """Executes what no trial has yet and reports; the progress goes to stderr, the result to stdout.

    Args:
        words: of the command, for the record.

    Raises:
        ConfigError: the sweep or one of its trials cannot be run, before anything starts.
        PipelineError: trials failed; all others were run to their end.
        KeyboardInterrupt: it was stopped; nothing is left running, and the same command goes on.
    """
    start = time.perf_counter()
    sweep = _Sweep(read_sweep(overrides, config_dir), words)
    failure = None
    try:
        sweep.run()
    except _TrialsFailedError as error:
        failure = error
    wall = time.perf_counter() - start
    about = sweep.stated, sweep.folder, sweep.files
    told = (
        json.dumps(sweep_dict(*about, wall, sweep.execution_id), indent=2) if as_json else sweep_summary(*about, wall)
    )
    print(told, flush=True)
    if failure:
        raise failure
    return 0


def _start_nothing(title: str) -> None:
    raise AssertionError(title)


def _require_none_failed(book: Book) -> None:
    failure = book.failure()
    if failure:
        raise _TrialsFailedError(failure)


class _Sweep:
    """One execution of a sweep: what its parts need of each other."""

    def __init__(self, stated: Stated, words: Sequence[str]) -> None:
        self.stated, self._words = stated, words
        self._plan = plan = stated.sample.plan
        check_machine(stated.stale)
        self._room = make_room(plan.stages, stated.sweep.parallel)
        create_store(plan.pipeline.store)
        note_before(plan)
        self.folder = sweep_folder(
            plan.pipeline.store, plan.pipeline.name, stated.sweep, stated.params, stated.stages
        )  # fmt: skip
        self._proposer = make_proposer(stated.sweep, stated.space, self.folder)
        self.files = SweepFiles(self.folder, stated.sweep, stated.space, stated.shared_words)
        self.execution_id: str | None = None

    def run(self) -> None:
        """Runs every trial to its end.

        Raises:
            PipelineError: trials failed.
        """
        is_known = self.stated.known is not None
        with stoppable(), self._proposer.at_work(), Screen(sys.stderr, self.stated.titles) as screen:
            first = self._proposer.ask()
            if self.stated.stale if is_known else first:
                self._run(screen, first)
            else:  # no trial has anything to do: their records are read, and that is all
                run = Run(plan=self._plan, processes=StageProcesses(), observer=screen, tracker=Tracker())
                book = self._book(run)
                self._engine(run, book, first, queue.Queue()).drive(_start_nothing)
                _require_none_failed(book)

    def _run(self, screen: Screen, first: Trial | None) -> None:
        known = self.stated.known
        count = self.stated.sweep.num_trials if known is None else len(known)
        trials = Trials(folder=self.folder, own=self.stated.own, count=count)
        with open_run(self._plan, self._words, screen, self.stated.stale, trials) as run:
            with contextlib.suppress(OSError):  # nobody reads stderr: that is no reason not to train
                print(union_text(self.stated), file=sys.stderr, flush=True)
            book = self._book(run)
            self._run_flow(run, book, first)
            run.tracker.keep([path for path in sorted(self.folder.iterdir()) if path.suffix in _KEPT])
            self.execution_id = run.tracker.execution_id()
            _require_none_failed(book)

    def _run_flow(self, run: Run, book: Book, first: Trial | None) -> None:
        log = self._plan.pipeline.store / "logs" / "prefect-server.log"
        events: Events = queue.Queue()
        pruning = self.stated.sweep.pruning
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(embedded_server(log))
            from flows.sweep.flow import run_sweep_flow  # the import of prefect, beside the server's start

            if pruning:
                watcher = stack.enter_context(Watcher(pruning.stage, events.put))
                run = replace(run, observer=Observers(run.observer, watcher))
            if server:
                server.wait_until_ready()
            run_sweep_flow(run, self._engine(run, book, first, events), self.folder.name, book.failure, server)

    def _book(self, run: Run) -> Book:
        return Book(run.tracker, run.observer, self.stated.sweep, self.files, self.stated.own)

    def _engine(self, run: Run, book: Book, first: Trial | None, events: Events) -> Engine:
        run.claim([trial.plan for trial in self.stated.known or ()])
        return Engine(
            run=run, room=self._room, proposer=self._proposer, plan=partial(self._plan_trial, run), book=book,
            first=first, limit=self._limit(), events=events,
        )  # fmt: skip

    def _plan_trial(self, run: Run, trial: Trial) -> PlannedTrial:
        if self.stated.known is not None:
            return self.stated.known[trial.number]
        planned = self.stated.planner.plan(trial)
        check_machine(planned.plan.stale)
        run.claim([planned.plan])
        return planned

    def _limit(self) -> int:
        """Trials under way at once; a sampler learns from those that ended, so it has no more than can run."""
        if self.stated.sweep.parallel is not None:
            return self.stated.sweep.parallel
        if self.stated.known is not None:
            return len(self.stated.known)
        own = [planned for planned in self._plan.stages if planned.name in self.stated.own]
        return max((self._room.times(planned) for planned in own), default=1)
