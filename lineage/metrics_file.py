"""``metrics.jsonl`` of a stage: its reports, read at once or as they are appended, and cut before a resume."""

import contextlib
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from lineage.files import parse_jsonl, read_jsonl, replace_jsonl


@dataclass(frozen=True, kw_only=True)
class StageReport:
    """One report. ``time`` is in seconds since the epoch."""

    step: int
    time: float
    metrics: Mapping[str, float]


def read_reports(path: Path) -> list[StageReport]:
    """Every report; a line that a kill has cut is skipped, and a missing file has none."""
    return read_jsonl(path, _report)


def cut_reports(path: Path, step: int) -> None:
    """Removes the reports of later steps, which are trained again; a new file, by which a reader sees the restart."""
    if path.exists():
        replace_jsonl(path, [asdict(report) for report in read_reports(path) if report.step <= step])


def last_step(path: Path) -> int:
    """Of the last report; 0: there is none."""
    reports = read_reports(path)
    return reports[-1].step if reports else 0


class ReportFile:
    """Reads what is new.

    Args:
        path: may not exist yet.
        tail_bytes: of a longer file the first reading is of its end alone; None: of all.
    """

    def __init__(self, path: Path, tail_bytes: int | None = None) -> None:
        self._path, self._tail_bytes = path, tail_bytes
        self._offset: int | None = None
        self._inode: int | None = None
        self.num_restarts = 0  # how often the stage was restarted or resumed

    def read(self) -> list[StageReport]:
        """The reports since the last reading; a line still being written waits for the next."""
        with contextlib.suppress(OSError), self._path.open("rb") as file:
            size = file.seek(0, 2)
            inode = os.fstat(file.fileno()).st_ino
            if self._offset is not None and (size < self._offset or inode != self._inode):
                self._offset, self.num_restarts = 0, self.num_restarts + 1
            self._inode = inode
            if self._offset is None:
                self._offset = max(0, size - self._tail_bytes) if self._tail_bytes else 0
            file.seek(self._offset)
            content = file.read()
            self._offset += content.rfind(b"\n") + 1
            return parse_jsonl(content, _report)
        return []


def _report(step: int, time: float, metrics: Mapping[str, float]) -> StageReport:
    return StageReport(step=int(step), time=float(time), metrics=dict(metrics))
