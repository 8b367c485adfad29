"""Replay: some rows that earlier models were trained on go into the data of the next, which would else forget them.

Robins 1995, "Catastrophic forgetting, rehearsal and pseudorehearsal"; for language models Scialom et al. 2022,
arXiv:2205.12393, where 1 % is enough.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tasks.data.preparing.row_split import HELD_OUT, RESTING, TRAIN, RowSplit
from tasks.method import Input

_ROWS_PER_READ = 10_000


@dataclass(frozen=True, kw_only=True)
class OldRows:
    """The data that the last model was made from, and its predecessors: all rows that were ever trained on or held out.

    Args:
        name: of the data, for the choice of rows: each generation replays others.
        sides: row_id -> ``TRAIN`` or ``HELD_OUT``.
    """

    directory: Path
    name: str
    sides: dict[str, str]

    @staticmethod
    def read(given: Input) -> "OldRows":
        """The names of the old rows; their contents stay on disk. The plan has seen that they were split alike."""
        sides = {
            str(row["row_id"]): HELD_OUT if side == HELD_OUT else TRAIN
            for side, row in _read(given.path, columns=["row_id"])
        }
        return OldRows(directory=given.path, name=given.fingerprint, sides=sides)

    def replay(self, split: RowSplit, share: float, seed: int) -> int:
        """Writes the old rows beside the new ones that are written already; returns how many are trained on again.

        What was held out stays so. Of the others as many are drawn that they are ``share`` of the training rows, or all
        there are; all where nothing is new. The rest rests.
        """
        new = split.counts[TRAIN]
        trained = [row_id for row_id, side in self.sides.items() if side == TRAIN]
        count = round(new * share / (1 - share)) if new else len(trained)
        drawn = set(sorted(trained, key=lambda row_id: _lot(f"{seed}:{self.name}:{row_id}"))[:count])
        for side, row in _read(self.directory):
            again = TRAIN if row["row_id"] in drawn else RESTING
            split.write(HELD_OUT if side == HELD_OUT else again, row)
        return len(drawn)


def _read(directory: Path, columns: list[str] | None = None) -> Iterator[tuple[str, dict[str, object]]]:
    """The file and the columns of each row."""
    import pyarrow.parquet as pq

    for side in (TRAIN, HELD_OUT, RESTING):
        if (directory / side).exists():
            for batch in pq.ParquetFile(directory / side).iter_batches(_ROWS_PER_READ, columns=columns):
                yield from ((side, row) for row in batch.to_pylist())


def _lot(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
