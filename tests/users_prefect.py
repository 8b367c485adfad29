"""A Prefect server of the user's own, which a test ends and starts again on its port."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from flows.prefect.server import CLIENT_SETTINGS
from lineage.filesystem.remote_files import why_unreachable
from tests.command import REPOSITORY, wait_until


class UsersPrefect:
    """Away, it refuses connections; silent, it takes them and says nothing."""

    def __init__(self, database: Path) -> None:
        self._environment = {
            **os.environ, **CLIENT_SETTINGS, "PYTHONPATH": str(REPOSITORY), "PREFECT__SERVER_FINAL": "1",
            "PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{database}",
        }  # fmt: skip
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/api"

    def start(self) -> None:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", self._port))
            self._port = listener.getsockname()[1]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "flows.prefect.server", str(listener.fileno())], env=self._environment,
                pass_fds=[listener.fileno()], stdin=subprocess.PIPE, start_new_session=True,
            )  # fmt: skip
        wait_until(lambda: not why_unreachable(self.url, 5), "the server answers")

    def leave(self) -> None:
        """SIGKILL."""
        if self._process:
            self._process.kill()
            self._process.wait()

    def hush(self) -> None:
        assert self._process
        self._process.send_signal(signal.SIGSTOP)
