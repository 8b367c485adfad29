import asyncio
import os
import signal
from types import SimpleNamespace

import anyio
import httpx
import pytest

from flows.prefect import deployed as module
from flows.prefect.deployed import serve


def test_an_error_that_is_not_foreseen_fails_the_run_and_notifies(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise httpx.ConnectError("the server is gone")

    notified = []
    pipeline = SimpleNamespace(name="toy", store=tmp_path)
    monkeypatch.setattr(module, "flow_run_here", lambda: SimpleNamespace(name="toy 11-21", deployment_version=None))
    monkeypatch.setattr(module, "enter_flow_run", lambda *_, **__: None)
    monkeypatch.setattr(module, "_exit_with_parent", lambda: None)
    monkeypatch.setattr(module, "load_pipeline", lambda *_: pipeline)
    monkeypatch.setattr(module, "notify_of", lambda *message: notified.append(message))
    monkeypatch.setattr(module, "_run_in_turn", fail)
    state = module._run_deployed("toy", SimpleNamespace(cli_args=lambda *_: []), [], any_code=True)
    assert (state.type.value, state.message) == ("FAILED", "ConnectError: the server is gone")
    assert notified == [(pipeline, "toy 11-21", "failed", "ConnectError: the server is gone")]


class StartingRunner:
    """Prefect's, to which SIGTERM is sent before it has started, or in the same moment."""

    def __init__(self, before: bool) -> None:
        self.started, self._before, self.stopped = False, before, anyio.Event()

    async def start(self) -> None:
        signal.signal(signal.SIGTERM, lambda *_: asyncio.ensure_future(self.astop()))
        for started in (not self._before, True):
            await anyio.sleep(0.01)
            self.started = self.started or started
            os.kill(os.getpid(), signal.SIGTERM)
        await self.stopped.wait()

    async def astop(self) -> None:
        assert self.started, "stopped before its start"
        self.started = False
        self.stopped.set()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("before", [True, False])
def test_a_server_that_is_stopped_while_it_starts_ends(before: bool) -> None:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    runner = StartingRunner(before)
    try:
        serve(runner)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert runner.stopped.is_set()
