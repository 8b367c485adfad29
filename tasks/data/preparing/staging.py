"""Staging of converted rows: processes convert them to scratch files; once their splits are decided, they are written
as Parquet, in order and in bounded memory.

DuckDB is not used to sort the rows: with nested columns a gigabyte exceeds its memory limit, and the bytes of the files
would depend on its writer.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from duckdb import DuckDBPyConnection

from lineage.artifact import Kind, Source
from tasks.data.kinds import HELD_OUT, ROW_KINDS, TRAIN
from tasks.data.ordered_pool import ordered_map
from tasks.data.preparing.convert_rows import KEYS, ConvertRows, Opened, detect_source
from tasks.data.preparing.report import SourceReport
from tasks.data.reading.chunk import parse_split

MAX_SHOWN = 20  # bad rows in one message
BYTES_AT_ONCE = 2**25  # rows in memory
MAX_PIECES = 256  # open files; with more than 8 GB of rows the pieces are larger
_ROWS_PER_GROUP = 10_000  # of Parquet
_STAGED_KEYS = pa.schema([("row", pa.int64()), ("slot", pa.int32()), *KEYS])


@dataclass(kw_only=True)
class StagedSource:
    """The source of one slot.

    Args:
        number: position in the order of reading.
        start, stop: its slice of the rows read.
        report: its report.
    """

    number: int
    source: Source
    start: int = 0
    stop: int = 0
    report: SourceReport


@dataclass(kw_only=True)
class Staging:
    """The staged rows of all slots, in scratch files: good rows, their keys, and bad rows.

    Args:
        count: number of good rows.
        rare: the rare columns that a row has.
    """

    directory: Path
    sources: dict[str, StagedSource] = field(default_factory=dict)
    count: int = 0
    rare: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self.rows, self.keys, self.bad = (
            self.directory / name for name in ("rows.arrows", "keys.parquet", "bad.jsonl")
        )

    def batches(self) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The good rows in reading order; each batch with the number of its first row."""
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
    """Reads and converts the rows of all sources.

    Args:
        convert: the conversion, without the detected format.
        workers: number of processes, unless there are only few rows.
        opened: slot -> its source, if it was opened before.

    Raises:
        DataError: a source has no rows, or rows of no format or of another kind.
    """
    staging = Staging(directory=directory)
    with (
        staging.rows.open("wb") as rows,
        staging.bad.open("w") as bad,
        pq.ParquetWriter(staging.keys, _STAGED_KEYS) as keys,
    ):
        for slot, source in sources.items():
            each = (opened or {}).get(slot) or detect_source(source, convert.prompt_template, convert.kind)
            each.require_kind(convert.kind)
            staged = StagedSource(number=len(staging.sources), source=source, report=each.report())
            staging.sources[slot] = staged
            report, (_, part) = staged.report, parse_split(source.split)
            for converted in ordered_map(replace(convert, detected=each.detected), each.chunks, workers):
                if converted.rows and converted.keys:
                    rows.write(converted.rows)
                    keys.write_batch(_keys(staging, staged, converted.keys))
                    staging.count += len(converted.keys)
                staging.rare |= converted.rare
                for place, reject in converted.rejects:
                    shown = {"where": reject.where, "reason": reject.reason, "problem": reject.problem}
                    at = {"place": report.rows_read + place, "slot": slot}
                    bad.write(json.dumps({**at, **shown, "raw": reject.raw}) + "\n")
                report.add(converted.count, converted.split_by, converted.ignored, converted.remarks)
                if part and part.last is not None and report.rows_read >= part.last:
                    break  # the slice ends here
            staged.start, staged.stop = part.bounds(report.rows_read) if part else (0, report.rows_read)
    return staging


def _keys(staging: Staging, staged: StagedSource, keys: pa.RecordBatch) -> pa.RecordBatch:
    rows = np.arange(staging.count, staging.count + len(keys))
    places = pc.add(keys.column("place"), staged.report.rows_read)
    columns = [rows, np.full(len(keys), staged.number, np.int32), places, *keys.columns[1:]]
    return pa.record_batch(columns, _STAGED_KEYS)


def settle_rejects(staging: Staging, file: Path) -> list[str]:
    """Writes and counts the bad rows inside the slices; returns the first ones as ``where: problem``.

    They stay in the stage's ``output/`` after a failure, until the stage runs again.
    """
    shown: list[str] = []
    with staging.bad.open() as bad, file.open("w") as rejects:
        for line in bad:
            fields = json.loads(line)
            staged = staging.sources[fields.pop("slot")]
            if staged.start <= fields.pop("place") < staged.stop:
                rejects.write(json.dumps(fields) + "\n")
                staged.report.drop({fields["reason"]: 1})
                shown += [f"{fields['where']}: {fields['problem']}"] if len(shown) < MAX_SHOWN else []
    if not shown:
        file.unlink()
    return shown


class SplitFiles:
    """Writers for the files of the splits; the same rows give the same bytes.

    Attributes:
        counts: split -> number of written rows.
    """

    def __init__(self, directory: Path, kind: Kind, sides: Iterable[str], rare: Collection[str] = ()) -> None:
        self.counts = dict.fromkeys(sides, 0)
        self._schema = ROW_KINDS[kind].schema_with(rare)
        self._writers = {side: pq.ParquetWriter(directory / side, self._schema) for side in self.counts}
        self._pending: dict[str, list[pa.RecordBatch]] = {side: [] for side in self.counts}

    def write(self, side: str, rows: pa.RecordBatch) -> None:
        """Adds rows to a split; row groups do not depend on the batches."""
        while len(rows):
            pending = self._pending[side]
            capacity = _ROWS_PER_GROUP - sum(map(len, pending))
            part, rows = rows.slice(0, capacity), rows.slice(capacity)
            pending.append(_conformed(part, self._schema))
            self.counts[side] += len(part)
            if len(part) == capacity or sum(each.nbytes for each in pending) > BYTES_AT_ONCE:
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
    """Rows in the current schema; data of earlier versions may lack columns."""
    if batch.schema.equals(schema):
        return batch
    names = batch.schema.names
    missing = pa.nulls(len(batch))
    columns = [batch.column(name) if name in names else missing for name in schema.names]
    return pa.record_batch([column.cast(of) for column, of in zip(columns, schema.types, strict=True)], schema)


def placed_rows(
    connection: DuckDBPyConnection, staging: Staging, *, as_read: bool
) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Split and rows of the table ``placed``, with ids, in order."""
    batches = _placed(connection, staging)
    if not as_read:
        # Positions that divide all rows into pieces that can be sorted in memory.
        found = connection.execute(
            "WITH piled AS (SELECT position, sum(bytes) OVER (ORDER BY position) AS height "
            "FROM placed JOIN keys USING (row)) "
            f"SELECT min(position) FROM piled GROUP BY floor(height / greatest({BYTES_AT_ONCE}, "
            f"(SELECT max(height) FROM piled) / {MAX_PIECES})) ORDER BY 1"
        ).fetchall()
        batches = sorted_rows(batches, staging.directory, [position for (position,) in found[1:]])
    for rows in batches:
        held_out = rows.column("held_out")
        yield TRAIN, rows.filter(pc.invert(held_out))
        yield HELD_OUT, rows.filter(held_out)


def _placed(connection: DuckDBPyConnection, staging: Staging) -> Iterator[pa.RecordBatch]:
    """The used rows, with repetitions, in reading order."""
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


def sorted_rows(
    batches: Iterable[pa.RecordBatch], directory: Path, boundaries: Sequence[int]
) -> Iterator[pa.RecordBatch]:
    """Sorts rows by their column ``position``, with files as buckets.

    Args:
        directory: for scratch files.
        boundaries: ascending positions that divide the rows into pieces that fit into memory.
    """
    files = [directory / f"piece-{number}.arrows" for number in range(len(boundaries) + 1)]
    with ExitStack() as opened:  # writes each row to the file of its piece
        writers: dict[int, pa.ipc.RecordBatchStreamWriter] = {}
        for rows in _gathered(batches):
            edges = [0, *rows["position"].to_numpy().searchsorted(boundaries).tolist(), len(rows)]
            for number, (first, last) in enumerate(pairwise(edges)):
                if first < last:
                    if number not in writers:
                        writers[number] = opened.enter_context(pa.ipc.new_stream(str(files[number]), rows.schema))
                    writers[number].write_table(rows.slice(first, last - first))
    for file in filter(Path.exists, files):
        with pa.OSFile(str(file)) as piece, pa.ipc.open_stream(piece) as reader:
            rows = reader.read_all()
            yield from rows.take(pc.sort_indices(rows["position"])).to_batches()
        file.unlink()


def _gathered(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Larger sorted tables, so that each file gets few batches."""
    pending: list[pa.RecordBatch] = []
    for batch in chain(batches, [None]):
        pending += [] if batch is None else [batch]
        if pending and (batch is None or sum(each.nbytes for each in pending) > BYTES_AT_ONCE):
            rows = pa.Table.from_batches(pending)
            yield rows.take(pc.sort_indices(rows["position"]))
            pending.clear()
