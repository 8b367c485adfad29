"""``posttrain serve`` with a trigger, and the runs that it starts."""

import contextlib
import signal
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from tests.command import CONF, Command, wait_until
from tests.prefect_api import PrefectApi


class Server(PrefectApi):
    """The runs that are made from now on."""

    def __init__(self, url: str, auth: str | None = None) -> None:
        super().__init__(url, auth)
        self.url = url
        self._before = {run["id"] for run in self.post("/flow_runs/filter", {})}

    def send(self, event: str) -> None:
        message = {"id": str(uuid.uuid4()), "occurred": datetime.now(UTC).isoformat(), "event": event}
        self.post("/events", [{**message, "resource": {"prefect.resource.id": "our-data"}, "payload": {}}])

    def runs(self) -> list[dict]:
        """Those that a trigger or an automation has started, in order."""
        return [run for run in self._made() if (run["created_by"] and not run["auto_scheduled"]) or self._cause(run)]

    def _cause(self, run: dict) -> set[str]:
        return {tag for tag in run["tags"] if tag.startswith("trigger:")}

    def _made(self) -> list[dict]:
        found = self.post("/flow_runs/filter", {"sort": "EXPECTED_START_TIME_ASC"})
        return [run for run in found if run["id"] not in self._before]

    def scheduled(self) -> list[dict]:
        """Those that a schedule has made and that are completed."""
        return [run for run in self._made() if run["auto_scheduled"] and run["state_type"] == "COMPLETED"]

    def triggers(self) -> list[set[str]]:
        return [self._cause(run) for run in self.runs()]

    def ended(self) -> int:
        return sum(run["state_type"] == "COMPLETED" for run in self.runs())


@contextlib.contextmanager
def serving(server: Server, folder: Path, *overrides: str) -> Iterator[Path]:
    """``posttrain serve`` once it watches, and the file of what it says; ends with the context."""
    command = Command(folder, environment={"PREFECT_API_URL": server.url})
    message = folder / "serve.log"
    process = command.start("serve", "--config-dir", str(CONF), "tracking=none", *overrides, stderr=message)
    try:
        wait_until(lambda: "watches" in message.read_text() or process.poll() is not None, "it watches")
        assert process.poll() is None, message.read_text()
        wait_until(lambda: list(folder.glob("artifacts/watch/*.json")), "it has looked once")
        yield message
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 0, message.read_text()
