"""What a stage reports while it runs, read from its ``metrics.jsonl`` as that is appended to."""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class StageReport:
    """One report. ``time`` is in seconds since the epoch."""

    step: int
    time: float
    metrics: Mapping[str, float]


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
        self.num_restarts = 0  # how often the stage began again, or went on from a checkpoint

    def read(self) -> list[StageReport]:
        """The reports that came since the last reading; a line still being written waits for the next."""
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
            whole = content[: content.rfind(b"\n") + 1]
            self._offset += len(whole)
            return list(_reports(whole))
        return []


def _reports(lines: bytes) -> Iterator[StageReport]:
    for line in lines.splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):  # cut by a kill, or by the seek
            report = json.loads(line)
            yield StageReport(step=int(report["step"]), time=float(report["time"]), metrics=dict(report["metrics"]))
