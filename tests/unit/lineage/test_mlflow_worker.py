"""The thread that writes to MLflow."""

import threading

from lineage.mlflow.worker import Worker


def test_tasks_are_done_in_order_and_the_idle_one_between_them():
    done, idle = [], threading.Event()
    worker = Worker("mlflow", idle.set, interval_seconds=0.01)
    worker.start()
    for number in range(5):
        worker.do(lambda number=number: done.append(number))
    assert idle.wait(5)
    worker.close(5)
    assert done == [0, 1, 2, 3, 4]


def test_a_failure_is_told_once_and_ends_nothing(capsys):
    done = []
    worker = Worker("sqlite:///mlflow.db", lambda: None, interval_seconds=1)
    worker.start()
    for _ in range(3):
        worker.do(lambda: 1 / 0)
    worker.do(lambda: done.append(1))
    worker.close(5)
    assert done == [1]
    told = capsys.readouterr().err
    assert told.count("posttrain: MLflow at sqlite:///mlflow.db: ZeroDivisionError") == 1
    assert "`posttrain rebuild` fills it in later" in told


def test_what_does_not_answer_is_given_up(capsys):
    stuck = threading.Event()
    worker = Worker("http://slow", lambda: None, interval_seconds=1)
    worker.start()
    worker.do(lambda: stuck.wait() and None)
    worker.close(0.05)
    assert "MLflow at http://slow: no answer within 0 s" in capsys.readouterr().err
    stuck.set()
