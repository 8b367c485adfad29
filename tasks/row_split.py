"""Names rows by their content, splits off the held-out ones, and writes both sides as Parquet."""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

TRAIN, HELD_OUT = "train.parquet", "held_out.parquet"
_ROWS_PER_WRITE = 10_000  # how many are held in memory


def canonical(value: object) -> str:
    """One text for equal rows."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


@dataclass(kw_only=True)
class RowSplit:
    """The two files while they are written.

    Args:
        held_out: share of the keys that is held out.
        lowest: the smallest ``held_out`` that would have held out a row, so far.
    """

    directory: Path
    schema: "pa.Schema"
    held_out: float
    seed: int
    lowest: float = 1.0
    counts: dict[str, int] = field(default_factory=lambda: {TRAIN: 0, HELD_OUT: 0})
    _seen: dict[str, tuple[int, str]] = field(default_factory=dict)  # row_id -> how often, and its side
    _pending: dict[str, list[dict[str, object]]] = field(default_factory=lambda: {TRAIN: [], HELD_OUT: []})

    def __post_init__(self) -> None:
        import pyarrow.parquet as pq

        self.directory.mkdir(parents=True, exist_ok=True)
        self._writers = {side: pq.ParquetWriter(self.directory / side, self.schema) for side in self.counts}

    @property
    def duplicates(self) -> int:
        return sum(self.counts.values()) - len(self._seen)

    def add(self, row: dict[str, object], key: str) -> None:
        """Writes a row to the side that its key falls on, whatever other rows there are."""
        content = hashlib.sha256(canonical(row).encode()).hexdigest()[:16]
        share = int.from_bytes(hashlib.sha256(f"{self.seed}:{key}".encode()).digest()[:8]) / 2**64
        self.lowest = min(self.lowest, share)
        # A duplicate goes where the first one went, so that no held-out row is in training.
        copies, side = self._seen.get(content, (0, HELD_OUT if share < self.held_out else TRAIN))
        self._seen[content] = (copies + 1, side)
        self.counts[side] += 1
        self._pending[side].append({"row_id": f"{content}-{copies}" if copies else content, **row})
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
