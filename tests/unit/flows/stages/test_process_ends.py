import os
import signal
from pathlib import Path

import pytest

from flows.declare.pipeline import Stage
from flows.stages.job import Job
from flows.stages.launch import saving_first
from flows.stages.worker import _context
from flows.stops import stoppable
from tasks.context import Launcher, Resources
from tasks.method import Method
from tests.toy_methods import ToyModel, ToyTraining

HERE = Resources(launcher=Launcher.FOREGROUND)


def job_of(method: Method, folder: Path) -> Job:
    (folder / "work").mkdir()
    return Job(stage="left", method=method, inputs={}, resources=HERE, directory=folder)


def interrupted(job: Job, *numbers: int) -> list[bool]:
    """What a stage of this process sees after each signal, until they end it: whether it is asked to stop."""
    seen: list[bool] = []

    def stage() -> None:
        with stoppable(), saving_first(Stage(method=job.method, inputs={}, resources=job.resources), job.stop_file):
            for number in numbers:
                os.kill(os.getpid(), number)
                seen.append(job.is_asked_to_stop())

    with pytest.raises(KeyboardInterrupt):
        stage()
    return seen


def test_a_request_to_stop_is_seen_where_the_host_remembers_that_there_was_none(tmp_path, monkeypatch):
    job = job_of(ToyTraining(), tmp_path)
    should_stop = _context(job).should_stop
    assert not should_stop()
    job.stop_file.touch()
    monkeypatch.setattr(Path, "exists", lambda path: False)  # as NFS does, for up to a minute
    assert should_stop()


def test_a_stage_whose_directory_is_gone_is_not_asked_to_stop(tmp_path):
    job = job_of(ToyTraining(), tmp_path)
    job.stop_file.parent.rmdir()
    assert not job.is_asked_to_stop()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_training_in_this_process_saves_before_a_signal_is_heeded(tmp_path, number):
    assert interrupted(job_of(ToyTraining(), tmp_path), number) == [True]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_second_ctrl_c_is_heeded_at_once(tmp_path):
    job = job_of(ToyTraining(), tmp_path)
    assert interrupted(job, signal.SIGTERM, signal.SIGTERM, signal.SIGINT) == [True, True]


def test_what_has_nothing_to_save_is_not_waited_for(tmp_path):
    assert interrupted(job_of(ToyModel(), tmp_path), signal.SIGTERM) == []
