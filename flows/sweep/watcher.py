"""Follows what running stages report, for whoever may prune their trials: an observer of the run."""

import threading
from collections.abc import Callable
from pathlib import Path

from flows.sweep.engine import Report
from lineage.metrics_file import ReportFile
from tasks.context import Metrics

_LOOK_SECONDS = 0.2


class Watcher:
    """Follows the stages of one name, as long as its context.

    Args:
        hear: told of every report of a stage before that is done, from a thread of its own or that of the stage.
    """

    def __init__(self, stage: str, hear: Callable[[Report], None]) -> None:
        self._stage, self._hear = stage, hear
        self._running: dict[str, ReportFile] = {}  # by title
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="reports")

    def __enter__(self) -> "Watcher":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def waiting(self, title: str, reason: str) -> None:
        """It reports nothing yet."""

    def running(self, title: str, metrics: Path, total: int | None) -> None:
        if title.partition("#")[0] == self._stage:
            with self._lock:
                self._running[title] = ReportFile(metrics)

    def reused(self, title: str) -> None:
        """It reports nothing."""

    def done(self, title: str, seconds: float, metrics: Metrics) -> None:
        with self._lock:
            self._read(title)  # what came since the last look: of a short stage, all
            self._running.pop(title, None)

    def failed(self, title: str, cause: str) -> None:
        with self._lock:
            self._running.pop(title, None)

    def pruned(self, title: str, cause: str) -> None:
        self.failed(title, cause)

    def announce(self, text: str) -> None:
        """Of no stage."""

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_SECONDS):
            with self._lock:
                for title in self._running:
                    self._read(title)

    def _read(self, title: str) -> None:
        if title in self._running:
            for report in self._running[title].read():
                self._hear(Report(title=title, step=report.step, metrics=report.metrics))
