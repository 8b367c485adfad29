import threading
import time

import pytest

from flows.stages import admission
from lineage.errors import StoppedError


def go_on() -> None:
    """The run is not being stopped."""


def test_no_more_is_admitted_than_the_machine_has(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(admission, "count_cpus", lambda: 2)
    running, most, lock = [0], [0], threading.Lock()

    def work(cpus: int) -> None:
        with admission.admitted(cpus, 0, go_on):
            with lock:
                running[0] += cpus
                most[0] = max(most[0], running[0])
            time.sleep(0.05)
            with lock:
                running[0] -= cpus

    threads = [threading.Thread(target=work, args=(cpus,)) for cpus in (1, 2, 1, 2, 1, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert running == [0]
    assert most == [2]


def test_a_request_for_more_than_there_is_gets_all(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(admission, "count_cpus", lambda: 2)
    with admission.admitted(64, 0, go_on) as gpus:
        assert gpus == ()


def test_gpus_are_given_by_index(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(admission, "_count_gpus", lambda: 2)
    monkeypatch.setattr(admission, "count_cpus", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with admission.admitted(1, 1, go_on) as first, admission.admitted(1, 1, go_on) as second:
        assert sorted((*first, *second)) == ["0", "1"]


def test_gpus_are_those_that_a_scheduler_has_named(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert admission.visible_gpus() == ["3", "5"]


def test_who_waits_for_room_can_be_stopped(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(admission, "count_cpus", lambda: 1)

    def stop() -> None:
        raise StoppedError("stopped")

    with admission.admitted(1, 0, go_on), pytest.raises(StoppedError), admission.admitted(1, 0, stop):
        pass
