"""Rows in another order than they come in: sorted in two passes over the disk, in bounded memory.

DuckDB sorts rows too, but keeps so much of nested ones that a gigabyte of them does not pass its memory limit.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

BYTES_AT_ONCE = 2**25  # of rows in memory
MAX_PIECES = 256  # files that are open at a time: of more than 8 GB each holds more

Batches = Iterator[pa.RecordBatch]


def in_order(batches: Batches, directory: Path, borders: Sequence[int]) -> Batches:
    """The rows by their column ``position``.

    Args:
        directory: for scratch files.
        borders: the positions, in order, at which they are parted into pieces that memory holds.
    """
    files = [directory / f"piece-{number}.arrows" for number in range(len(borders) + 1)]
    _scatter(batches, files, borders)
    for file in files:
        if file.exists():
            with pa.OSFile(str(file)) as piece, pa.ipc.open_stream(piece) as reader:
                yield from _sorted(reader.read_all()).to_batches()
            file.unlink()


def _scatter(batches: Batches, files: Sequence[Path], borders: Sequence[int]) -> None:
    """Writes each row to the file of its piece."""
    with ExitStack() as opened:
        writers: dict[int, pa.ipc.RecordBatchStreamWriter] = {}
        for rows in _gathered(batches):
            edges = [0, *rows["position"].to_numpy().searchsorted(borders).tolist(), len(rows)]
            for number, (first, last) in enumerate(pairwise(edges)):
                if first < last:
                    if number not in writers:
                        writers[number] = opened.enter_context(pa.ipc.new_stream(str(files[number]), rows.schema))
                    writers[number].write_table(rows.slice(first, last - first))


def _gathered(batches: Batches) -> Iterator[pa.Table]:
    """Sorted parts as large as memory allows, so that a file gets few batches."""
    pending: list[pa.RecordBatch] = []
    for batch in batches:
        pending.append(batch)
        if sum(each.nbytes for each in pending) > BYTES_AT_ONCE:
            yield _sorted(pa.Table.from_batches(pending))
            pending.clear()
    if sum(map(len, pending)):
        yield _sorted(pa.Table.from_batches(pending))


def _sorted(rows: pa.Table) -> pa.Table:
    return rows.take(pc.sort_indices(rows["position"]))
