"""What a stage reported of its steps, without the file that it stands in."""

from collections.abc import Mapping
from pathlib import Path

from flows.progress.report_file import ReportFile, StageReport

_MACHINE = ("_seconds", "_per_second", "_gib")  # units of what no two runs have alike


def reported(metrics: Path) -> list[StageReport]:
    """Every report of a ``metrics.jsonl``, as they stand."""
    return ReportFile(metrics).read()


def of_the_model(metrics: Mapping[str, float]) -> dict[str, float]:
    """Without what tells of the machine: what an interruption must not change."""
    return {name: value for name, value in metrics.items() if not name.endswith(_MACHINE)}
