"""How far a stage is, read from its ``metrics.jsonl``: for the screen of its own run and for ``posttrain status``."""

import contextlib
import json
import time
from dataclasses import dataclass, field
from pathlib import Path

from flows.wording import clock

_TAIL_BYTES = 256 * 1024  # where a long file is read for the first time; the latest reports are what counts


@dataclass
class Progress:
    """The state of one running stage.

    Args:
        path: its ``metrics.jsonl``, which may not exist yet.
        total: its optimizer steps; None: it counts none.
        started: when it began, in seconds since the epoch.
    """

    path: Path
    total: int | None
    started: float = field(default_factory=time.time)
    step: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    last_time: float = 0.0  # of the latest report
    _offset: int | None = None
    _first: tuple[int, float] | None = None  # step and time of the earliest report that was read

    def refresh(self) -> None:
        """Reads the reports that came since the last look; a line still being written waits for the next."""
        try:
            size = self.path.stat().st_size
        except OSError:
            return
        if self._offset is not None and size < self._offset:  # the stage began again
            self.step, self.metrics, self._offset, self._first = 0, {}, None, None
        start = max(0, size - _TAIL_BYTES) if self._offset is None else self._offset
        with contextlib.suppress(OSError), self.path.open("rb") as file:
            file.seek(start)
            content = file.read()
            whole = content[: content.rfind(b"\n") + 1]
            self._offset = start + len(whole)
            for line in whole.splitlines():
                with contextlib.suppress(ValueError, KeyError, TypeError):  # cut by a kill, or by the seek
                    self._hear(json.loads(line))

    def _hear(self, report: dict[str, object]) -> None:
        step, when, metrics = report["step"], report["time"], report["metrics"]
        if not (isinstance(step, int) and isinstance(when, int | float) and isinstance(metrics, dict)):
            return
        self.step, self.last_time = step, float(when)
        self._first = self._first or (step, float(when))
        self.metrics.update(metrics)

    def seconds_left(self) -> float | None:
        """By the pace of the reports that were read; None where that cannot be told."""
        if not self.total or self._first is None:
            return None
        first_step, first_time = self._first
        if self.step > first_step:
            pace = (self.last_time - first_time) / (self.step - first_step)
        else:  # the only report: the start-up is counted in
            pace = max(0.0, self.last_time - self.started) / max(1, self.step)
        return pace * max(0, self.total - self.step)

    def describe(self) -> str:
        """``120/300  loss 3.410  9,800 tok/s  ETA 0:21``"""
        elapsed = max(0.0, time.time() - self.started)
        parts = [f"{self.step}/{self.total}" if self.total else f"{elapsed:.0f} s"]
        if "loss" in self.metrics:
            parts.append(f"loss {self.metrics['loss']:.3f}")
        if "tokens_per_second" in self.metrics:
            parts.append(f"{self.metrics['tokens_per_second']:,.0f} tok/s")
        left = self.seconds_left()
        if left is not None:
            parts.append(f"ETA {clock(left)}")
        return "  ".join(parts)
