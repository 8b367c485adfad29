"""A Prefect server for the length of one run, when none is given: on loopback, and tied to our life."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock

from lineage.errors import ConfigError, PipelineError

START_TIMEOUT_SECONDS = 180.0

CLIENT_SETTINGS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    # What a stage says goes to its log; the screen belongs to the board. Failures are told once, by us.
    "PREFECT_LOGGING_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_TO_API_ENABLED": "false",
    "PREFECT_CLI_WRAP_LINES": "false",
}


class EmbeddedServer:
    """Prefect's API in a process of its own, on the user's own Prefect database.

    Args:
        ui: whether its pages are served too, for a person who is asked something.
    """

    def __init__(self, log: Path, ui: bool = False) -> None:
        self._log = log
        self._ui = ui
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def start(self) -> None:
        """Begins the start, without waiting for it; ``url`` is known at once."""
        self._log.parent.mkdir(parents=True, exist_ok=True)
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}/api"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "flows.prefect_server", str(listener.fileno())],
                env={**os.environ, **CLIENT_SETTINGS, "PREFECT__SERVER_FINAL": "1", "PREFECT_LOGGING_LEVEL": "WARNING",
                     **self._pages()},
                pass_fds=[listener.fileno()],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for us: the server must live to hear how the run ended
            )  # fmt: skip
        listener.close()

    def _pages(self) -> dict[str, str]:
        """An ephemeral server has no pages; one with pages must tell them its address."""
        if self._ui:
            return {"PREFECT_UI_ENABLED": "true", "PREFECT_UI_API_URL": self.url}
        return {"PREFECT_UI_ENABLED": "false", "PREFECT__SERVER_EPHEMERAL": "1"}

    def wait_until_ready(self) -> None:
        """Waits for the server to answer.

        Raises:
            PipelineError: it ended, or did not answer in time.
        """
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
        if self._process is not None:
            self._process.kill()  # it holds nothing that its database does not
            self._process.wait()


def configured_api_url() -> str | None:
    """The Prefect API that the user has set, by variable or by profile."""
    if os.environ.get("PREFECT_API_URL"):
        return os.environ["PREFECT_API_URL"]
    profiles = _prefect_home() / "profiles.toml"
    if "PREFECT_API_URL" not in (profiles.read_text() if profiles.exists() else ""):
        return None  # prefect itself need not be asked, which takes seconds to import
    from prefect.settings import PREFECT_API_URL

    url = PREFECT_API_URL.value()
    return str(url) if url else None


def _require_reachable(url: str) -> None:
    """Asks once, instead of leaving it to the client's long retries.

    Raises:
        ConfigError: nothing answers there.
    """
    try:
        urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=10).close()
    except urllib.error.HTTPError:
        return  # it answers; whether it lets us in is the client's affair
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"PREFECT_API_URL={url}: no Prefect server answers there ({error}); start it, mend the URL, "
            "or unset it for an embedded server"
        ) from error


def _prefect_home() -> Path:
    return Path(os.environ.get("PREFECT_HOME", "~/.prefect")).expanduser()


@contextlib.contextmanager
def embedded_server(log: Path, ui: bool = False) -> Iterator[EmbeddedServer | None]:
    """Starts a server unless the user has one, and points Prefect's client at it.

    Must be entered before ``prefect`` is imported: its settings are read then, and without a URL it
    would start a server of its own that outlives us.
    """
    os.environ.update({name: value for name, value in CLIENT_SETTINGS.items() if name not in os.environ})
    url = configured_api_url()
    if url:
        _require_reachable(url)
        yield None
        return
    server = EmbeddedServer(log, ui)
    server.start()
    os.environ["PREFECT_API_URL"] = server.url
    try:
        yield server
    finally:
        server.stop()
        del os.environ["PREFECT_API_URL"]


def _serve(descriptor: int) -> None:
    """Serves on an inherited socket until the parent's end of stdin closes."""

    def watch() -> None:
        sys.stdin.buffer.read()
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
    import uvicorn

    # Two servers that migrate one fresh database break it: one starts at a time.
    home = _prefect_home()
    home.mkdir(parents=True, exist_ok=True)
    starting = FileLock(home / "posttrain-start.lock")
    starting.acquire()

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets=sockets)
            starting.release()

    app = "prefect.server.api.server:create_app"
    config = uvicorn.Config(app, factory=True, log_level="error", lifespan="on")
    Server(config).run(sockets=[socket.socket(fileno=descriptor)])


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
