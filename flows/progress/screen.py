"""What the user sees while stages run: a live line per running stage, or a few plain lines without a terminal."""

import contextlib
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.live import Live
from rich.table import Table

from flows.progress.stage_progress import Progress
from flows.wording import printable
from tasks.context import Metrics

PLAIN_INTERVAL_SECONDS = 30.0


class _Stream(Console):
    """A console whose reader may close: rich would end the process, and with it the running stages."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


class Screen:
    """Shows the run on a stream; every method may be called from any thread."""

    def __init__(self, stream: IO[str], names: list[str], plain: bool = False) -> None:
        self._console = _Stream(file=stream, highlight=False)
        self._is_live = self._console.is_terminal and not plain
        self._width = max(map(len, names), default=0)
        self._lock = threading.RLock()
        self._running: dict[str, Progress] = {}
        self._waits: dict[str, str] = {}
        self._done = threading.Event()
        self._live = Live(console=self._console, refresh_per_second=4, get_renderable=self._render, transient=True)

    def __enter__(self) -> "Screen":
        if self._is_live:
            self._live.start()
        else:
            threading.Thread(target=self._plain_progress, daemon=True, name="progress").start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._is_live:
            self._live.stop()

    def waiting(self, name: str, reason: str) -> None:
        """Says once for what a stage waits."""
        with self._lock:
            known = self._waits.get(name) == reason
            self._waits[name] = reason
        if not (known or self._is_live):
            self._say(name, f"waits for {reason}")

    def running(self, name: str, metrics: Path, total: int | None) -> None:
        with self._lock:
            self._waits.pop(name, None)
            self._running[name] = progress = Progress(path=metrics, total=total)
            begun = progress.begun()
        if not self._is_live:
            self._say(name, begun)

    def reused(self, name: str) -> None:
        self._end(name, "reused: another run made it")

    def done(self, name: str, seconds: float, metrics: Metrics) -> None:
        self._end(name, "  ".join([f"done in {seconds:.1f} s", *_highlights(metrics)]))

    def failed(self, name: str, cause: str) -> None:
        self._end(name, f"FAILED: {printable(cause.partition(chr(10))[0])}")

    def pruned(self, name: str, cause: str) -> None:
        self._end(name, cause)

    def announce(self, text: str) -> None:
        """Prints lines that belong to no single stage."""
        with self._lock, contextlib.suppress(OSError):
            self._console.print(text, markup=False, soft_wrap=True)

    def _end(self, name: str, text: str) -> None:
        with self._lock:
            self._waits.pop(name, None)
            self._running.pop(name, None)
        if self._is_live:
            self._live.refresh()  # else the live line of a stage is drawn once more below the line of its end
        self._say(name, text)

    def _say(self, name: str, text: str) -> None:
        with self._lock, contextlib.suppress(OSError):  # the reader is gone; the run continues
            self._console.print(f"{name:<{self._width}}  {text}", markup=False, soft_wrap=True)

    def _render(self) -> Table:
        grid = Table.grid(padding=(0, 2))
        with self._lock:
            for name, line in self._running.items():
                line.refresh()
                grid.add_row(f"{name:<{self._width}}", line.describe())
            for name, reason in self._waits.items():
                grid.add_row(f"{name:<{self._width}}", f"waits for {reason}")
        return grid

    def _plain_progress(self) -> None:
        while not self._done.wait(PLAIN_INTERVAL_SECONDS):
            with self._lock:
                lines = dict(self._running)
                for line in lines.values():
                    line.refresh()
            for name, line in lines.items():
                self._say(name, line.describe())


def _highlights(metrics: Mapping[str, float]) -> list[str]:
    shown = [f"loss {metrics['loss']:.3f}"] if "loss" in metrics else []
    if "tokens_per_second" in metrics:
        shown.append(f"{metrics['tokens_per_second']:,.0f} tok/s")
    return shown
