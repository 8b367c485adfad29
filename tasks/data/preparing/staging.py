"""Rows on their way through: converted by processes, they wait on the disk until it is known where each belongs."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TextIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lineage.artifact import Source
from lineage.errors import DataError
from tasks.data.formats.detect import Detected
from tasks.data.kinds import ROW_KINDS
from tasks.data.ordered_pool import ordered_map
from tasks.data.preparing.convert_rows import (
    KEYS,
    MAX_PLACES,
    Converted,
    ConvertRows,
    Opened,
    detect_source,
)
from tasks.data.preparing.report import REJECTS, Remark
from tasks.data.reading.chunk import Chunk, parse_split

INLINE_BELOW = 8  # chunks, of about a megabyte: converting these takes as long as starting processes
_STAGED_KEYS = pa.schema([("row", pa.int64()), ("slot", pa.int32()), *KEYS])


@dataclass(kw_only=True)
class StagedSource:
    """What was read of one source.

    Args:
        number: of its slot, in the order in which the slots are read.
        rows_read: good and bad.
        start, stop: its slice, among all rows that were read.
        splits: what of its plain texts was a row.
    """

    number: int
    source: Source
    detected: Detected | None
    rows_read: int = 0
    start: int = 0
    stop: int = 0
    remarks: dict[str, Remark] = field(default_factory=dict)
    ignored: Counter[str] = field(default_factory=Counter)
    splits: set[str] = field(default_factory=set)


@dataclass(kw_only=True)
class Staging:
    """The rows of all slots.

    Args:
        schema: of ``rows``: the columns of their kind, without ids.
        count: of the good rows.

    Files:
        rows: the good ones as Arrow streams, one behind the other; ``row`` in ``keys`` counts them from 0.
        keys: what decides where they belong, as Parquet: ``row``, ``slot``, ``place`` among all that were read of its
            source, and the columns of ``Converted.keys``.
        bad: a JSON object a line for each bad row: its slot, and what ``Reject`` has.
    """

    schema: pa.Schema
    rows: Path
    keys: Path
    bad: Path
    sources: dict[str, StagedSource] = field(default_factory=dict)
    count: int = 0

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
    staging = Staging(
        schema=ROW_KINDS[convert.kind].schema.remove(0), rows=directory / "rows.arrows",
        keys=directory / "keys.parquet", bad=directory / "bad.jsonl",
    )  # fmt: skip
    with (
        staging.rows.open("wb") as rows,
        staging.bad.open("w") as bad,
        pq.ParquetWriter(staging.keys, _STAGED_KEYS) as keys,
    ):
        for slot, source in sources.items():
            each = (opened or {}).get(slot) or detect_source(source, convert.prompt_template)
            each.require_kind(convert.kind)
            staged = StagedSource(number=len(staging.sources), source=source, detected=each.detected)
            staging.sources[slot] = staged
            for converted in _converted(staged, each.chunks, convert, workers):
                if converted.rows and converted.keys:
                    rows.write(converted.rows)
                    keys.write_batch(_keys(staging, staged, converted.keys))
                    staging.count += len(converted.keys)
                _note(bad, staged, converted)
            staged.start, staged.stop = _bounds(source, staged.rows_read)
    return staging


def _converted(
    staged: StagedSource, chunks: Iterator[Chunk], convert: ConvertRows, workers: int
) -> Iterator[Converted]:
    """The chunks of a source, up to the end of its slice where that is known beforehand."""
    _, part = parse_split(staged.source.split)
    for converted in ordered_map(
        replace(convert, detected=staged.detected), chunks, workers, inline_below=INLINE_BELOW
    ):
        yield converted
        if part and part.last is not None and staged.rows_read >= part.last:
            return


def _bounds(source: Source, count: int) -> tuple[int, int]:
    _, part = parse_split(source.split)
    return part.bounds(count) if part else (0, count)


def _keys(staging: Staging, staged: StagedSource, keys: pa.RecordBatch) -> pa.RecordBatch:
    rows = np.arange(staging.count, staging.count + len(keys))
    columns = [pa.array(rows), pa.repeat(pa.scalar(staged.number, pa.int32()), len(keys)), *keys.columns]
    places = _STAGED_KEYS.get_field_index("place")
    columns[places] = pc.add(columns[places], staged.rows_read)
    return pa.record_batch(columns, _STAGED_KEYS)


def _note(bad: TextIO, staged: StagedSource, converted: Converted) -> None:
    """What a chunk adds to the stats of its source."""
    for reject in converted.rejects:
        fields = {**asdict(reject), "place": staged.rows_read + reject.place, "slot": staged.number}
        bad.write(json.dumps(fields) + "\n")
    staged.rows_read += converted.count
    staged.splits.update(converted.splits)
    staged.ignored.update(converted.ignored)
    for words, remark in converted.remarks.items():
        known = staged.remarks.setdefault(words, Remark())
        known.count += remark.count
        known.places += remark.places[: MAX_PLACES - len(known.places)]


_MAX_SHOWN = 20  # in one message


@dataclass(frozen=True, kw_only=True)
class Rejects:
    """The bad rows of the slices that were asked for.

    Args:
        reasons: slot -> reason -> rows.
        shown: the first of them, ``where: problem``.
        file: ``rejects.jsonl``, with where, reason, problem and the beginning of each; None: there are none.
    """

    reasons: Mapping[str, Counter[str]]
    shown: list[str]
    file: Path | None

    @property
    def name(self) -> str | None:
        """Of the file."""
        return self.file.name if self.file else None

    @property
    def count(self) -> int:
        return sum(reasons.total() for reasons in self.reasons.values())

    def refusal(self, num_rows: int) -> DataError:
        """What is said where they are too many, of so many rows in all."""
        more = [f"and {self.count - _MAX_SHOWN} more"] if self.count > _MAX_SHOWN else []
        listed = "\n  ".join([f"{self.count} of {num_rows} rows cannot be used:", *self.shown, *more])
        return DataError(
            f"{listed}\nall of them are in {self.file}; mend them, or leave them out with max_bad_rows={self.count}"
        )


def settle_rejects(staging: Staging, directory: Path) -> Rejects:
    """Writes those of the slices that were asked for beside the rows.

    The stage's ``output/`` stays when a stage refuses: until the same stage runs again, which writes them anew.
    """
    slots = list(staging.sources)
    reasons: dict[str, Counter[str]] = {slot: Counter() for slot in slots}
    shown: list[str] = []
    file = directory / REJECTS
    with staging.bad.open() as bad, file.open("w") as rejects:
        for line in bad:
            fields = json.loads(line)
            slot = slots[fields.pop("slot")]
            if not staging.sources[slot].start <= fields.pop("place") < staging.sources[slot].stop:
                continue
            rejects.write(json.dumps(fields) + "\n")
            reasons[slot][fields["reason"]] += 1
            if len(shown) < _MAX_SHOWN:
                shown.append(f"{fields['where']}: {fields['problem']}")
    if not shown:
        file.unlink()
    return Rejects(reasons=reasons, shown=shown, file=file if shown else None)
