"""The display while stages run: a live line per running stage, or a few plain lines without a terminal."""

import contextlib
import threading
from collections.abc import Mapping
from typing import IO

from rich.console import Console
from rich.live import Live
from rich.table import Table

from flows.progress.stage_progress import Progress, line_of, progress_of
from flows.reports.wording import clock, on_screen
from lineage.record.tracker import Event

PLAIN_INTERVAL_SECONDS = 30.0


class _Stream(Console):
    """A console whose reader may close: rich would end the process, and with it the running stages."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


class Screen:
    """Shows the run on a stream, as a listener."""

    def __init__(
        self, stream: IO[str], names: list[str], plain: bool = False, expected: Mapping[str, float | None] | None = None
    ) -> None:
        """Opens the display of stages.

        Args:
            expected: stage -> its seconds by the plan's estimate; None, or no stage: not known.
        """
        self._console = _Stream(file=stream, highlight=False)
        self._is_live = self._console.is_terminal and not plain
        self._width = max(map(len, names), default=0)
        self._lock = threading.RLock()
        self._left, self._expected = dict.fromkeys(names), expected or {}  # of the stages that have not ended
        self._count = len(names)
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
                self._left.pop(title, None)
            if self._is_live:
                self._live.refresh()  # else the live line of a stage is drawn once more below the line of its end
            style = {"done": "green", "failed": "red"}.get(event.state, "")
            self._say(title, text.partition("\n")[0], style)

    def _say(self, name: str, text: str, style: str = "") -> None:
        self._print(f"{name:<{self._width}}  {text}", style)

    def _print(self, text: str, style: str = "") -> None:
        with self._lock, contextlib.suppress(OSError):  # the reader is gone; the run continues
            self._console.print(on_screen(text), markup=False, soft_wrap=True, style=style)

    def _render(self) -> Table:
        grid = Table.grid(padding=(0, 2))
        with self._lock:
            for name, line in self._running.items():
                line.refresh()
                grid.add_row(f"{name:<{self._width}}", line.describe())
            for name, text in self._waits.items():
                grid.add_row(f"{name:<{self._width}}", text)
            if self._running and self._count > 1:
                grid.add_row(f"{'run':<{self._width}}", self._whole())
        return grid

    def _whole(self) -> str:
        """``stage 6 of 9  ETA 4:10``, with a plus where the time of a stage is not known."""
        lefts = {name: progress.seconds_left() for name, progress in self._running.items()}
        begun = {name: self._expected.get(name) if left is None else left for name, left in lefts.items()}
        coming = [self._expected.get(name) for name in self._left if name not in begun]
        seconds = max((left for left in begun.values() if left is not None), default=0.0)
        seconds += sum(each for each in coming if each is not None)
        more = "+" if None in (*begun.values(), *coming) else ""
        first = self._count - len(self._left) + 1
        last = first + len(self._running) - 1
        which = f"stages {first} to {last}" if last > first else f"stage {first}"
        eta = f"  ETA {clock(seconds)}{more}" if seconds or not more else ""  # else nothing is known
        return f"{which} of {self._count}{eta}"

    def _plain_progress(self) -> None:
        while not self._done.wait(PLAIN_INTERVAL_SECONDS):
            with self._lock:
                lines = dict(self._running)
                for line in lines.values():
                    line.refresh()
                whole = self._whole() if lines and self._count > 1 else ""
            for name, line in lines.items():
                self._say(name, line.describe())
            if whole:
                self._say("run", whole)
