"""Rows in another order than they come in: sorted in two passes over the disk, in bounded memory.

DuckDB sorts rows too, but keeps so much of nested ones that a gigabyte of them does not pass its memory limit.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

_BYTES_AT_ONCE = 2**25  # of rows in memory
_MAX_BUCKETS = 256  # files that are open at a time: of more than 8 GB each holds more

Batches = Iterator[pa.RecordBatch]


def in_order(batches: Batches, directory: Path, num_rows: int, num_bytes: int) -> Batches:
    """The rows by their column ``position``.

    Args:
        batches: with all positions from 0 to ``num_rows``.
        directory: for scratch files.
        num_bytes: about how large all rows are.
    """
    num_buckets = min(num_bytes // _BYTES_AT_ONCE + 1, _MAX_BUCKETS)
    per_bucket = num_rows // num_buckets + 1  # positions
    files = [directory / f"bucket-{number}.arrows" for number in range(num_buckets)]
    _scatter(batches, files, per_bucket)
    for file in files:
        if file.exists():
            with pa.OSFile(str(file)) as bucket, pa.ipc.open_stream(bucket) as reader:
                yield from _sorted(reader.read_all()).to_batches()
            file.unlink()


def _scatter(batches: Batches, files: Sequence[Path], per_bucket: int) -> None:
    """Writes each row to the file of its bucket: of the ``per_bucket`` positions that its own is among."""
    with ExitStack() as opened:
        writers: dict[int, pa.ipc.RecordBatchStreamWriter] = {}
        for rows in _gathered(batches):
            positions = rows["position"].to_numpy()
            for number in range(positions[0] // per_bucket, positions[-1] // per_bucket + 1):
                first, last = positions.searchsorted([number * per_bucket, (number + 1) * per_bucket])
                if first < last:
                    if number not in writers:
                        writers[number] = opened.enter_context(pa.ipc.new_stream(str(files[number]), rows.schema))
                    writers[number].write_table(rows.slice(first, last - first))


def _gathered(batches: Batches) -> Iterator[pa.Table]:
    """Sorted parts as large as memory allows, so that a bucket gets few pieces."""
    pending: list[pa.RecordBatch] = []
    for batch in batches:
        pending.append(batch)
        if sum(each.nbytes for each in pending) > _BYTES_AT_ONCE:
            yield _sorted(pa.Table.from_batches(pending))
            pending.clear()
    if sum(map(len, pending)):
        yield _sorted(pa.Table.from_batches(pending))


def _sorted(rows: pa.Table) -> pa.Table:
    return rows.take(pc.sort_indices(rows["position"]))
