"""The lock of a directory: one owner, a dead one's is free at once, a suspended one keeps it."""

import errno
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lineage.errors import ArtifactError, StoppedError
from lineage.filesystem import lock as lock_module
from lineage.filesystem.lock import Lock, acquire_or, owner, require_owned, unreliable_locks
from lineage.filesystem.owner import Owner


def test_a_second_contender_does_not_get_the_lock_and_nothing_is_left_of_it(tmp_path):
    first, second = Lock(tmp_path), Lock(tmp_path)
    assert owner(tmp_path) is None
    assert first.try_acquire()
    assert first.try_acquire()
    assert not second.try_acquire()
    with first.holding():
        assert [path.name for path in tmp_path.iterdir()] == ["lock"]
        found = owner(tmp_path)
        assert found and (found.pid, found.host, found.token) == (os.getpid(), socket.gethostname(), first.token)
    assert list(tmp_path.iterdir()) == [] and owner(tmp_path) is None
    assert second.try_acquire()


_OWN = """
import sys
from pathlib import Path
from lineage.filesystem.lock import Lock
print(Lock(Path(sys.argv[1])).try_acquire(), flush=True)
sys.stdin.read()
"""


def test_the_lock_of_a_suspended_process_is_kept_and_of_a_killed_one_is_free_at_once(tmp_path):
    command = [sys.executable, "-c", _OWN, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout.readline() == "True\n"
    os.kill(process.pid, signal.SIGSTOP)
    found = owner(tmp_path)
    assert not Lock(tmp_path).try_acquire() and found and found.pid == process.pid
    os.kill(process.pid, signal.SIGKILL)
    process.wait(120)
    assert owner(tmp_path) is None
    assert Lock(tmp_path).try_acquire()
    found = owner(tmp_path)
    assert found and found.pid == os.getpid()


def test_who_lost_the_lock_commits_nothing_and_leaves_the_winner_alone(tmp_path):
    lost, winner = Lock(tmp_path), Lock(tmp_path)
    assert lost.try_acquire()
    lost.require()
    with lost.holding():
        (tmp_path / "lock").unlink()
        with pytest.raises(ArtifactError, match="was lost to another process"):
            lost.require()
        assert winner.try_acquire()
        with pytest.raises(ArtifactError, match=f"was lost to process {os.getpid()} on {socket.gethostname()}"):
            lost.require()
    winner.require()
    assert not Lock(tmp_path).try_acquire()


def test_a_forked_child_does_not_keep_a_released_lock(tmp_path):
    lock = Lock(tmp_path)
    assert lock.try_acquire()
    context = multiprocessing.get_context("fork")
    go = context.Event()
    child = context.Process(target=go.wait, args=(30,))
    child.start()
    with lock.holding():
        pass
    assert Lock(tmp_path).try_acquire()
    go.set()
    child.join(120)


def test_waiting_ends_when_the_owner_finishes_or_the_run_is_stopped(tmp_path):
    Lock(tmp_path / "a").try_acquire()
    answers, waits = iter([False, True]), []
    assert acquire_or(Lock(tmp_path / "a"), lambda: next(answers), lambda: waits.append(1)) is False
    assert waits == [1]

    def waiting():
        raise StoppedError("stopped")

    with pytest.raises(StoppedError):
        acquire_or(Lock(tmp_path / "a"), lambda: False, waiting)
    lock = Lock(tmp_path / "entry")
    (tmp_path / "entry").rmdir()  # deleted while it waited, it is made again
    assert acquire_or(lock, lambda: False, lambda: None)
    require_owned(tmp_path / "entry", lock.token)


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock_module.fcntl, "flock", flock)
    with pytest.raises(ArtifactError, match=r"lock: its file system does not support locks; put the store on one"):
        Lock(tmp_path).try_acquire()


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("server:/x /mnt/team nfs4 rw,vers=4.2,local_lock=none 0 0", ""),
        ("server:/x /mnt/team nfs rw,vers=3,nolock,local_lock=all 0 0", "nfs local_lock=all nolock"),
        ("server:/x /mnt/team nfs4 rw,local_lock=flock 0 0", "nfs4 local_lock=flock"),
        ("user@host: /mnt/team fuse.sshfs rw 0 0", "fuse.sshfs"),
        ("user@host: /mnt/other fuse.sshfs rw 0 0", ""),
    ],
)  # fmt: skip
def test_mounts_on_which_hosts_do_not_see_each_other_s_locks(tmp_path, line, why):
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/sda / ext4 rw 0 0\n{line}\n")
    found = unreliable_locks(Path("/mnt/team/store"), mounts)
    assert found == (f"/mnt/team is {why}" if why else "")


@pytest.mark.parametrize(
    ("fields", "dead"),
    [
        ({}, False),
        ({"machine": "another boot, or a container"}, False),  # whose pids say nothing here: only its heartbeat does
        ({"machine": ""}, False),
        ({"started": 0.0}, True),  # another process has its pid now
    ],
)
def test_which_process_of_this_host_is_dead(fields, dead):
    here = Owner.here()
    assert replace(here, **fields).is_dead(0.0) is dead
    assert here.booted is not None  # a clock that is set kills no process
    assert not replace(here, started=here.started - 3600, booted=here.booted - 3600).is_gone()


def test_a_lock_file_of_an_earlier_version_locks_nothing(tmp_path):
    (tmp_path / "lock").write_text('{"host": "el')
    assert owner(tmp_path) is None
    assert Lock(tmp_path).try_acquire()
