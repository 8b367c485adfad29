"""What is remembered of every trial that ended, over all runs of a sweep."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from flows.sweep.trial import Outcome, Trial, TrialState

_FILE = "trials.jsonl"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One trial that ended.

    Args:
        values: objective -> number; empty unless complete.
        metrics: ``STAGE/METRIC`` -> number, of every stage that was finished.
        fingerprints: stage -> fingerprint of what was finished.
    """

    number: int
    params: Mapping[str, str]
    state: TrialState
    seconds: float
    cause: str
    values: Mapping[str, float]
    metrics: Mapping[str, float]
    fingerprints: Mapping[str, str]


def row_of(trial: Trial, outcome: Outcome) -> Row:
    """What is remembered of a trial."""
    made = outcome.manifests
    return Row(
        number=trial.number, params=dict(trial.params), state=outcome.state, seconds=outcome.seconds,
        cause=outcome.cause, values=dict(outcome.values),
        metrics={
            f"{stage}/{name}": value for stage, each in made.items() for name, value in each.metrics.items()
            if math.isfinite(value)
        },
        fingerprints={stage: each.fingerprint for stage, each in made.items()},
    )  # fmt: skip


class Ledger:
    """The rows by number; a line is appended for every trial that ends, and the last one of a number counts."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / _FILE

    def add(self, row: Row) -> None:
        known = {each.number: each for each in self.rows()}.get(row.number)
        if known and replace(known, seconds=row.seconds) == row:
            return  # all of it was reused, in no time: how long it took is known
        with self._path.open("a+b") as file:
            start = b"" if self._ends_clean() else b"\n"
            file.write(start + json.dumps(asdict(row)).encode() + b"\n")

    def rows(self) -> list[Row]:
        """In the order of their numbers."""
        if not self._path.exists():
            return []
        found = {}
        for line in self._path.read_text().splitlines():
            try:
                row = Row(**json.loads(line))
            except (ValueError, TypeError):  # cut by a kill
                continue
            found[row.number] = row
        return [found[number] for number in sorted(found)]

    def _ends_clean(self) -> bool:
        return not self._path.exists() or self._path.read_bytes()[-1:] in (b"", b"\n")
