"""A server of step sessions in this process, on a port of its own; or in a process that a test kills."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from lineage.artifact import Kind
from tasks.recipe import Input


def find(path: str) -> Input:
    return Input(name="policy", kind=Kind.CHECKPOINT, fingerprint="0" * 64, path=Path(path))


class Served:
    """Address, key and engine of a server that runs."""

    def __init__(self, root: Path, **options: object) -> None:
        from flows.steps.engine import Engine, Limits

        self.root = root
        own = {name: options.pop(name) for name in ("max_body_bytes",) if name in options}
        self.engine = Engine(root, find, limits=Limits(**options))  # type: ignore[arg-type]
        self.key = self.engine.records.add_key(f"key-{time.time_ns()}")
        self._own = own
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    @contextlib.contextmanager
    def running(self) -> Iterator["Served"]:
        import uvicorn

        from flows.steps.server import app_of
        from flows.steps.tinker import routes

        app = app_of(self.engine, url=self.url, more=[routes(self.engine)], **self._own)  # type: ignore[arg-type]
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [self._socket]}, daemon=True)
        thread.start()
        while not server.started:
            if not thread.is_alive():
                raise RuntimeError("the server did not start")
            time.sleep(0.01)
        try:
            yield self
        finally:
            server.should_exit = True
            thread.join()
            self._socket.close()
