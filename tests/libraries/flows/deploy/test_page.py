from types import SimpleNamespace

from flows.deploy import page
from flows.deploy.page import RunPage


def test_a_pruned_stage_is_not_told_as_failed(monkeypatch):
    said = []
    monkeypatch.setattr(page, "_say", said.append)
    shown = RunPage(SimpleNamespace(pipeline=SimpleNamespace(name="toy")))
    shown.pruned("left#1", "pruned at step 3 of left#1")
    shown.failed("left#2", "no memory")
    assert said == ["left#1: pruned at step 3 of left#1", "left#2: FAILED: no memory"]
