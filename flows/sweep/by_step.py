"""One metric that trials report while they run, step by step and side by side: the learning-rate experiment."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from flows.sweep.folder import Row
from flows.sweep.space import short_names
from lineage.metrics_file import read_reports
from lineage.store import Store

Table = list[list[str]]

_MOST_SHOWN = 20  # steps


def by_step(store: Path, stage: str, metric: str, rows: Sequence[Row]) -> Table:
    """A header, then a line for each step: the step, and the metric of every trial that finished the stage.

    A step that a trial did not report is empty.
    """
    series = {
        _title(row): _reports(store, stage, row.fingerprints[stage], metric)
        for row in rows
        if stage in row.fingerprints
    }
    steps = sorted({step for each in series.values() for step in each})
    return [
        ["step", *series],
        *([str(step), *(f"{each[step]:.4g}" if step in each else "" for each in series.values())] for step in steps),
    ]


def thinned(table: Table) -> Table:
    """At most so many steps as a terminal shows, at equal distances, the last one among them."""
    header, *steps = table
    every = -(-len(steps) // _MOST_SHOWN) or 1
    return [header, *reversed(steps[::-1][::every])]


def as_markdown(table: Table) -> str:
    """Columns aligned, so that it reads as well in a terminal."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in table]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = [
        "| " + " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    rule = "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]]) + "\n"


def _title(row: Row) -> str:
    names = short_names(row.params)
    return " ".join(f"{names[field]}={value}" for field, value in row.params.items())


def _reports(store: Path, stage: str, fingerprint: str, metric: str) -> Mapping[int, float]:
    reports = read_reports(Store(store).entry(stage, fingerprint).metrics)
    return {report.step: report.metrics[metric] for report in reports if metric in report.metrics}
