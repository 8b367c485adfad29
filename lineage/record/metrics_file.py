"""``metrics.jsonl`` of a stage and the scores of its checkpoints: reads all reports or new ones; cuts them."""

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from lineage.filesystem.files import atomic_write, parse_jsonl, read_jsonl, replace_jsonl

RECIPE_FILE = "recipe.json"  # of scores beside a training: what `Evaluate` was asked for
BENCHMARKS_FILE = "benchmarks.json"  # of an evaluation: beginning of the names of their metrics -> settings
CHECKPOINT_SCORES_FILE, SCORED = "evaluation.jsonl", "evaluation/"  # of checkpoints; the names of their metrics
_MACHINE = ("seconds", "per_second", "per_second_per_worker", "_gib", "mfu")


@dataclass(frozen=True, kw_only=True)
class StageReport:
    """One report. ``time`` is in seconds since the epoch."""

    step: int
    time: float
    metrics: Mapping[str, float]


def is_of_machine(name: str) -> bool:
    """Whether a metric measures time, speed or memory, in which equal runs differ."""
    return name.endswith(_MACHINE)


def is_score(name: str) -> bool:
    """Whether a metric is one of checkpoints that are scored beside a training."""
    return name.startswith(SCORED) and not name.startswith(f"{SCORED}base/")


def file_with(metrics: Path, name: str) -> Path:
    """The file of the reports of a stage that have a metric.

    Args:
        metrics: its ``metrics.jsonl``.
    """
    return metrics.with_name(CHECKPOINT_SCORES_FILE) if is_score(name) else metrics


def headline_metric(metrics: Mapping[str, object]) -> str:
    """The metric that says how well a training does: its loss, or its reward, beside which a loss says nothing."""
    return "reward" if "reward" in metrics else "loss"


def read_reports(path: Path) -> list[StageReport]:
    """All reports; a line cut by a kill is skipped, and a missing file has none."""
    return read_jsonl(path, _report)


def step_seconds(reports: Sequence[Mapping[str, float]]) -> float | None:
    """Seconds of the fastest step, from tokens and tokens per second, which exclude saves; None: not reported."""
    totals = [0.0, *(step.get("num_tokens", 0.0) for step in reports)]
    tokens = [total - before for before, total in pairwise(totals)]
    paces = [step.get("tokens_per_second", 0.0) for step in reports]
    return min((count / pace for count, pace in zip(tokens, paces, strict=True) if count > 0 < pace), default=None)


def cut_reports(path: Path, step: int) -> None:
    """Removes the reports of later steps, which are trained again; readers see the restart by the new inode."""
    if path.exists():
        replace_jsonl(path, [asdict(report) for report in read_reports(path) if report.step <= step])


def last_step(path: Path) -> int:
    """Step of the last report; 0: there is none."""
    reports = read_reports(path)
    return reports[-1].step if reports else 0


class ReportFile:
    """Reads the reports that were appended since the last call.

    Args:
        path: may not exist yet.
        tail_bytes: the first call reads only this many bytes at the end; None: everything.
    """

    def __init__(self, path: Path, tail_bytes: int | None = None) -> None:
        self._path, self._tail_bytes = path, tail_bytes
        self._offset: int | None = None
        self._inode: int | None = None
        self.num_restarts = 0  # how often the stage was restarted or resumed

    def read(self) -> list[StageReport]:
        """The new reports; a line that is still being written is left for the next call."""
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


PART_FILE = "part.json"  # in a stage's folder of work


@dataclass(frozen=True, kw_only=True)
class Part:
    """How far the work is that a stage does before its next report.

    Args:
        step: of its last report.
        what: the rows belong to, such as a policy.
    """

    step: int
    what: str
    done: int
    of: int


def write_part(work: Path, part: Part) -> None:
    """Replaces what the folder of work says of the part."""
    atomic_write(work / PART_FILE, json.dumps(asdict(part)))


def read_part(work: Path, step: int) -> Part | None:
    """The part after the report of a step; None: nothing is known of it."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        part = Part(**json.loads((work / PART_FILE).read_text(encoding="utf-8")))
        return part if part.step == step and part.of > 0 else None
    return None


def _report(
    step: int, time: float, metrics: Mapping[str, float] | None = None, scores: Mapping[str, float] | None = None,
    **others: object,
) -> StageReport:  # fmt: skip
    """A line of ``metrics.jsonl``, or of the scores of a checkpoint."""
    of_checkpoint = {f"{SCORED}{name}": value for name, value in (scores or {}).items()}
    found = of_checkpoint if metrics is None else dict(metrics)
    return StageReport(step=int(step), time=float(time), metrics=found)
