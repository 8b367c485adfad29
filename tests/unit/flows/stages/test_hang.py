import socket
from dataclasses import replace
from pathlib import Path

import pytest

from flows.stages import hang
from flows.stages.hang import HangWatch
from flows.stages.job import Job
from tasks.context import Launcher, Resources
from tasks.steps.alive import Alive, Doing
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
    monkeypatch.setattr(hang, "time", found)
    return found


@pytest.fixture
def job(tmp_path) -> Job:
    (tmp_path / "work").mkdir()
    (tmp_path / "logs").mkdir()
    return Job(
        stage="sft", method=ToyTraining(), inputs={}, resources=Resources(hang_minutes=1.0, num_workers=3),
        directory=tmp_path,
    )  # fmt: skip


def alive(job: Job, rank: int) -> Alive:
    return Alive(job.directory / "work", rank, None)


def write_stack(job: Job, rank: int, thread: int, file: str) -> None:
    path = job.directory / "work" / "alive" / f"rank-{rank}.stack"
    path.write_text(STACK.format(thread=thread, file=file))


def test_a_worker_that_goes_on_is_not_hung_and_one_that_is_done_may_take_its_time(job, clock):
    watch, rank = HangWatch(job), alive(job, 0)
    assert watch.hung() is None  # it loads
    clock.now += 600
    for step in range(3):
        rank.mark(step, Doing.BETWEEN)
        assert watch.hung() is None
        clock.now += 50
    rank.mark(3, Doing.DONE)
    assert watch.hung() is None
    clock.now += 600
    assert watch.hung() is None


def test_the_worker_that_has_done_least_is_named(job, clock):
    watch = HangWatch(job)
    for rank, (step, doing) in enumerate([(8, Doing.STEPPING), (8, Doing.BETWEEN), (9, Doing.BETWEEN)]):
        alive(job, rank).mark(step, doing)
    assert watch.hung() is None
    clock.now += 61
    assert str(watch.hung()).startswith(
        f"stage sft failed: rank 1 on {HERE} hangs at step 8, between steps: nothing came of it for 61 s (log: "
    )
    assert "rank=0 " in job.log.read_text()


def test_of_workers_in_the_same_step_one_that_waits_for_the_others_is_not_named(job, clock, monkeypatch):
    watch = HangWatch(job)
    for rank, file in enumerate(["/x/torch/distributed/c10d.py", "/x/model.py", "/x/torch/autograd/graph.py"]):
        alive(job, rank).mark(8, Doing.STEPPING)
        write_stack(job, rank, __import__("threading").get_ident(), file)
    watch.hung()
    clock.now += 61
    assert "rank 1 on" in str(watch.hung()) and "in a step (wait, /x/model.py:7): nothing" in str(watch.hung())
    assert "/x/torch/distributed/c10d.py" in job.log.read_text()


@pytest.mark.parametrize(
    "fields", [{"hang_minutes": None}, {"launcher": Launcher.FOREGROUND}], ids=["never", "foreground"]
)
def test_where_there_is_no_limit_nobody_looks(job, clock, fields):
    watch = HangWatch(replace(job, resources=replace(job.resources, **fields)))
    alive(job, 0).mark(1, Doing.STEPPING)
    assert watch.pause_seconds is None and watch.hung() is None
    clock.now += 1e6
    assert watch.hung() is None


def test_a_stage_that_does_not_train_is_not_watched(job):
    assert HangWatch(replace(job, method=ToyModel())).pause_seconds is None


def test_it_looks_often_enough_for_twice_the_limit_and_seldom_where_that_is_long(job):
    assert HangWatch(job).pause_seconds == 6
    assert HangWatch(replace(job, resources=Resources(hang_minutes=30.0))).pause_seconds == 10


def test_a_worker_that_stands_still_writes_its_stack(tmp_path):
    rank = Alive(tmp_path, 0, 0.01)
    rank.mark(1, Doing.STEPPING)
    path = Path(tmp_path / "alive" / "rank-0.stack")
    while "test_hang.py" not in path.read_text():
        pass
    rank.end()
