"""Prepared rows, read back in parts that fit memory however large a row is."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

MAX_BYTES = 2**22  # what is computed of a text takes ten times its memory, and more


def row_batches(file: Path, max_rows: int, columns: Sequence[str] | None = None) -> Iterator["pa.RecordBatch"]:
    """The rows of a Parquet file in order, at most so many at a time, and at most ``MAX_BYTES`` of them or one row.

    Args:
        columns: those to read that the file has; None: all.
    """
    import pyarrow.parquet as pq

    with pq.ParquetFile(file) as rows:
        names = [name for name in rows.schema_arrow.names if columns is None or name in columns]
        for number in range(rows.num_row_groups):
            group = rows.metadata.row_group(number)
            fitting = group.num_rows * MAX_BYTES // max(group.total_byte_size, 1)
            count = min(max(fitting, 1), max_rows)
            for batch in rows.iter_batches(count, row_groups=[number], columns=names):
                yield from _small(batch)


def _small(rows: "pa.RecordBatch") -> Iterator["pa.RecordBatch"]:
    """The same in parts; each a copy, since a slice keeps all of the rows, and takes them along to another process."""
    import pyarrow as pa

    if rows.nbytes <= MAX_BYTES or len(rows) == 1:
        yield rows
        return
    half = len(rows) // 2
    for part in (rows.slice(0, half), rows.slice(half)):
        yield from _small(pa.concat_batches([part]))
