"""The lease of a directory: one holder, none lost, a dead one replaced, by nobody's clock but the waiter's own."""

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace

import psutil
import pytest

from lineage import holder as holder_module
from lineage import lease as lease_module
from lineage.errors import ArtifactError, StoppedError
from lineage.lease import Holder, Lease, acquire_or, living_holder, require_held

ELSEWHERE = Holder(host="elsewhere", pid=1, started=0.0, token="t")


class Clock:
    """The waiter's own: monotonic, and moved by hand."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def watch(waiter, clock, seconds):
    """Looks as often as the heart beats, for that long; whether the lease was got."""
    for _ in range(int(seconds / lease_module.HEARTBEAT_SECONDS)):
        clock.now += lease_module.HEARTBEAT_SECONDS
        if waiter.try_acquire():
            return True
    return False


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(lease_module.time, "monotonic", clock)
    return clock


def write(directory, holder, *, age=0.0):
    path = directory / "lock"
    path.write_text(json.dumps(asdict(holder)))
    os.utime(path, (time.time() - age, time.time() - age))
    return path


def test_a_second_contender_does_not_get_the_lease_and_nothing_is_left_of_it(tmp_path):
    first, second = Lease(tmp_path), Lease(tmp_path)
    assert first.try_acquire()
    assert first.try_acquire()
    assert not second.try_acquire()
    with first.holding():
        assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    assert list(tmp_path.iterdir()) == []
    assert second.try_acquire()


def _take_and_sleep(directory, ready):
    assert Lease(directory).try_acquire()
    ready.set()
    time.sleep(60)


def test_the_lease_of_a_killed_process_of_this_host_is_taken_at_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=_take_and_sleep, args=(tmp_path, ready))
    process.start()
    assert ready.wait(30)
    assert not Lease(tmp_path).try_acquire()
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert Lease(tmp_path).try_acquire()
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_a_killed_holder_that_nobody_has_reaped_is_dead(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    started = psutil.Process(process.pid).create_time()
    write(tmp_path, replace(ELSEWHERE, host=socket.gethostname(), pid=process.pid, started=started))
    assert not Lease(tmp_path).try_acquire()
    process.kill()
    while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert Lease(tmp_path).try_acquire()
    process.wait()


def test_a_silent_but_living_holder_of_this_host_keeps_the_lease(tmp_path, clock):
    Lease(tmp_path).try_acquire()
    os.utime(tmp_path / "lock", (0, 0))  # suspended with Ctrl-Z, say: its stage goes on
    waiter = Lease(tmp_path)
    assert not waiter.try_acquire()
    clock.now += 1e6
    assert not waiter.try_acquire()


@pytest.mark.parametrize("skew", [-100.0, 0.0, 100.0], ids=["their clock is behind", "right", "ahead"])
def test_a_holder_elsewhere_is_replaced_when_the_waiter_has_not_heard_of_it_for_the_expiry(tmp_path, clock, skew):
    path, waiter = write(tmp_path, ELSEWHERE, age=-skew), Lease(tmp_path)
    assert not waiter.try_acquire()
    assert not watch(waiter, clock, lease_module.EXPIRY_SECONDS)
    os.utime(path, (time.time() + skew + 1, time.time() + skew + 1))  # a heartbeat
    assert not waiter.try_acquire()
    assert not watch(waiter, clock, lease_module.EXPIRY_SECONDS)
    clock.now += 1
    assert waiter.try_acquire()
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


@pytest.mark.parametrize("away", [90.0, 3600.0])
def test_a_holder_is_not_taken_for_dead_for_an_outage_of_the_store_that_the_waiter_shared(tmp_path, clock, away):
    path, waiter = write(tmp_path, ELSEWHERE, age=0.0), Lease(tmp_path)
    assert not waiter.try_acquire()
    assert not watch(waiter, clock, 10)
    clock.now += away  # one look, in a call that returns when the server does
    os.utime(path, (time.time() - away, time.time() - away))  # as it is known here; the holder writes when it can
    assert not waiter.try_acquire()
    assert not watch(waiter, clock, lease_module.EXPIRY_SECONDS - 15)
    os.utime(path)
    assert not waiter.try_acquire()
    assert not watch(waiter, clock, lease_module.EXPIRY_SECONDS)


def test_silence_that_no_clock_can_explain_needs_no_wait(tmp_path):
    long = holder_module.EXPIRY_SECONDS + holder_module.SKEW_SECONDS
    write(tmp_path, ELSEWHERE, age=long - 10)
    assert not Lease(tmp_path).try_acquire()
    assert living_holder(tmp_path) == ELSEWHERE
    write(tmp_path, ELSEWHERE, age=long + 10)
    assert living_holder(tmp_path) is None
    assert Lease(tmp_path).try_acquire()


def test_a_heir_that_died_has_an_heir(tmp_path, clock):
    """A contender that was killed after it had made itself the heir, and before it took over, blocks nobody."""
    write(tmp_path, ELSEWHERE)
    (tmp_path / "lock.t").write_text(json.dumps(asdict(replace(ELSEWHERE, pid=2, token="heir"))))
    waiter = Lease(tmp_path)
    assert not waiter.try_acquire()
    assert not watch(waiter, clock, lease_module.EXPIRY_SECONDS + 5)  # only then does it watch the heir
    assert watch(waiter, clock, lease_module.EXPIRY_SECONDS + 5)
    waiter.require()
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_a_lock_that_is_half_written_is_somebody_s_until_it_is_silent(tmp_path, clock):
    (tmp_path / "lock").write_text('{"host": "el')
    waiter = Lease(tmp_path)
    assert not waiter.try_acquire()
    (tmp_path / "lock.unreadable-lock").write_text("")  # and so was its heir
    assert not watch(waiter, clock, lease_module.EXPIRY_SECONDS + 5)
    assert watch(waiter, clock, lease_module.EXPIRY_SECONDS + 5)


def test_a_living_heir_is_not_passed_over(tmp_path):
    write(tmp_path, replace(ELSEWHERE, host=socket.gethostname(), machine="", pid=2**30))  # dead
    heir = Lease(tmp_path)
    (tmp_path / "lock.t").write_text(json.dumps(asdict(heir._me)))
    assert not Lease(tmp_path).try_acquire()
    assert heir.try_acquire()


@pytest.mark.parametrize(
    ("fields", "dead"),
    [
        ({}, False),
        ({"machine": "another boot, or a container"}, False),  # whose pids say nothing here: only its silence does
        ({"machine": ""}, False),
        ({"started": 0.0}, True),  # another process has its pid now
    ],
)
def test_who_is_dead_of_this_host(fields, dead):
    assert replace(Holder.here(), **fields).is_dead(0.0) is dead


def test_a_clock_that_is_set_kills_nobody():
    here = Holder.here()
    assert here.booted is not None
    assert not replace(here, started=here.started - 3600, booted=here.booted - 3600).is_gone()


def test_who_lost_the_lease_hears_of_it_and_leaves_the_winner_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(lease_module, "HEARTBEAT_SECONDS", 0.01)
    lost, winner = Lease(tmp_path), Lease(tmp_path)
    assert lost.try_acquire()
    told = []
    heard = threading.Event()
    with lost.holding(lambda why: (told.append(why), heard.set())):
        (tmp_path / "lock").unlink()
        assert winner.try_acquire()
        assert heard.wait(10)
    [why] = told
    assert f"was lost to process {os.getpid()} on {socket.gethostname()}" in str(why)
    winner.require()
    with pytest.raises(ArtifactError, match="was lost"):
        lost.require()


def test_a_heartbeat_outlives_a_store_that_is_away(tmp_path, monkeypatch):
    monkeypatch.setattr(lease_module, "HEARTBEAT_SECONDS", 0.01)
    lease = Lease(tmp_path)
    assert lease.try_acquire()
    away, beat = threading.Event(), threading.Event()

    def utime(path):
        if not away.is_set():
            away.set()
            raise OSError("stale file handle")
        beat.set()

    monkeypatch.setattr(lease_module.os, "utime", utime)
    with lease.holding(pytest.fail):
        assert beat.wait(10)
    require_none = not (tmp_path / "lock").exists()
    assert require_none


def test_a_directory_that_was_freed_while_one_waited_is_made_again(tmp_path):
    directory = tmp_path / "entry"
    lease = Lease(directory)
    directory.rmdir()
    assert acquire_or(lease, lambda: False, lambda: None)
    require_held(directory, lease.token)


def test_waiting_ends_when_the_holder_finishes(tmp_path):
    Lease(tmp_path).try_acquire()
    answers = iter([False, True])
    waits = []
    assert acquire_or(Lease(tmp_path), lambda: next(answers), lambda: waits.append(1)) is False
    assert waits == [1]


def test_waiting_ends_when_the_run_is_stopped(tmp_path):
    Lease(tmp_path).try_acquire()

    def waiting():
        raise StoppedError("stopped")

    with pytest.raises(StoppedError):
        acquire_or(Lease(tmp_path), lambda: False, waiting)
