"""A Prefect server for one command whose user has none: on loopback, with a password, ending with this process.

Nothing restarts it: a run whose server is gone finishes, and the next command reports how it ended. This module is also
the server's process: ``python -m flows.prefect.server DESCRIPTOR`` serves on an inherited socket.
"""

import contextlib
import gc
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from flows.prefect.address import configured_api_url, prefect_home, require_usable, use_own_auth, write_profile
from lineage.errors import PipelineError

if TYPE_CHECKING:
    from starlette.middleware.trustedhost import TrustedHostMiddleware

START_TIMEOUT_SECONDS = 180.0
_EVENTS_SECONDS = 5.0

CLIENT_SETTINGS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    # Stages log to their own files; the screen belongs to the board. We report failures once.
    "PREFECT_LOGGING_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_INTERNAL_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_TO_API_ENABLED": "false",
    "PREFECT_CLI_WRAP_LINES": "false",
}


class EmbeddedServer:
    """Prefect's API in a process of its own, on the user's own Prefect database.

    Args:
        ui: whether to serve the pages too, for approvals.

    Attributes:
        auth: the password, as ``USER:PASSWORD``: the user's PREFECT_SERVER_API_AUTH_STRING, else one for this server.
        profile: a file for the ``prefect`` command, with the address and the password, while the server is there.
    """

    def __init__(self, log: Path, ui: bool = False) -> None:
        self._log = log
        self._ui = ui
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""
        self.auth = os.environ.get("PREFECT_SERVER_API_AUTH_STRING") or f"posttrain:{secrets.token_urlsafe(24)}"
        self.profile = Path()

    def start(self) -> None:
        """Starts the process without waiting for it; ``url`` is known at once."""
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with socket.socket() as listener, self._log.open("ab") as log:
            listener.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{listener.getsockname()[1]}/api"
            self.profile = write_profile(self.url, self.auth)
            # An ephemeral server has no pages; one with pages must know its address.
            pages = {"PREFECT_UI_API_URL": self.url} if self._ui else {"PREFECT__SERVER_EPHEMERAL": "1"}
            self._process = subprocess.Popen(  # -P: a file in this folder shadows no module of the server's
                [sys.executable, "-P", "-m", "flows.prefect.server", str(listener.fileno())],
                env={
                    **os.environ, **CLIENT_SETTINGS, "PREFECT__SERVER_FINAL": "1", "PREFECT_LOGGING_LEVEL": "WARNING",
                    "PREFECT_SERVER_API_AUTH_STRING": self.auth,
                    "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": self.url.removesuffix("/api"),
                    "PREFECT_UI_ENABLED": str(self._ui).lower(), **pages,
                },
                pass_fds=[listener.fileno()], stdin=subprocess.PIPE, stdout=log, stderr=log,
                start_new_session=True,  # Ctrl-C must not reach the server, which has to receive the end of the run
            )  # fmt: skip

    def wait_until_ready(self) -> None:
        """Waits for the server to answer (PipelineError: it exited, or did not answer in time)."""
        assert self._process is not None
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return
            time.sleep(0.05)
        raise PipelineError(
            f"Prefect's embedded server did not start; its log is {self._log}. "
            "Start one yourself with `prefect server start` and set PREFECT_API_URL, or look at the log"
        )

    def stop(self) -> None:
        if self.url:
            self.profile.unlink(missing_ok=True)
        if self._process is not None:
            self._process.kill()  # its database holds all of its state
            self._process.wait()


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
        require_usable(url)
        use_own_auth(url)
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


def send_events() -> None:
    """Sends the pending events of Prefect's client to a server that is about to stop, and ends its thread.

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


def _serve(descriptor: int) -> None:
    """Serves on an inherited socket until the parent's end of stdin closes."""

    def watch() -> None:
        sys.stdin.buffer.read()
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
    gc.disable()  # until it serves: its imports would spend a fifth of their time collecting garbage
    import uvicorn
    from filelock import FileLock

    os.umask(0o077)  # its database holds the parameters of runs
    # Two servers that migrate one fresh database break it: one starts at a time.
    home = prefect_home()
    home.mkdir(parents=True, exist_ok=True)
    starting = FileLock(home / "posttrain-start.lock", mode=0o600)  # anyone who may read it can hold it
    starting.acquire()

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets=sockets)
            gc.enable()
            starting.release()

    config = uvicorn.Config(_app, factory=True, log_level="error", lifespan="on")
    Server(config).run(sockets=[socket.socket(fileno=descriptor)])


def _app() -> "TrustedHostMiddleware":
    """Prefect's application, only for requests whose Host is this machine: a hostile web page's name would be another.

    Prefect has no setting for it.
    """
    from prefect.server.api.server import create_app
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    return TrustedHostMiddleware(create_app(), allowed_hosts=["127.0.0.1", "localhost"])


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
