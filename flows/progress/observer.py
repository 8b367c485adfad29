"""Who watches a run: the screen, the journal that ``posttrain status`` reads, the page in Prefect."""

from pathlib import Path
from typing import Protocol

from tasks.context import Metrics


class Observer(Protocol):
    """Hears what becomes of the stages of a run, from any thread. No method raises for want of a reader.

    A stage goes by its title: its name, and in a sweep also the trial where only some trials have it.
    """

    def waiting(self, title: str, reason: str) -> None:
        """It waits for something; called again and again while it does."""

    def running(self, title: str, metrics: Path, total: int | None) -> None:
        """It began. ``metrics`` is its ``metrics.jsonl``, ``total`` its optimizer steps."""

    def reused(self, title: str) -> None:
        """Another run has made it meanwhile."""

    def done(self, title: str, seconds: float, metrics: Metrics) -> None:
        """It is committed."""

    def failed(self, title: str, cause: str) -> None:
        """It raised, or was stopped."""

    def pruned(self, title: str, cause: str) -> None:
        """It was ended because other trials do better, which is no failure."""

    def announce(self, text: str) -> None:
        """Lines that belong to no single stage."""


class Observers:
    """Several observers as one."""

    def __init__(self, *each: Observer) -> None:
        self._each = each

    def waiting(self, title: str, reason: str) -> None:
        for observer in self._each:
            observer.waiting(title, reason)

    def running(self, title: str, metrics: Path, total: int | None) -> None:
        for observer in self._each:
            observer.running(title, metrics, total)

    def reused(self, title: str) -> None:
        for observer in self._each:
            observer.reused(title)

    def done(self, title: str, seconds: float, metrics: Metrics) -> None:
        for observer in self._each:
            observer.done(title, seconds, metrics)

    def failed(self, title: str, cause: str) -> None:
        for observer in self._each:
            observer.failed(title, cause)

    def pruned(self, title: str, cause: str) -> None:
        for observer in self._each:
            observer.pruned(title, cause)

    def announce(self, text: str) -> None:
        for observer in self._each:
            observer.announce(text)
