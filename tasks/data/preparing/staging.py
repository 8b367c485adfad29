"""Rows on their way through: converted by processes, they wait on the disk until it is known where each belongs; then
they are written as Parquet, in order and in bounded memory.

DuckDB sorts rows too, but keeps so much of nested ones that a gigabyte of them does not pass its memory limit; and the
bytes of the files would be those of its writer.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from duckdb import DuckDBPyConnection

from lineage.artifact import Kind, Source
from tasks.data.kinds import HELD_OUT, ROW_KINDS, TRAIN
from tasks.data.ordered_pool import ordered_map
from tasks.data.preparing.convert_rows import KEYS, Converted, ConvertRows, Opened, detect_source
from tasks.data.preparing.report import Remark, SourceReport
from tasks.data.reading.chunk import parse_split

INLINE_BELOW = 8  # chunks, of about a megabyte: converting these takes as long as starting processes
MAX_SHOWN = 20  # bad rows in one message
BYTES_AT_ONCE = 2**25  # of rows in memory
MAX_PIECES = 256  # files that are open at a time: of more than 8 GB each holds more
_ROWS_PER_GROUP = 10_000  # of Parquet
_STAGED_KEYS = pa.schema([("row", pa.int64()), ("slot", pa.int32()), *KEYS])

Batches = Iterator[pa.RecordBatch]


@dataclass(kw_only=True)
class StagedSource:
    """A slot.

    Args:
        number: in the order in which the slots are read.
        start, stop: its slice, among all rows that were read.
        report: what was read.
    """

    number: int
    source: Source
    start: int = 0
    stop: int = 0
    report: SourceReport


@dataclass(kw_only=True)
class Staging:
    """The rows of all slots.

    Args:
        count: of the good rows.

    Files:
        rows: the good ones as Arrow streams, one behind the other, without ids; ``row`` in ``keys`` counts them from 0.
        keys: what decides where they belong, as Parquet: ``row``, ``slot``, ``place`` among all that were read of its
            source, and the columns of ``Converted.keys``.
        bad: a JSON object a line for each bad row: its slot and place, and what is wrong.
    """

    directory: Path
    sources: dict[str, StagedSource] = field(default_factory=dict)
    count: int = 0

    @property
    def rows(self) -> Path:
        return self.directory / "rows.arrows"

    @property
    def keys(self) -> Path:
        return self.directory / "keys.parquet"

    @property
    def bad(self) -> Path:
        return self.directory / "bad.jsonl"

    def batches(self) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The good rows in the order in which they were read, each batch with the number of its first."""
        first = 0
        with pa.OSFile(str(self.rows)) as file:
            while file.tell() < file.size():
                for batch in pa.ipc.open_stream(file):
                    yield first, batch
                    first += len(batch)


def stage(
    sources: Mapping[str, Source],
    convert: ConvertRows,
    workers: int,
    directory: Path,
    opened: Mapping[str, Opened] | None = None,
) -> Staging:
    """Reads and converts the rows of every source, slot by slot.

    Args:
        convert: what is done to every row, whatever its source.
        workers: processes that do it, where there are more than a few rows.
        opened: slot -> its source, where it was opened before.
    Raises:
        DataError: one has no rows, or rows of no format or of another kind than the stage's.
    """
    staging = Staging(directory=directory)
    with (
        staging.rows.open("wb") as rows,
        staging.bad.open("w") as bad,
        pq.ParquetWriter(staging.keys, _STAGED_KEYS) as keys,
    ):
        for slot, source in sources.items():
            each = (opened or {}).get(slot) or detect_source(source, convert.prompt_template)
            each.require_kind(convert.kind)
            staged = StagedSource(number=len(staging.sources), source=source, report=each.report())
            staging.sources[slot] = staged
            report, (_, part) = staged.report, parse_split(source.split)
            work = replace(convert, detected=each.detected)
            for converted in ordered_map(work, each.chunks, workers, inline_below=INLINE_BELOW):
                if converted.rows and converted.keys:
                    rows.write(converted.rows)
                    keys.write_batch(_keys(staging, staged, converted.keys))
                    staging.count += len(converted.keys)
                for place, reject in converted.rejects:
                    what = {"where": reject.where, "reason": reject.reason, "problem": reject.problem}
                    at = {"place": report.rows_read + place, "slot": slot}
                    bad.write(json.dumps({**at, **what, "raw": reject.raw}) + "\n")
                _count(report, converted)
                if part and part.last is not None and report.rows_read >= part.last:
                    break  # the end of its slice is known beforehand
            staged.start, staged.stop = part.bounds(report.rows_read) if part else (0, report.rows_read)
            report.ignored_columns = dict(sorted(report.ignored_columns.items()))
    return staging


def _count(report: SourceReport, converted: Converted) -> None:
    report.rows_read += converted.count
    if converted.split_by:
        report.split_by = " or ".join(
            sorted({converted.split_by, *(report.split_by or converted.split_by).split(" or ")})
        )
    for column, count in converted.ignored.items():
        report.ignored_columns[column] = report.ignored_columns.get(column, 0) + count
    for words, remark in converted.remarks.items():
        report.remarks.setdefault(words, Remark()).add(remark.count, remark.places)


def _keys(staging: Staging, staged: StagedSource, keys: pa.RecordBatch) -> pa.RecordBatch:
    rows = np.arange(staging.count, staging.count + len(keys))
    columns = [pa.array(rows), pa.repeat(pa.scalar(staged.number, pa.int32()), len(keys)), *keys.columns]
    places = _STAGED_KEYS.get_field_index("place")
    columns[places] = pc.add(columns[places], staged.report.rows_read)
    return pa.record_batch(columns, _STAGED_KEYS)


def settle_rejects(staging: Staging, file: Path) -> list[str]:
    """Writes the bad rows of the slices that were asked for, and counts them; returns the first: ``where: problem``.

    The stage's ``output/`` stays when a stage refuses: until the same stage runs again, which writes them anew.
    """
    shown: list[str] = []
    with staging.bad.open() as bad, file.open("w") as rejects:
        for line in bad:
            fields = json.loads(line)
            staged = staging.sources[fields.pop("slot")]
            if staged.start <= fields.pop("place") < staged.stop:
                rejects.write(json.dumps(fields) + "\n")
                dropped, reason = staged.report.dropped, fields["reason"]
                dropped[reason] = dropped.get(reason, 0) + 1
                if len(shown) < MAX_SHOWN:
                    shown.append(f"{fields['where']}: {fields['problem']}")
    for staged in staging.sources.values():
        staged.report.dropped = dict(sorted(staged.report.dropped.items()))
    if not shown:
        file.unlink()
    return shown


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
            pending.append(_conformed(part, self._schema))
            self.counts[side] += len(part)
            if len(part) == room or sum(each.nbytes for each in pending) > BYTES_AT_ONCE:
                self._flush(side)

    def close(self) -> None:
        for side, writer in self._writers.items():
            self._flush(side)
            writer.close()

    def _flush(self, side: str) -> None:
        if self._pending[side]:
            self._writers[side].write_table(pa.Table.from_batches(self._pending[side]).combine_chunks())
            self._pending[side].clear()


def _conformed(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Prepared rows in the schema of now: data of an earlier version had fewer columns."""
    if batch.schema.equals(schema):
        return batch
    names = batch.schema.names
    columns = [
        batch.column(field.name).cast(field.type) if field.name in names else pa.nulls(len(batch), field.type)
        for field in schema
    ]
    return pa.record_batch(columns, schema)


def placed_rows(
    connection: DuckDBPyConnection, staging: Staging, *, as_read: bool
) -> Iterator[tuple[str, pa.RecordBatch]]:
    """The rows of the table ``placed``, each with its id, in their order."""
    batches = _placed(connection, staging)
    if not as_read:
        batches = in_order(batches, staging.directory, _borders(connection))
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


def _placed(connection: DuckDBPyConnection, staging: Staging) -> Batches:
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


def in_order(batches: Batches, directory: Path, borders: Sequence[int]) -> Batches:
    """The rows by their column ``position``.

    Args:
        directory: for scratch files.
        borders: the positions, in order, at which they are parted into pieces that memory holds.
    """
    files = [directory / f"piece-{number}.arrows" for number in range(len(borders) + 1)]
    with ExitStack() as opened:  # each row goes to the file of its piece
        writers: dict[int, pa.ipc.RecordBatchStreamWriter] = {}
        for rows in _gathered(batches):
            edges = [0, *rows["position"].to_numpy().searchsorted(borders).tolist(), len(rows)]
            for number, (first, last) in enumerate(pairwise(edges)):
                if first < last:
                    if number not in writers:
                        writers[number] = opened.enter_context(pa.ipc.new_stream(str(files[number]), rows.schema))
                    writers[number].write_table(rows.slice(first, last - first))
    for file in files:
        if file.exists():
            with pa.OSFile(str(file)) as piece, pa.ipc.open_stream(piece) as reader:
                yield from _sorted(reader.read_all()).to_batches()
            file.unlink()


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
