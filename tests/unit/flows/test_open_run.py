import contextlib
import os
import shutil
from pathlib import Path

import pytest

from flows.declare.config import load_pipeline
from flows.operate.rehearsal import scratch_plan
from flows.planning.plan import make_plan
from flows.progress.run_record import RUN_VARIABLE, read_run_record, run_ids, run_record_path
from flows.reports.run import views
from flows.reports.status import status_text
from flows.run import Trials, open_run, prepare_run
from flows.stages.launch import StageProcesses
from lineage.errors import ArtifactError
from tests.finished import finish


@pytest.fixture
def plan(toy):
    return toy("tracking=none")


def the_note(plan):
    [run_id] = run_ids(plan.pipeline.store)
    return read_run_record(run_record_path(plan.pipeline.store, run_id))


def test_what_a_run_starts_bears_its_id(plan, monkeypatch):
    monkeypatch.setenv(RUN_VARIABLE, "another")
    with open_run(plan, [], None, []):
        assert os.environ[RUN_VARIABLE] == the_note(plan).id


def test_a_run_imports_beforehand_what_its_methods_need_and_no_more(plan, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(StageProcesses, "warm_up", lambda _, modules: asked.append(modules))
    default = make_plan(load_pipeline([f"store={tmp_path}/default", "tracking=none"]))
    for each, names in ((plan, ["data", "model"]), (plan, ["left"]), (default, ["evaluate"]), (default, ["dpo"])):
        with open_run(each, [], None, [each.stage(name) for name in names]):
            pass
    steps, evaluate, dpo = asked  # of stages that need none of it no process is started
    begin, *trains = steps
    assert begin == "flows.stages.imports_begin" and "ray.train.torch" in trains
    assert "torch" in evaluate and not set(trains) & set(evaluate)
    assert dpo == [*evaluate, *trains]


def test_listeners_hear_of_a_wait_when_it_changes_and_not_at_each_poll(plan):
    heard = []
    with open_run(plan, [], lambda each: heard.append((each.state, each.text)), []) as run:
        for reason in ("1 CPU", "1 CPU", "1 CPU", "a pool", "1 CPU"):
            run.wait(plan.stage("left"), reason)
    assert heard == [("waiting", "1 CPU"), ("waiting", "a pool"), ("waiting", "1 CPU")]


def test_the_note_of_a_sweep_says_that_it_is_one(plan):
    trials = Trials(folder=Path("s"), own=frozenset(["right", "left"]), count=4)
    with open_run(plan, [], None, plan.stale, trials):
        sweep = the_note(plan).sweep
        assert list(the_note(plan).stages) == ["data", "model"]
    assert sweep and (sweep.folder, sweep.own, sweep.trials) == ("s", ["left", "right"], 4)


def test_a_rehearsal_is_noted_in_the_real_store_with_its_command(plan, tmp_path):
    short = scratch_plan(plan.pipeline, plan.pipeline.store / "rehearsals" / "1", num_steps=2, save_steps=1)
    with contextlib.suppress(KeyboardInterrupt), open_run(short, ["x=1"], None, [], in_flow=False, command="rehearse"):
        shown = status_text(plan.pipeline.store, *views(plan.pipeline.store))
        assert "  toy  rehearse  runs since" in shown
        raise KeyboardInterrupt
    assert the_note(plan).outcome == "stopped"
    shown = status_text(plan.pipeline.store, *views(plan.pipeline.store))
    assert "start again with: posttrain rehearse x=1" in shown


def test_what_is_found_finished_is_claimed_before_anything_is_reported_of_it(plan):
    finish(plan)
    done = make_plan(plan.pipeline)
    os.utime(done.entry(done.stage("data")).output, (0, 0))
    prepare_run(done)
    assert done.entry(done.stage("data")).output.stat().st_mtime > 0
    shutil.rmtree(done.entry(done.stage("data")).path)
    with pytest.raises(ArtifactError, match="run again"):
        prepare_run(done)
