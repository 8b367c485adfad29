"""What a process does with a piece of a source: every row is brought into one form, checked, named and measured."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lineage.artifact import Kind
from tasks.data.formats.detect import Detected
from tasks.data.formats.prompting import with_prompt, with_system
from tasks.data.formats.remarks import remarks
from tasks.data.formats.values import BadRowError, CanonicalRow, Fields, optional_name
from tasks.data.kinds import ROW_KINDS
from tasks.data.preparing.columns import record_batch
from tasks.data.preparing.near_duplicates import BANDS, band_hashes
from tasks.data.preparing.report import Remark
from tasks.data.preparing.row_split import canonical, content_hash, key_of, key_share
from tasks.data.reading.chunk import Broken, Chunk, Row
from tasks.data.reading.lines import TextChunk
from tasks.data.schema import texts_of

GROUP = "group"
_MAX_RAW = 2000  # characters of a bad row in the file of rejects
MAX_PLACES = 5  # of rows that a remark names
KEYS = pa.schema(
    [
        ("place", pa.int64()),
        ("content", pa.uint64()),
        ("share", pa.uint64()),
        ("bytes", pa.int64()),
        *((band, pa.uint64()) for band in BANDS),
    ]
)
_NOT_DETECTED = BadRowError(
    "its format is not known, since no row before it can be read", "format not known", "rows of one format",
    "correct the first rows",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Reject:
    """A row that cannot be used.

    Args:
        place: among all rows of its chunk, good and bad, from 0.
    """

    place: int
    where: str
    reason: str
    problem: str
    raw: str


@dataclass(kw_only=True)
class Converted:
    """A chunk's rows.

    Args:
        count: of the rows, good and bad.
        rows: the good ones as an Arrow stream: it takes no work to write it.
        keys: one row for each of them: ``place`` among all rows of the chunk, ``content`` and ``share`` (their hashes),
            ``bytes`` of text, and the bands of near-duplicates.
        remarks, ignored: as in the report of the source.
        splits: what of plain text was a row.
    """

    count: int = 0
    rows: pa.Buffer | None = None
    keys: pa.RecordBatch | None = None
    rejects: list[Reject] = field(default_factory=list)
    remarks: dict[str, Remark] = field(default_factory=dict)
    ignored: Counter[str] = field(default_factory=Counter)
    splits: set[str] = field(default_factory=set)


@dataclass(frozen=True, kw_only=True)
class ConvertRows:
    """Converts chunks of one source. Can be pickled.

    Args:
        kind: of the rows that come out.
        seed: of the split.
        detected: how they are read; None: not one of the first rows can be.
    """

    kind: Kind
    seed: int
    system_prompt: str | None
    prompt_template: str | None
    detected: Detected | None = None

    def __call__(self, chunk: Chunk) -> Converted:
        found = Converted(splits={chunk.split_by} if isinstance(chunk, TextChunk) else set())
        rows: list[CanonicalRow] = []
        places: list[int] = []
        named: list[tuple[int, int]] = []  # content and share of each
        shapes: Counter[tuple[str, ...]] = Counter()
        for place, entry in enumerate(chunk.rows()):
            found.count += 1
            if isinstance(entry, Broken):
                found.rejects.append(
                    Reject(place=place, where=entry.where, reason=entry.reason, problem=entry.problem, raw=entry.raw)
                )
                continue
            try:
                fields = templated(entry.fields, self.prompt_template)
                group = optional_name(fields.get(self._group_column), "group")
                row = self._row(fields)
                share = key_share(group or key_of(row), self.seed)
            except BadRowError as error:
                found.rejects.append(_reject(place, entry, error))
                continue
            shapes[tuple(fields)] += 1
            if self.system_prompt is not None:
                row = with_system(row, self.system_prompt)
            rows.append(row)
            places.append(place)
            named.append((content_hash(canonical(row)), share))
            _note(found.remarks, row, entry.where)
        self._finish(found, rows, places, named)
        self._count_ignored(found, shapes)
        return found

    def _row(self, fields: Fields) -> CanonicalRow:
        if self.detected is None:
            raise _NOT_DETECTED
        return self.detected.convert(fields)

    @property
    def _group_column(self) -> str:
        return self.detected.columns.get(GROUP, GROUP) if self.detected else GROUP

    def _finish(
        self, found: Converted, rows: list[CanonicalRow], places: list[int], named: list[tuple[int, int]]
    ) -> None:
        if not rows:
            return
        batch = record_batch(rows, ROW_KINDS[self.kind].schema.remove(0))  # the first is the id
        texts = texts_of(batch)
        bands = np.ascontiguousarray(band_hashes(texts).T)
        found.keys = pa.record_batch(
            [
                pa.array(places, pa.int64()),
                pa.array([content for content, _ in named], pa.uint64()),
                pa.array([share for _, share in named], pa.uint64()),
                pc.binary_length(texts).cast(pa.int64()),
                *map(pa.array, bands),
            ],
            KEYS,
        )
        found.rows = stream_of(batch)

    def _count_ignored(self, found: Converted, shapes: Mapping[tuple[str, ...], int]) -> None:
        for names, count in shapes.items():
            assert self.detected
            read = {*self.detected.read_columns(dict.fromkeys(names)), self._group_column}
            found.ignored.update({name: count for name in names if name not in read})


def templated(fields: Fields, template: str | None) -> Fields:
    """A row as its format sees it: with the prompt that the user's template makes of its columns."""
    return fields if template is None else with_prompt(fields, template)


def stream_of(batch: pa.RecordBatch) -> pa.Buffer:
    """A batch as an Arrow stream of its own; many of them, one behind the other, are a file."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def _reject(place: int, row: Row, error: BadRowError) -> Reject:
    raw = json.dumps(dict(row.fields), default=str)[:_MAX_RAW]
    return Reject(place=place, where=row.where, reason=error.reason, problem=str(error), raw=raw)


def _note(noted: dict[str, Remark], row: CanonicalRow, where: str) -> None:
    for words in remarks(row):
        remark = noted.setdefault(words, Remark())
        remark.count += 1
        if len(remark.places) < MAX_PLACES:
            remark.places.append(where)
