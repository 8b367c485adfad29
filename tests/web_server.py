"""Web servers on this machine: one that shows a folder, one that keeps what it is sent, one that a test makes up."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

_SAVE = (
    "from prefect.blocks.notifications import CustomWebhookNotificationBlock as Block; import sys; "
    "json = {'subject': '{{subject}}', 'body': '{{body}}'}; "
    "Block(name='team', url=sys.argv[2], json_data=json).save(sys.argv[1], overwrite=True)"
)


@contextlib.contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[ThreadingHTTPServer]:
    """A server that says nothing of its requests; ``url`` is its address."""
    quiet = type("Quiet", (handler,), {"log_message": lambda *_: None})
    with ThreadingHTTPServer(("127.0.0.1", 0), quiet) as server:
        server.url = f"http://127.0.0.1:{server.server_port}"  # type: ignore[attr-defined]
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def site(folder: Path) -> Iterator[str]:
    """The address of a server that shows a folder, for sources behind a URL."""

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *given: object) -> None:
            super().__init__(*given, directory=str(folder))  # type: ignore[arg-type]

    with serving(Handler) as server:
        yield server.url


@contextlib.contextmanager
def webhook() -> Iterator[tuple[str, list[dict[str, str]]]]:
    """The address of a team's chat, and the JSON objects that were posted to it so far."""
    heard: list[dict[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

    with serving(Handler) as server:
        yield f"{server.url}/", heard


def save_block(name: str, url: str, environment: dict[str, str]) -> None:
    """Makes the block ``custom-webhook/NAME`` in the Prefect that an environment names, as a team would."""
    subprocess.run([sys.executable, "-c", _SAVE, name, url], env=environment, check=True, capture_output=True)
