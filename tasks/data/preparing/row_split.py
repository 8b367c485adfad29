"""Names rows by their content, splits off the held-out ones, and writes both sides as Parquet."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

TRAIN, HELD_OUT = "train.parquet", "held_out.parquet"
RESTING = "resting.parquet"  # rows that models were trained on before, and that wait for another turn
_ROWS_PER_WRITE = 10_000  # how many are held in memory


def canonical(value: object) -> str:
    """One text for equal rows."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


@dataclass(kw_only=True)
class RowSplit:
    """The files while they are written.

    Args:
        held_out: share of the keys that is held out.
        old: row_id -> side, of the rows that were there before: they are not added again.
        lowest: the smallest ``held_out`` that would have held out a row, so far.
        counts: rows that were written, of each side.
        known: rows that were there before.
        duplicates: rows that were written although an earlier one says the same.
    """

    directory: Path
    schema: "pa.Schema"
    held_out: float
    seed: int
    old: Mapping[str, str] = field(default_factory=dict)
    lowest: float = 1.0
    counts: dict[str, int] = field(default_factory=dict)
    known: int = 0
    duplicates: int = 0
    _seen: dict[str, tuple[int, str]] = field(default_factory=dict)  # row_id -> how often, and its side

    def __post_init__(self) -> None:
        import pyarrow.parquet as pq

        self.directory.mkdir(parents=True, exist_ok=True)
        sides = (TRAIN, HELD_OUT, RESTING) if self.old else (TRAIN, HELD_OUT)
        self._writers = {side: pq.ParquetWriter(self.directory / side, self.schema) for side in sides}
        self._pending: dict[str, list[dict[str, object]]] = {side: [] for side in sides}
        self.counts |= dict.fromkeys(sides, 0)

    def add(self, row: dict[str, object], key: str) -> None:
        """Writes a row to the side that its key falls on, whatever other rows there are."""
        content = hashlib.sha256(canonical(row).encode()).hexdigest()[:16]
        share = int.from_bytes(hashlib.sha256(f"{self.seed}:{key}".encode()).digest()[:8]) / 2**64
        self.lowest = min(self.lowest, share)
        # A duplicate goes where the first one went, so that no held-out row is in training.
        first = self.old.get(content, HELD_OUT if share < self.held_out else TRAIN)
        copies, side = self._seen.get(content, (0, first))
        self._seen[content] = (copies + 1, side)
        row_id = f"{content}-{copies}" if copies else content
        if row_id in self.old:
            self.known += 1
            return
        self.duplicates += copies > 0
        self.write(side, {"row_id": row_id, **row})

    def write(self, side: str, row: dict[str, object]) -> None:
        """Writes a row that has its name to one side."""
        self.counts[side] += 1
        self._pending[side].append(row)
        if len(self._pending[side]) == _ROWS_PER_WRITE:
            self._flush(side)

    def close(self) -> None:
        for side, writer in self._writers.items():
            self._flush(side)
            writer.close()

    def _flush(self, side: str) -> None:
        import pyarrow as pa

        if self._pending[side]:
            self._writers[side].write_table(pa.Table.from_pylist(self._pending[side], schema=self.schema))
            self._pending[side].clear()
