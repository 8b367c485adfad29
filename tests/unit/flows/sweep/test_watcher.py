"""What is heard of the reports of running stages."""

import json
from queue import SimpleQueue

from flows.sweep import watcher
from flows.sweep.watcher import Watcher


def _report(path, *steps):
    with path.open("a") as file:
        file.writelines(json.dumps({"step": step, "time": 0, "metrics": {"loss": 1.0}}) + "\n" for step in steps)


def test_all_that_a_stage_reported_is_heard_before_it_is_done(tmp_path, monkeypatch):
    monkeypatch.setattr(watcher, "_LOOK_SECONDS", 3600)  # it is done before the first look
    path, heard = tmp_path / "metrics.jsonl", SimpleQueue()
    with Watcher("left", heard.put) as each:
        each.running("left#3", path, 3)
        _report(path, 1, 2, 3)
        each.done("left#3", 0.1, {})
        assert [heard.get().step for _ in range(heard.qsize())] == [1, 2, 3]
        _report(path, 4)
        each.done("left#3", 0.1, {})
        assert heard.empty()


def test_reports_are_heard_while_a_stage_runs_and_each_once(tmp_path, monkeypatch):
    monkeypatch.setattr(watcher, "_LOOK_SECONDS", 0.001)
    path, heard = tmp_path / "metrics.jsonl", SimpleQueue()
    with Watcher("left", heard.put) as each:
        each.running("right", tmp_path / "other.jsonl", 3)
        _report(tmp_path / "other.jsonl", 9)
        each.running("left#3", path, 3)
        _report(path, 1)
        first = heard.get(timeout=10)
        _report(path, 2)
        each.done("left#3", 0.1, {})
        assert (first.title, first.step, first.metrics) == ("left#3", 1, {"loss": 1.0})
        assert [heard.get(timeout=10).step] == [2]
    assert heard.empty()
