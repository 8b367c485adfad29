"""Follows what running stages report, for whoever may prune their trials: an observer of the run."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from flows.sweep.engine import Report
from tasks.context import Metrics

_LOOK_SECONDS = 0.2


class Watcher:
    """Follows the stages of one name, as long as its context.

    Args:
        hear: told of every report, from a thread of its own.
    """

    def __init__(self, stage: str, hear: Callable[[Report], None]) -> None:
        self._stage, self._hear = stage, hear
        self._running: dict[str, tuple[Path, int]] = {}  # title -> its reports, and how far they were read
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="reports")

    def __enter__(self) -> "Watcher":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def waiting(self, title: str, reason: str) -> None:
        """It reports nothing yet."""

    def running(self, title: str, metrics: Path, total: int | None) -> None:
        if title.partition("#")[0] == self._stage:
            self._running[title] = metrics, 0

    def reused(self, title: str) -> None:
        """It reports nothing."""

    def done(self, title: str, seconds: float, metrics: Metrics) -> None:
        self._running.pop(title, None)

    def failed(self, title: str, cause: str) -> None:
        self._running.pop(title, None)

    def announce(self, text: str) -> None:
        """Of no stage."""

    def _watch(self) -> None:
        while not self._done.wait(_LOOK_SECONDS):
            for title, (path, offset) in list(self._running.items()):
                content = _read(path, offset)
                whole = content[: content.rfind(b"\n") + 1]
                for report in _reports(title, whole):
                    self._hear(report)
                if title in self._running:
                    self._running[title] = path, offset + len(whole)


def _read(path: Path, offset: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read()
    except OSError:  # it has not begun to report
        return b""


def _reports(title: str, lines: bytes) -> Iterator[Report]:
    for line in lines.splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):  # a kill may have cut a line
            report = json.loads(line)
            yield Report(title=title, step=int(report["step"]), metrics=dict(report["metrics"]))
