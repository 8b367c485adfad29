"""A Prefect server for the length of one run, when none is given: on loopback, with a password, tied to our life."""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

from flows.doctor import ask_prefect
from flows.prefect_address import configured_api_url, require_reachable, use_own_auth, write_profile
from lineage.errors import ConfigError, PipelineError
from lineage.secrets import redacted

START_TIMEOUT_SECONDS = 180.0
_LONGEST_PAUSE_SECONDS = 60.0  # between two starts of a server that dies again and again
_KILLED = (-signal.SIGKILL, -signal.SIGTERM)  # by somebody, or for want of memory
_SETTLED_SECONDS = 60.0  # one that lived so long is started again at once

CLIENT_SETTINGS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    # What a stage says goes to its log; the screen belongs to the board. Failures are told once, by us.
    "PREFECT_LOGGING_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_INTERNAL_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_TO_API_ENABLED": "false",
    "PREFECT_CLI_WRAP_LINES": "false",
}


class EmbeddedServer:
    """Prefect's API in a process of its own, on the user's own Prefect database.

    The socket stays ours: whoever asks while a server that died is started again waits, and is not refused.

    Args:
        ui: whether its pages are served too, for a person who is asked something.

    Attributes:
        auth: the password, as ``USER:PASSWORD``: the user's PREFECT_SERVER_API_AUTH_STRING, else one for this server.
        profile: a file for the ``prefect`` command, with the address and the password; it is there while the server is.
        was_replaced: whether one has died, and with it what it had been told and not yet written down.
    """

    def __init__(self, log: Path, ui: bool = False) -> None:
        self._log = log
        self._ui = ui
        self._process: subprocess.Popen[bytes] | None = None
        self._environment: dict[str, str] = {}
        self._listener = socket.socket()
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self.url = ""
        self.auth = os.environ.get("PREFECT_SERVER_API_AUTH_STRING") or f"posttrain:{secrets.token_urlsafe(24)}"
        self.profile = Path()
        self.was_replaced = False

    def start(self) -> None:
        """Begins the start, without waiting for it; ``url`` is known at once."""
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._listener.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/api"
        self._environment = {
            **os.environ, **CLIENT_SETTINGS, "PREFECT__SERVER_FINAL": "1", "PREFECT_LOGGING_LEVEL": "WARNING",
            "PREFECT_SERVER_API_AUTH_STRING": self.auth,
            "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": self.url.removesuffix("/api"),
            **self._pages(),
        }  # fmt: skip
        self.profile = write_profile(self.url, self.auth)
        self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        descriptor = self._listener.fileno()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(  # -P: a file in this folder shadows no module of the server's
                [sys.executable, "-P", "-m", "flows.prefect_process", str(descriptor)],
                env=self._environment,
                pass_fds=[descriptor],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for us: the server must live to hear how the run ended
            )
        return self._process

    def _pages(self) -> dict[str, str]:
        """An ephemeral server has no pages; one with pages must tell them its address."""
        if self._ui:
            return {"PREFECT_UI_ENABLED": "true", "PREFECT_UI_API_URL": self.url}
        return {"PREFECT_UI_ENABLED": "false", "PREFECT__SERVER_EPHEMERAL": "1"}

    def wait_until_ready(self) -> None:
        """Waits for the server to answer; from then on it is started again when it dies.

        Raises:
            PipelineError: it ended by itself, or did not answer in time.
        """
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while time.monotonic() < deadline and self._is_starting():
            assert self._process is not None
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
                threading.Thread(target=self._keep, args=(self._process,), daemon=True, name="prefect-server").start()
                return
            time.sleep(0.05)
        raise PipelineError(
            f"Prefect's embedded server did not start; its log is {self._log}. "
            "Start one yourself with `prefect server start` and set PREFECT_API_URL, or look at the log"
        )

    def _is_starting(self) -> bool:
        """One that was killed meanwhile is started again; one that ended by itself would do so again."""
        assert self._process is not None
        code = self._process.poll()
        if code in _KILLED:
            self._start()
        return code is None or code in _KILLED

    def _keep(self, process: "subprocess.Popen[bytes]") -> None:
        pause = 0.0
        while True:
            started = time.monotonic()
            process.wait()
            self.was_replaced |= not self._stopped.is_set()
            lived = time.monotonic() - started
            pause = 0.0 if lived > _SETTLED_SECONDS else min(_LONGEST_PAUSE_SECONDS, 2 * pause + 1)
            self._stopped.wait(pause)
            with self._lock:
                if self._stopped.is_set():
                    return
                process = self._start()

    def stop(self) -> None:
        with self._lock:
            self._stopped.set()
            self._listener.close()
            if self.url:
                self.profile.unlink(missing_ok=True)
            if self._process is not None:
                self._process.kill()  # it holds nothing that its database does not
                self._process.wait()


_EVENTS_SECONDS = 5.0


@contextlib.contextmanager
def embedded_server(log: Path, ui: bool = False) -> Iterator[EmbeddedServer | None]:
    """Starts a server unless the user has one, and points Prefect's client at it.

    Must be entered before a client of ``prefect`` is made: without a URL it would start a server of its own that
    outlives us.
    """
    os.environ.update({name: value for name, value in CLIENT_SETTINGS.items() if name not in os.environ})
    read_settings_again()
    url = configured_api_url()
    if url:
        require_reachable(url)
        use_own_auth(url)
        _require_let_in()
        read_settings_again()
        yield None
        return
    server = EmbeddedServer(log, ui)
    server.start()
    before = os.environ.get("PREFECT_API_AUTH_STRING")  # of another server
    os.environ.update(PREFECT_API_URL=server.url, PREFECT_API_AUTH_STRING=server.auth)
    read_settings_again()
    try:
        yield server
    finally:
        send_events()
        server.stop()
        del os.environ["PREFECT_API_URL"], os.environ["PREFECT_API_AUTH_STRING"]
        if before is not None:
            os.environ["PREFECT_API_AUTH_STRING"] = before
        read_settings_again()


def _require_let_in() -> None:
    """Refuses in one line what Prefect's client would tell by an error of HTTP, at its first call."""
    url = configured_api_url()
    if url and ask_prefect(os.environ)[0] == HTTPStatus.UNAUTHORIZED:
        raise ConfigError(
            f"PREFECT_API_URL={redacted(url)} does not let you in (HTTP 401); set PREFECT_API_AUTH_STRING, "
            "or PREFECT_API_KEY for Prefect Cloud"
        )


def send_events() -> None:
    """Sends what Prefect's client has left for a server that is about to stop, and ends its thread.

    Without a server it retries each event for seconds.
    """
    if "prefect.events.worker" in sys.modules:
        sys.modules["prefect.events.worker"].EventsWorker.drain_all(timeout=_EVENTS_SECONDS)


_read_from: dict[str, str] = {}  # the variables that Prefect's settings were last read from


def read_settings_again() -> None:
    """For a second run in one process: Prefect reads its settings when it is imported, in a tenth of a second."""
    if "prefect.context" not in sys.modules:
        return
    now = {name: value for name, value in os.environ.items() if name.startswith("PREFECT_") or name == "HOME"}
    if now != _read_from:
        sys.modules["prefect.context"].refresh_global_settings_context()
        _read_from.clear()
        _read_from.update(now)
