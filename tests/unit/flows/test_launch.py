import multiprocessing.context

import pytest

from flows.job import Job
from flows.launch import StageProcesses
from lineage.errors import StoppedError
from tasks.context import Resources
from tests.toy_methods import ToyTraining


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
