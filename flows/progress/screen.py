"""The display while stages run: a live line per running stage, or a few plain lines without a terminal."""

import contextlib
import threading
from typing import IO

from rich.console import Console
from rich.live import Live
from rich.table import Table

from flows.progress.stage_progress import Progress, line_of, progress_of
from flows.reports.wording import printable
from lineage.record.tracker import Event

PLAIN_INTERVAL_SECONDS = 30.0


class _Stream(Console):
    """A console whose reader may close: rich would end the process, and with it the running stages."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


class Screen:
    """Shows the run on a stream, as a listener."""

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

    def on(self, event: Event) -> None:
        """Listens to the run."""
        title, text = event.title, line_of(event)
        if event.state == "message":
            self._print(text)
        elif event.state == "waiting":
            with self._lock:
                self._waits[title] = text
            if not self._is_live:
                self._say(title, text)
        elif event.start:
            with self._lock:
                self._waits.pop(title, None)
                self._running[title] = progress = progress_of(event, event.start)
                text = progress.begun()
            if not self._is_live:
                self._say(title, text)
        elif event.state != "stopped":
            with self._lock:
                self._waits.pop(title, None)
                self._running.pop(title, None)
            if self._is_live:
                self._live.refresh()  # else the live line of a stage is drawn once more below the line of its end
            self._say(title, printable(text.partition("\n")[0]))

    def _say(self, name: str, text: str) -> None:
        self._print(f"{name:<{self._width}}  {text}")

    def _print(self, text: str) -> None:
        with self._lock, contextlib.suppress(OSError):  # the reader is gone; the run continues
            self._console.print(text, markup=False, soft_wrap=True)

    def _render(self) -> Table:
        grid = Table.grid(padding=(0, 2))
        with self._lock:
            for name, line in self._running.items():
                line.refresh()
                grid.add_row(f"{name:<{self._width}}", line.describe())
            for name, text in self._waits.items():
                grid.add_row(f"{name:<{self._width}}", text)
        return grid

    def _plain_progress(self) -> None:
        while not self._done.wait(PLAIN_INTERVAL_SECONDS):
            with self._lock:
                lines = dict(self._running)
                for line in lines.values():
                    line.refresh()
            for name, line in lines.items():
                self._say(name, line.describe())
