"""A server on this machine that keeps what it is sent, as a team's chat would."""

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

_SAVE = (
    "from prefect.blocks.notifications import CustomWebhookNotificationBlock as Block; import sys; "
    "json = {'subject': '{{subject}}', 'body': '{{body}}'}; "
    "Block(name='team', url=sys.argv[2], json_data=json).save(sys.argv[1], overwrite=True)"
)


def save_block(name: str, url: str, environment: dict[str, str]) -> None:
    """Makes the block ``custom-webhook/NAME`` in the Prefect that an environment names, as a team would."""
    subprocess.run([sys.executable, "-c", _SAVE, name, url], env=environment, check=True, capture_output=True)


@contextlib.contextmanager
def webhook() -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Its address, and the JSON objects that were posted to it so far."""
    heard: list[dict[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            """Says nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/", heard
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
