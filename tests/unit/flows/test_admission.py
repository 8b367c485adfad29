import threading
import time

from flows import admission


def test_no_more_is_admitted_than_the_machine_has(monkeypatch, tmp_path):
    monkeypatch.setattr(admission.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(admission, "count_cpus", lambda: 2)
    running, most, lock = [0], [0], threading.Lock()

    def work(cpus: int) -> None:
        with admission.admitted(cpus, 0):
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
    monkeypatch.setattr(admission.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(admission, "count_cpus", lambda: 2)
    with admission.admitted(64, 0) as gpus:
        assert gpus == ()


def test_gpus_are_given_by_index(monkeypatch, tmp_path):
    monkeypatch.setattr(admission.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(admission, "count_gpus", lambda: 2)
    with admission.admitted(1, 1) as first, admission.admitted(1, 1) as second:
        assert sorted((*first, *second)) == [0, 1]
