"""The progress of a stage, read from its ``metrics.jsonl``: for the screen of its run and for ``posttrain status``."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flows.reports.wording import clock
from lineage.record.metrics_file import Part, ReportFile, headline_metric, read_part
from lineage.record.tracker import Event, StageStart
from lineage.store import Entry

_SEEN = 0.005  # the least share that is shown, of what a device can compute
_TAIL_BYTES = 256 * 1024  # end of a long file that is read the first time: only the latest reports matter


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
    part: Part | None = None  # of the work until the next report
    _first: tuple[int, float] | None = None  # step and time of the earliest report since it began
    _from_step: int = 0  # of the last report before that: of the attempt that it resumes

    def __post_init__(self) -> None:
        self._file = ReportFile(self.path, _TAIL_BYTES)

    def refresh(self) -> None:
        """Reads the reports since the last call."""
        restarts = self._file.num_restarts
        reports = self._file.read()
        if self._file.num_restarts > restarts:
            self.step, self.metrics, self._first, self._from_step = 0, {}, None, 0
        for report in reports:
            self.step, self.last_time = report.step, report.time
            if report.time < self.started:
                self._from_step = report.step
            else:
                self._first = self._first or (report.step, report.time)
            self.metrics.update(report.metrics)
        self.part = read_part(Entry(self.path.parent).work, self.step)

    def seconds_left(self) -> float | None:
        """The remaining seconds at the pace of the reports so far; None: the pace is unknown."""
        if not self.total or (self._first is None and not self.part):
            return None
        if self.part:  # of a stage whose steps are few and long
            done = self.step + self.part.done / self.part.of
            return max(0.0, time.time() - self.started) / max(1e-9, done) * max(0.0, self.total - done)
        assert self._first
        first_step, first_time = self._first
        if self.step > first_step:
            pace = (self.last_time - first_time) / (self.step - first_step)
        else:  # only one report: the start-up counts too
            pace = max(0.0, self.last_time - self.started) / max(1, self.step - self._from_step)
        return pace * max(0, self.total - self.step)

    def begun(self) -> str:
        """How it began: ``started (300 steps)``, or from which step it resumed."""
        self.refresh()
        if self.step:
            return f"resumes from step {self.step}{f' of {self.total}' if self.total else ''}"
        return f"started{f' ({self.total} steps)' if self.total else ''}"

    def describe(self) -> str:
        """``120/300  loss 3.410  9,800 tok/s  ETA 0:21``"""
        elapsed = max(0.0, time.time() - self.started)
        parts = [f"{self.step}/{self.total}" if self.total else f"{elapsed:.0f} s"]
        parts += [f"{self.part.what}: {self.part.done:,} of {self.part.of:,} rows"] if self.part else []
        parts += _highlights(self.metrics)
        left = self.seconds_left()
        if left is not None:
            parts.append(f"ETA {clock(left)}")
        return "  ".join(parts)


def progress_of(event: Event, start: StageStart) -> Progress:
    """The state of a stage that an event reports to run."""
    return Progress(path=Entry(start.directory).metrics, total=event.num_steps)


def line_of(event: Event) -> str:
    """What an event says, apart from the title of its stage."""
    match event.state:
        case "waiting":
            return f"waits for {event.text}"
        case "reused":
            return "reused: another run made it"
        case "done":
            metrics = event.manifest.metrics if event.manifest else {}
            left_out = [f"{metrics['dropped']:,.0f} rows left out"] if metrics.get("dropped") else []
            return "  ".join([f"done in {event.seconds:.1f} s", *_highlights(metrics), *left_out])
        case "failed":
            return f"FAILED: {event.text}"
        case _:
            return event.text


def _highlights(metrics: Mapping[str, float]) -> list[str]:
    name = headline_metric(metrics)
    shown = [f"{name} {metrics[name]:.3f}"] if name in metrics else []
    if "tokens_per_second" in metrics:
        shown.append(f"{metrics['tokens_per_second']:,.0f} tok/s")
    if metrics.get("mfu", 0.0) >= _SEEN:
        shown.append(f"MFU {metrics['mfu']:.0%}")
    return shown
