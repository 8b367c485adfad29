"""The process of the Prefect server that we start: it serves on a socket that it is given, as long as we live."""

import os
import socket
import sys
import threading
from typing import TYPE_CHECKING

from filelock import FileLock

from flows.prefect_address import prefect_home

if TYPE_CHECKING:
    from starlette.middleware.trustedhost import TrustedHostMiddleware


def _serve(descriptor: int) -> None:
    """Serves on an inherited socket until the parent's end of stdin closes."""

    def watch() -> None:
        sys.stdin.buffer.read()
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
    import uvicorn

    os.umask(0o077)  # its database holds the parameters of runs
    # Two servers that migrate one fresh database break it: one starts at a time.
    home = prefect_home()
    home.mkdir(parents=True, exist_ok=True)
    starting = FileLock(home / "posttrain-start.lock", mode=0o600)  # who may read it can hold it
    starting.acquire()

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets=sockets)
            starting.release()

    config = uvicorn.Config(_app, factory=True, log_level="error", lifespan="on")
    Server(config).run(sockets=[socket.socket(fileno=descriptor)])


def _app() -> "TrustedHostMiddleware":
    """Prefect's application, for requests that name this machine: a web page whose name leads here has another Host.

    Prefect has no setting for it.
    """
    from prefect.server.api.server import create_app
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    return TrustedHostMiddleware(create_app(), allowed_hosts=["127.0.0.1", "localhost"])


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
