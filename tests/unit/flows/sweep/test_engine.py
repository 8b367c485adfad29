"""What the engine takes up next, without processes and without Prefect."""

import contextlib
import queue
from types import SimpleNamespace

import pytest

from flows.stages.run import Run
from flows.sweep import engine as module
from flows.sweep.engine import Engine, Report
from flows.sweep.planner import Planner
from flows.sweep.room import Room
from flows.sweep.trial import Trial
from lineage.errors import PipelineError, PrunedError
from tests.command import CONF

RATES = ("0.2", "0.3", "0.4")


@pytest.fixture
def drive(tmp_path, monkeypatch):
    """Runs three trials one at a time, their stages as told; returns number -> state of those that were taken up."""
    (tmp_path / "rows.txt").write_text("rows")
    words = ["pipeline=toy", "model=none", f"sources.rows.path={tmp_path}/rows.txt", f"store={tmp_path}/store"]

    def drive(execute, is_bad=lambda trial: False):
        states, events = {}, queue.Queue()
        trials = iter([Trial(number=n, params={"stages.left.method.learning_rate": r}) for n, r in enumerate(RATES)])
        proposer = SimpleNamespace(
            ask=lambda: next(trials, None), tell=lambda *_: None, report=lambda trial, *_: is_bad(trial)
        )
        book = SimpleNamespace(
            begins=lambda trial: None, ends=lambda trial, outcome: states.update({trial.number: outcome.state})
        )
        monkeypatch.setattr(module, "execute", lambda run, planned: execute(planned.name))
        processes = SimpleNamespace(end=lambda *_: None)
        each = Engine(
            run=Run(plan=None, processes=processes, observer=None, tracker=None), room=Room((9.0, 0.0)),
            proposer=proposer, plan=Planner(words, config_dir=CONF).plan, book=book, first=proposer.ask(), limit=1,
            events=events,
        )  # fmt: skip

        def submit(title):
            if title == "left#0":
                events.put(Report(title=title, step=1, metrics={}))
            with contextlib.suppress(PipelineError):
                each.work(title)
            each.ended(title)

        each.drive(submit)
        return states

    return drive


def test_a_place_that_is_full_keeps_nothing_from_running_elsewhere():
    nodes = [SimpleNamespace(planned=name, title=name) for name in ("here-1", "here-2", "cluster-1", "here-3")]
    room = SimpleNamespace(place=lambda name: name[:-2], take=lambda name: name in ("here-1", "cluster-1", "here-3"))
    graph, started = SimpleNamespace(ready=lambda: nodes, begin=lambda node: []), []
    engine = SimpleNamespace(_graph=graph, _room=room)
    Engine._start_ready(engine, started.append)
    assert started == ["here-1", "cluster-1"]  # and here-3 does not overtake here-2


def test_after_a_failure_of_what_all_share_no_trial_is_taken_up(drive):
    def execute(stage):
        if stage == "right":
            raise PipelineError("no")

    assert drive(execute) == {0: "failed"}


def test_after_a_failure_of_its_own_the_next_trial_is(drive):
    def execute(stage):
        if stage == "left":
            raise PipelineError("no")

    assert drive(execute) == dict.fromkeys(range(3), "failed")


def test_a_shared_stage_that_is_ended_with_a_pruned_trial_stops_no_other(drive):
    rights = iter([PrunedError("pruned")])

    def execute(stage):
        error = next(rights, None) if stage == "right" else None
        if error:
            raise error

    assert drive(execute, is_bad=lambda trial: trial.number == 0) == {0: "pruned", 1: "complete", 2: "complete"}
