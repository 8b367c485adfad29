"""A Prefect server of our own, while it starts."""

import contextlib
import signal
import subprocess
import threading
import urllib.request
from types import SimpleNamespace

import pytest

from flows.prefect_server import EmbeddedServer
from lineage.errors import PipelineError


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts one whose processes have these exit codes; None: it lives, and answers."""

    def begin(*codes):
        left = list(codes)

        def start_process(*args, **settings):
            code = left.pop(0)
            return SimpleNamespace(poll=lambda: code, wait=lambda: None, kill=lambda: None)

        def asked(*args, **settings):
            if left:
                raise ConnectionRefusedError
            return contextlib.nullcontext()

        monkeypatch.setattr(subprocess, "Popen", start_process)
        monkeypatch.setattr(urllib.request, "urlopen", asked)
        monkeypatch.setattr(EmbeddedServer, "_keep", lambda self, process: None)
        server = EmbeddedServer(tmp_path / "log")
        server.start()
        try:
            server.wait_until_ready()
        finally:
            server.stop()
        return left

    return begin


def test_one_that_is_killed_while_it_starts_is_started_again(start):
    assert start(-signal.SIGKILL, -signal.SIGKILL, None) == []


@pytest.mark.parametrize("code", [1, -signal.SIGSEGV])
def test_one_that_ends_by_itself_would_do_so_again(start, code):
    with pytest.raises(PipelineError, match="did not start"):
        start(code, None)


def test_what_a_dead_one_was_told_may_be_lost_before_another_is_started(tmp_path, monkeypatch):
    server, ended, paused = EmbeddedServer(tmp_path / "log"), threading.Event(), threading.Event()
    monkeypatch.setattr(server._stopped, "wait", lambda seconds: paused.set() or ended.wait(60))
    keeper = threading.Thread(target=server._keep, args=(SimpleNamespace(wait=lambda: None),))
    keeper.start()
    assert paused.wait(60) and server.was_replaced
    server.stop()
    ended.set()
    keeper.join()
