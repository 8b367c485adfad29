import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from lineage import lease as lease_module
from lineage.errors import ArtifactError, PipelineError, StageError, StoppedError
from lineage.lease import Lease, acquire_or
from lineage.manifest import Manifest, Provenance
from lineage.store import Store


def manifest(**changes) -> Manifest:
    provenance = Provenance(
        start=0.0, end=1.0, hosts=["here"], python="3.11", libraries={}, git_commit=None, git_dirty=None,
        code_digest="c", seed=0, resources={},
    )  # fmt: skip
    fields = {
        "pipeline": "p", "stage": "dpo", "method": "m", "recipe": {"beta": 0.1}, "fingerprint": "f" * 64, "inputs": {},
        "files": {"model.txt": "d"}, "output_digest": "o", "metrics": {"loss": 1.0}, "provenance": provenance,
    }  # fmt: skip
    return Manifest(**{**fields, **changes})


@pytest.fixture
def entry(tmp_path):
    entry = Store(tmp_path).entry("dpo", "f" * 64)
    entry.begin()
    (entry.output / "model.txt").write_text("weights")
    return entry


def test_directory_is_named_by_the_first_16_digits(tmp_path):
    assert Store(tmp_path).entry("dpo", "0123456789abcdef" + "0" * 48).path == tmp_path / "dpo" / "0123456789abcdef"


def test_manifest_survives_the_round_trip():
    assert Manifest.from_json(manifest().to_json()) == manifest()


def test_without_a_manifest_an_output_is_unfinished(entry):
    assert not entry.is_finished()


def test_commit_finishes(entry):
    lease = Lease(entry.path)
    assert lease.try_acquire()
    entry.commit(manifest(), lease)
    assert entry.is_finished()
    assert not entry.work.exists()


def test_a_kill_between_output_and_manifest_leaves_it_unfinished(entry, monkeypatch):
    lease = Lease(entry.path)
    lease.try_acquire()
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        entry.commit(manifest(), lease)
    assert not entry.is_finished()


def test_a_missing_output_file_is_not_finished(entry):
    lease = Lease(entry.path)
    lease.try_acquire()
    entry.commit(manifest(), lease)
    (entry.output / "model.txt").unlink()
    assert not entry.is_finished()


def test_a_manifest_that_cannot_be_read_says_what_to_do(entry):
    (entry.path / "manifest.json").write_text("{}")
    with pytest.raises(ArtifactError, match=r"delete .* to make it again"):
        entry.manifest()


def test_a_second_contender_does_not_get_the_lease(tmp_path):
    first, second = Lease(tmp_path), Lease(tmp_path)
    assert first.try_acquire()
    assert not second.try_acquire()
    with first.holding():
        pass
    assert second.try_acquire()


def test_who_lost_the_lease_does_not_commit(entry):
    lost, winner = Lease(entry.path), Lease(entry.path)
    lost.try_acquire()
    (entry.path / "lock").unlink()
    winner.try_acquire()
    with pytest.raises(ArtifactError, match="was lost"):
        entry.commit(manifest(), lost)
    assert not entry.is_finished()


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


def test_a_silent_holder_on_another_host_is_replaced_after_expiry(tmp_path):
    other = {"host": "elsewhere", "pid": 1, "started": 0.0, "token": "t"}
    lock = tmp_path / "lock"
    lock.write_text(json.dumps(other))
    assert not Lease(tmp_path).try_acquire()
    silent = time.time() - lease_module.EXPIRY_SECONDS - 1
    os.utime(lock, (silent, silent))
    assert Lease(tmp_path).try_acquire()


def test_waiting_ends_when_the_holder_finishes(tmp_path):
    Lease(tmp_path).try_acquire()
    answers = iter([False, True])
    waits = []
    assert acquire_or(Lease(tmp_path), lambda: next(answers), lambda: waits.append(1)) is False
    assert waits == [1]


def test_errors_cross_process_borders():
    import pickle

    error = pickle.loads(pickle.dumps(StageError("dpo", "out of memory", "stage.log")))
    assert str(error) == "stage dpo failed: out of memory (log: stage.log)"
    assert isinstance(error, PipelineError)


def test_waiting_ends_when_the_run_is_stopped(tmp_path):
    Lease(tmp_path).try_acquire()

    def waiting():
        raise StoppedError("stopped")

    with pytest.raises(StoppedError):
        acquire_or(Lease(tmp_path), lambda: False, waiting)


def test_a_silent_but_living_holder_of_this_host_keeps_the_lease(tmp_path):
    Lease(tmp_path).try_acquire()
    silent = time.time() - lease_module.EXPIRY_SECONDS - 1
    os.utime(tmp_path / "lock", (silent, silent))  # suspended with Ctrl-Z, say: its stage goes on
    assert not Lease(tmp_path).try_acquire()


def test_a_killed_holder_that_nobody_has_reaped_is_dead(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    holder = {"host": socket.gethostname(), "pid": process.pid, "token": "t"}
    holder["started"] = psutil.Process(process.pid).create_time()
    (tmp_path / "lock").write_text(json.dumps(holder))
    assert not Lease(tmp_path).try_acquire()
    process.kill()
    while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert Lease(tmp_path).try_acquire()
    process.wait()


def test_a_damaged_manifest_of_another_artifact_is_passed_over(entry):
    (entry.path / "manifest.json").write_text("{")
    assert list(Store(entry.path.parents[1]).finished("dpo")) == []
