"""One stage, with processes that do as they are told."""

import contextlib
import subprocess
import sys
import time

import psutil
import pytest

from flows.declare.config import load_pipeline
from flows.planning.plan import make_plan
from flows.stages import execute as execute_module
from flows.stages.execute import execute
from flows.stages.run import Run
from flows.stages.session import end_left_session
from lineage.attempts import attempts, note_attempt
from lineage.errors import PipelineError, PrunedError, StageError, StoppedError
from lineage.tracker import NoTracker
from tests.command import CONF
from tests.finished import finish, save

LEADER = """
import subprocess, sys, time
from pathlib import Path
from flows.stages.session import note_session
note_session(Path(sys.argv[1]))
left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], process_group=0)
print(left.pid, flush=True)
time.sleep(60)
"""


def leader(work):
    process = subprocess.Popen(
        [sys.executable, "-c", LEADER, str(work)], start_new_session=True, stdout=subprocess.PIPE, text=True
    )
    return process, psutil.Process(int(process.stdout.readline()))


def gone(process):
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


class Heard:
    """What an observer was told."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *told: self.calls.append((name, *told))


class Ending:
    """Processes that all end so."""

    def __init__(self, error):
        self.error = error

    def raise_if_stopped(self):
        pass

    def run(self, job):
        raise self.error


@pytest.fixture
def plan(tmp_path):
    (tmp_path / "rows.txt").write_text("rows")
    words = ["pipeline=toy", "model=none", f"sources.rows.path={tmp_path}/rows.txt", f"store={tmp_path}/store"]
    return make_plan(load_pipeline(words, CONF))


@pytest.mark.parametrize(
    ("error", "heard"),
    [(PrunedError("pruned at step 3"), ("pruned", "data#1", "pruned at step 3")),
     (StageError("data", "no memory", "x"), ("failed", "data#1", "stage data failed: no memory (log: x)"))],
)  # fmt: skip
def test_a_stage_that_is_pruned_is_not_told_as_failed(plan, error, heard):
    observer = Heard()
    run = Run(plan=plan, processes=Ending(error), observer=observer, tracker=NoTracker(), titles={"data": "data#1"})
    with pytest.raises(PipelineError):
        execute(run, plan.stage("data"))
    assert observer.calls[-1] == heard
    assert [call[0] for call in observer.calls if call[0] in ("pruned", "failed")] == [heard[0]]


class Writing:
    """Processes that all write an output."""

    def raise_if_stopped(self):
        pass

    def run(self, job):
        (job.directory / "output" / "model.txt").write_text("weights")
        return {"loss": 1.0}


@pytest.fixture
def half_done(toy):
    """A plan with all but ``left``, which other code has trained up to its checkpoint of step 4, and one step more."""
    plan = toy()
    finish(plan, "data", "model")
    entry = plan.entry(plan.stage("left"))
    save(entry, 4)
    note_attempt(entry.path, 0, "other code")
    entry.metrics.write_text("".join(f'{{"step": {step}, "time": 0, "metrics": {{}}}}\n' for step in range(1, 6)))
    return plan


def test_a_run_that_is_stopped_while_it_waits_has_begun_nothing(half_done, monkeypatch):
    @contextlib.contextmanager
    def stopped(*args):
        raise StoppedError("the run was stopped")
        yield

    entry = half_done.entry(half_done.stage("left"))
    before = entry.metrics.read_text()
    monkeypatch.setattr(execute_module, "admitted", stopped)
    with pytest.raises(StoppedError):
        execute(
            Run(plan=half_done, processes=Writing(), observer=Heard(), tracker=NoTracker()), half_done.stage("left")
        )
    assert [each.step for each in attempts(entry.path)] == [0]
    assert entry.metrics.read_text() == before


def test_the_manifest_names_all_code_that_trained_it(half_done):
    run = Run(plan=half_done, processes=Writing(), observer=Heard(), tracker=NoTracker())
    made_by = execute(run, half_done.stage("left")).manifest.provenance
    assert made_by.resumed_at == [4]
    assert made_by.code_digests == ["other code", half_done.stage("left").code_digest]


def test_what_a_killed_process_has_left_is_ended_by_the_next_attempt(plan):
    planned = plan.stage("data")
    entry = plan.entry(planned)
    entry.open()
    process, left = leader(entry.work)
    end_left_session(entry.work)
    assert process.poll() is None  # a living one is let be, with all that is its own
    process.kill()
    process.wait()
    assert not gone(left)
    processes = Ending(StageError("data", "no rows", "log"))
    with pytest.raises(StageError):
        execute(Run(plan=plan, processes=processes, observer=Heard(), tracker=NoTracker()), planned)
    while not gone(left):
        time.sleep(0.01)
