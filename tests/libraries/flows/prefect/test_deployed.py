from types import SimpleNamespace

import httpx

from flows.prefect import deployed as module


def test_an_error_that_is_not_foreseen_fails_the_run_and_notifies(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise httpx.ConnectError("the server is gone")

    notified = []
    pipeline = SimpleNamespace(name="toy", store=tmp_path)
    monkeypatch.setattr(module, "flow_run_here", lambda: SimpleNamespace(name="toy 11-21", deployment_version=None))
    monkeypatch.setattr(module, "enter_flow_run", lambda *_, **__: None)
    monkeypatch.setattr(module, "_exit_with_parent", lambda: None)
    monkeypatch.setattr(module, "load_pipeline", lambda *_: pipeline)
    monkeypatch.setattr(module, "notify_of", lambda *said: notified.append(said))
    monkeypatch.setattr(module, "_run_in_turn", fail)
    state = module._run_deployed("toy", SimpleNamespace(words=lambda *_: []), [], any_code=True)
    assert (state.type.value, state.message) == ("FAILED", "ConnectError: the server is gone")
    assert notified == [(pipeline, "toy 11-21", "failed", "ConnectError: the server is gone")]
