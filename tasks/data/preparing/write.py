"""Writes the rows of each split as Parquet, in order and in bounded memory.

DuckDB sorts rows too, but keeps so much of nested ones that a gigabyte of them does not pass its memory limit; and the
bytes of the files would be those of its writer.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from duckdb import DuckDBPyConnection

from lineage.artifact import Kind
from tasks.data.kinds import ROW_KINDS
from tasks.data.preparing.convert_rows import conformed
from tasks.data.preparing.row_split import HELD_OUT, TRAIN
from tasks.data.preparing.staging import Staging

_ROWS_PER_GROUP, _BYTES_PER_GROUP = 10_000, 2**25  # how much is held in memory, of each side


class SideFiles:
    """The files of the sides while they are written; the same rows give the same bytes.

    Attributes:
        counts: rows that were written, of each side.
    """

    def __init__(self, directory: Path, kind: Kind, sides: tuple[str, ...]) -> None:
        self.counts = dict.fromkeys(sides, 0)
        self._schema = ROW_KINDS[kind].schema
        self._writers = {side: pq.ParquetWriter(directory / side, self._schema) for side in sides}
        self._pending: dict[str, list[pa.RecordBatch]] = {side: [] for side in sides}

    def write(self, side: str, rows: pa.RecordBatch) -> None:
        """Adds rows to a side; they go to the disk in groups, however they came."""
        while len(rows):
            pending = self._pending[side]
            room = _ROWS_PER_GROUP - sum(map(len, pending))
            part, rows = rows.slice(0, room), rows.slice(room)
            pending.append(conformed(part, self._schema))
            self.counts[side] += len(part)
            if len(part) == room or sum(each.nbytes for each in pending) > _BYTES_PER_GROUP:
                self._flush(side)

    def close(self) -> None:
        for side, writer in self._writers.items():
            self._flush(side)
            writer.close()

    def _flush(self, side: str) -> None:
        if self._pending[side]:
            self._writers[side].write_table(pa.Table.from_batches(self._pending[side]).combine_chunks())
            self._pending[side].clear()


def placed_rows(
    connection: DuckDBPyConnection, staging: Staging, *, as_read: bool
) -> Iterator[tuple[str, pa.RecordBatch]]:
    """The rows of the table ``placed``, each with its id, in their order."""
    batches = _placed(connection, staging)
    if not as_read:
        batches = in_order(batches, staging.rows.parent, _borders(connection))
    for rows in batches:
        held_out = rows.column("held_out")
        yield TRAIN, rows.filter(pc.invert(held_out))
        yield HELD_OUT, rows.filter(held_out)


def _borders(connection: DuckDBPyConnection) -> list[int]:
    """Positions that part all rows into pieces of about the size that is put in order at once."""
    found = connection.execute(
        "WITH piled AS (SELECT position, sum(bytes) OVER (ORDER BY position) AS height "
        "FROM placed JOIN keys USING (row)) "
        f"SELECT min(position) FROM piled GROUP BY floor(height / greatest({BYTES_AT_ONCE}, "
        f"(SELECT max(height) FROM piled) / {MAX_PIECES})) ORDER BY 1"
    ).fetchall()
    return [position for (position,) in found[1:]]


def _placed(connection: DuckDBPyConnection, staging: Staging) -> Iterator[pa.RecordBatch]:
    """The rows that are used, as often as they are, in the order in which they were read."""
    for first, batch in staging.batches():
        query = (
            f"SELECT row - {first} AS place, held_out, row_id, position FROM placed "
            f"WHERE row >= {first} AND row < {first + len(batch)} ORDER BY position"
        )
        for placed in connection.sql(query).to_arrow_reader(len(batch)):
            rows = batch.take(placed.column("place"))
            for name in ("row_id", "held_out", "position"):
                rows = rows.append_column(name, placed.column(name))
            yield rows


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
