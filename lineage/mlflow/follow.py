"""The reports of a stage, read from ``metrics.jsonl`` as they are appended. Imports no mlflow."""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lineage.mlflow.names import accepted


@dataclass(frozen=True, kw_only=True)
class Point:
    """One number of one report.

    Args:
        time: milliseconds since the epoch.
    """

    name: str
    value: float
    time: int
    step: int


class Follower:
    """Reads what is new, and tells no step of a metric twice.

    Args:
        logged: metric -> the last step that is recorded already: a resumed stage writes its last steps again.
    """

    def __init__(self, path: Path, logged: Mapping[str, int] | None = None) -> None:
        self._path = path
        self._offset = 0
        self._inode = 0
        self._logged = dict(logged or {})

    @property
    def names(self) -> set[str]:
        """Metrics that were told, or were recorded before."""
        return set(self._logged)

    @property
    def last_step(self) -> int:
        return max(self._logged.values(), default=0)

    def read(self) -> "Reading":
        """All that was appended since the last reading that was kept; a line still being written waits."""
        try:
            with self._path.open("rb") as file:
                self._begin_again_if_replaced(os.fstat(file.fileno()))
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            content = b""
        whole = content[: content.rfind(b"\n") + 1]
        logged = dict(self._logged)
        points = [point for line in whole.splitlines() for point in _points(line) if _is_new(point, logged)]
        return Reading(points=points, end=self._offset + len(whole), logged=logged)

    def _begin_again_if_replaced(self, found: os.stat_result) -> None:
        """A stage that goes on from a checkpoint has a new file, of the reports up to there.

        One that begins again may be given the number of the file that was deleted.
        """
        if found.st_ino != self._inode or found.st_size < self._offset:
            self._offset, self._inode = 0, found.st_ino

    def keep(self, reading: "Reading") -> None:
        """The reading was recorded: the next one starts behind it."""
        self._offset, self._logged = reading.end, dict(reading.logged)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What was new, and where the file stands after it."""

    points: list[Point]
    end: int
    logged: Mapping[str, int]


def _is_new(point: Point, logged: dict[str, int]) -> bool:
    if point.step <= logged.get(point.name, -1):
        return False
    logged[point.name] = point.step
    return True


def _points(line: bytes) -> Iterator[Point]:
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):  # a kill may have cut a line
        report = json.loads(line)
        for name, value in report["metrics"].items():
            yield Point(
                name=accepted(name), value=float(value), time=int(report["time"] * 1000), step=int(report["step"])
            )
