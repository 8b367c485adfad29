import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from flows.stages import exit_reasons
from flows.stages.exit_reasons import HangWatch
from flows.stages.job import Job
from tasks.context import Launcher, Resources
from tasks.train.loop.heartbeat import HeartbeatFile, Phase
from tests.command import wait_until
from tests.toy_methods import ToyModel, ToyTraining

HERE = socket.gethostname()
STACK = 'Timeout (0:00:54)!\nThread 0x{thread:016x} (most recent call first):\n  File "{file}", line 7 in wait\n'


class Clock:
    """Time as a test sets it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(exit_reasons, "time", found)
    return found


@pytest.fixture
def job(tmp_path, monkeypatch) -> Job:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "work").mkdir()
    (tmp_path / "logs").mkdir()
    return Job(
        stage="sft", method=ToyTraining(), inputs={}, resources=Resources(hang_minutes=1.0, num_workers=3),
        directory=tmp_path,
    )  # fmt: skip


def alone(job: Job) -> Job:
    return replace(job, resources=replace(job.resources, num_workers=1))


def alive(job: Job, rank: int) -> HeartbeatFile:
    return HeartbeatFile(job.directory / "work", rank, None)


def write_stack(job: Job, rank: int, thread: int, file: str) -> None:
    path = job.directory / "work" / "alive" / f"rank-{rank}.stack"
    path.write_text(STACK.format(thread=thread, file=file))


@pytest.mark.parametrize("phase", [Phase.SAVING, Phase.DONE])
def test_a_worker_that_resumes_is_not_hung_and_one_that_writes_may_take_its_time(job, clock, phase):
    watch, rank = HangWatch(alone(job)), alive(job, 0)
    rank.mark(None, Phase.FETCHING)
    assert watch.hung() is None
    clock.now += 600
    for step in range(3):
        rank.mark(step, Phase.BETWEEN)
        assert watch.hung() is None
        clock.now += 50
    rank.mark(3, phase)
    assert watch.hung() is None
    clock.now += 600
    assert watch.hung() is None


def test_a_worker_that_never_comes_to_its_first_step_is_hung(job, clock):
    watch, rank = HangWatch(alone(job)), alive(job, 0)
    rank.mark(None, Phase.LOADING)
    write_stack(job, 0, threading.get_ident(), "/x/model.py")
    assert watch.hung() is None
    clock.now += 61
    assert f"rank 0 on {HERE} hangs before its first step, loading: no progress for 61 s" in str(watch.hung())


@pytest.mark.parametrize("joined", [False, True])
def test_a_worker_that_never_begins_is_hung(job, clock, monkeypatch, joined):
    if joined:
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    watch = HangWatch(replace(job, resources=replace(job.resources, launcher=Launcher.CLUSTER)))
    clock.now += 119  # processes need time to start, whatever the limit of a step is
    assert watch.hung() is None
    if joined:
        clock.now += 1e5  # that cluster had no room
        assert watch.hung() is None
    for rank in (0, 2):
        alive(job, rank).mark(None, Phase.LOADING)
    watch.hung()
    clock.now += 121
    assert "failed: rank 1 hangs before its first step, starting: no progress for 121 s" in str(watch.hung())


def test_the_worker_that_has_done_least_is_named(job, clock):
    watch = HangWatch(job)
    for rank, (step, phase) in enumerate([(8, Phase.STEPPING), (8, Phase.BETWEEN), (9, Phase.BETWEEN)]):
        alive(job, rank).mark(step, phase)
    assert watch.hung() is None
    clock.now += 61
    assert str(watch.hung()).startswith(
        f"stage sft failed: rank 1 on {HERE} hangs at step 8, between steps: no progress for 61 s (log: "
    )
    assert "rank=0 state=hung" in job.entry.log.read_text()


def test_of_workers_in_the_same_step_one_that_waits_for_the_others_is_not_named(job, clock, monkeypatch):
    watch = HangWatch(job)
    for rank, file in enumerate(["/x/torch/distributed/c10d.py", "/x/model.py", "/x/torch/autograd/graph.py"]):
        alive(job, rank).mark(8, Phase.STEPPING)
        write_stack(job, rank, threading.get_ident(), file)
    watch.hung()
    clock.now += 61
    assert f"rank 1 on {HERE} hangs at step 8, in a step: no progress" in str(watch.hung())
    assert "/x/torch/distributed/c10d.py" in job.entry.log.read_text()


def test_where_there_is_no_limit_nobody_looks(job, clock):
    watch = HangWatch(replace(job, resources=replace(job.resources, hang_minutes=None)))
    alive(job, 0).mark(None, Phase.LOADING)
    assert watch.pause_seconds is None and watch.hung() is None
    clock.now += 1e6
    assert watch.hung() is None


def test_a_stage_that_does_not_train_is_not_watched(job):
    assert HangWatch(replace(job, method=ToyModel())).pause_seconds is None


def test_a_worker_that_stands_still_writes_its_stack(tmp_path):
    rank = HeartbeatFile(tmp_path, 0, 0.01)
    rank.mark(1, Phase.STEPPING)
    path = Path(tmp_path / "alive" / "rank-0.stack")
    wait_until(lambda: "test_hang.py" in path.read_text(), "its stack is there")
    rank.end()
    assert "test_a_worker_that_stands_still_writes_its_stack" in path.read_text()
