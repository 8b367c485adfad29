from types import SimpleNamespace

import httpx
import pytest

from flows.deploy import deployed_run as module
from flows.deploy.owner import _is_dead


@pytest.fixture
def told(monkeypatch):
    """What whom ``notify`` names was told, of a run whose pipeline stands."""
    told = []
    flow_run = SimpleNamespace(id="1", name="toy 11-21", deployment_version=None)
    monkeypatch.setattr(module.FlowRunContext, "get", lambda: SimpleNamespace(flow_run=flow_run))
    monkeypatch.setattr(module, "_live_with_parent", lambda: None)
    monkeypatch.setattr(module, "sign", lambda _: None)
    monkeypatch.setattr(module, "load_pipeline", lambda *_: "toy")
    monkeypatch.setattr(module, "tell", lambda *said: told.append(said))
    return told


@pytest.mark.parametrize("where", ["sign", "_run_in_turn"])
def test_what_nobody_foresaw_is_told_too(where, told, monkeypatch):
    def fail(*_, **__):
        raise httpx.ConnectError("the server is gone")

    monkeypatch.setattr(module, where, fail)
    state = module.run_deployed("toy", SimpleNamespace(words=lambda *_: []), [], any_code=True)
    assert (state.type.value, state.message) == ("FAILED", "ConnectError: the server is gone")
    assert told == [("toy", "toy 11-21", "failed", "ConnectError: the server is gone")]


@pytest.mark.parametrize(("pool", "dead"), [(None, True), ("team", False)])
def test_a_run_that_waits_for_a_worker_is_not_taken_for_dead(pool, dead):
    state = SimpleNamespace(
        is_pending=lambda: True, is_cancelling=lambda: False, timestamp=SimpleNamespace(timestamp=lambda: 0.0)
    )
    assert _is_dead(SimpleNamespace(labels={}, work_pool_name=pool, state=state)) is dead
