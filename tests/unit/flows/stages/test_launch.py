import multiprocessing.context
import os
import sys

import pytest

from flows.stages.job import Job
from flows.stages.launch import StageProcesses
from lineage.errors import PrunedError, StageError, StoppedError
from tasks.context import Launcher, Resources
from tests.toy_methods import ToyModel, ToyTraining


@pytest.mark.parametrize("stopped", [True, False])
def test_a_start_that_a_stop_broke_is_a_stop_and_no_failure(stopped, tmp_path, monkeypatch):
    processes = StageProcesses()

    def start(process):
        if stopped:
            processes._stopped.set()
        raise EOFError("the fork server is gone")

    monkeypatch.setattr(multiprocessing.context.ForkServerProcess, "start", start)
    job = Job(stage="left", method=ToyTraining(), inputs={}, resources=Resources(), directory=tmp_path)
    with pytest.raises(StoppedError if stopped else EOFError):
        processes.run(job)


@pytest.mark.parametrize("when", ["before", "between"])
def test_a_stage_that_nobody_needs_any_more_never_starts_its_work(when, tmp_path, monkeypatch):
    processes, started = StageProcesses(), []
    start = multiprocessing.context.SpawnProcess.start

    def slow_start(process):
        start(process)
        started.append(process)
        processes.end(tmp_path, PrunedError("pruned at step 1"))

    for part in ("output", "work", "logs"):
        (tmp_path / part).mkdir()
    monkeypatch.setattr(multiprocessing.context.SpawnProcess, "start", slow_start)
    if when == "before":
        processes.end(tmp_path, PrunedError("pruned at step 1"))
    job = Job(stage="left", method=ToyModel(), inputs={}, resources=Resources(), directory=tmp_path)
    with pytest.raises(PrunedError, match="pruned at step 1"):
        processes.run(job)
    assert not (tmp_path / "output" / "model.txt").exists()
    assert [process.is_alive() for process in started] == [False] * (when == "between")


def test_a_stage_in_the_commands_own_process_has_the_environment_of_one(tmp_path, monkeypatch):
    def answer(job):
        return {"has": float(os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8")}

    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr("flows.stages.launch.answer", answer)
    resources = Resources(launcher=Launcher.FOREGROUND)
    job = Job(stage="left", method=ToyTraining(), inputs={}, resources=resources, directory=tmp_path)
    assert StageProcesses().run(job) == {"has": 1.0}
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


def test_a_method_that_exits_has_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(ToyModel, "run", lambda method, inputs, ctx: sys.exit(0))
    resources = Resources(launcher=Launcher.FOREGROUND)
    job = Job(stage="model", method=ToyModel(), inputs={}, resources=resources, directory=tmp_path)
    with pytest.raises(StageError, match="SystemExit: 0"):
        StageProcesses().run(job)
