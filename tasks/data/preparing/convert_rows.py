"""Detects the format of a source, and converts its chunks: each row is checked, converted and hashed."""

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from duckdb import DuckDBPyConnection

from lineage.artifact import Kind, Source
from lineage.errors import DataError
from tasks.data.formats.detect import WITHOUT_LOSS, Detected, detect
from tasks.data.formats.proposals import renamed_row, with_inner, with_prompt
from tasks.data.formats.trees import Into, is_rated, is_tree, rows_of_trees
from tasks.data.formats.turns import (
    PYTHONS_CALL,
    BadRowError,
    CanonicalRow,
    Fields,
    canonical,
    named,
    optional_name,
    tool_nulls,
    without_tool_nulls,
)
from tasks.data.images import (
    WITH_IMAGES,
    ImageFiles,
    has_images,
    require_no_marks,
    require_none_in_answers,
    with_images,
)
from tasks.data.kinds import DOMAIN, HELD_OUT, ROW_KINDS, TRAIN, ordered_map, texts_of
from tasks.data.preparing.options import Prepare
from tasks.data.preparing.repeats import BANDS, band_hashes
from tasks.data.preparing.report import REJECTS, DataReport, Remark, SourceReport, few_alike
from tasks.data.reading.chunk import Broken, Chunk, Row, parse_split, parsed
from tasks.data.reading.read import read_chunks, with_archive_here

GROUP = "group"
SAMPLE = 1000  # rows for the detection of the format
_MAX_DOMAIN = 100  # characters of a label
_MAX_RAW = 2000  # characters of a bad row in the file of rejects
KEYS = pa.schema([
    ("place", pa.int64()), ("content", pa.uint64()), ("share", pa.uint64()), ("bytes", pa.int64()),
    *((band, pa.uint64()) for band in BANDS),
])  # fmt: skip
_NOT_DETECTED = BadRowError(
    "its format is not known, since no row before it can be read", "format not known", "rows of one format",
    "correct the first rows",
)  # fmt: skip
# Searched one by one, which takes a third of the time of a regex.
_ASCII = {"NUL characters": "\0", "control characters": "".join(map(chr, (*range(1, 9), 11, 12, *range(14, 32), 127)))}
_BEYOND = {
    "control characters": "".join(map(chr, range(0x80, 0xA0))),  # mostly Windows text that was read as Latin-1
    "bidirectional controls": "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069",
    "byte order marks U+FEFF": "\ufeff",
    "replacement characters U+FFFD": "\ufffd",  # the text was broken by an earlier decoder
}
WITHOUT_NULLS = "nulls dropped from calls and tools"
ROLE_MARKS = "role marks in an answer"  # probably a transcript instead of one turn
_ROLE_MARKS = (
    "<|im_start|>", "<|start_header_id|>", "<|user|>", "<start_of_turn>", "[INST]", "### Instruction:", "USER:",
    "\nUser:", "\nHuman:",
)  # fmt: skip


@dataclass(kw_only=True)
class Converted:
    """The converted rows of a chunk.

    Args:
        count: number of rows, good and bad.
        rows: the good rows as an Arrow stream.
        keys: a row for each good row: ``place`` in the chunk, the hashes ``content`` and ``share``, ``bytes`` of
            text, and the bands for near-duplicates.
        rejects: place in the chunk and problem of each bad row.
        remarks, ignored: as in the report of the source.
        split_by: unit of a row in plain text.
        rare: the rare columns that a row has.
    """

    split_by: str | None
    count: int = 0
    rows: pa.Buffer | None = None
    keys: pa.RecordBatch | None = None
    rejects: list[tuple[int, Broken]] = field(default_factory=list)
    remarks: dict[str, Remark] = field(default_factory=dict)
    ignored: Counter[str] = field(default_factory=Counter)
    rare: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class ConvertRows:
    """Converts chunks of one source. Picklable.

    Args:
        kind: kind of the converted rows.
        seed: seed of the split.
        detected: how rows are read; None: none of the first rows is readable.
        images: where the images of its rows are, if rows of this kind may have any.
    """

    kind: Kind
    seed: int
    system_prompt: str | None
    prompt_template: str | None
    tool_nulls: str | None = None
    detected: Detected | None = None
    images: ImageFiles | None = None

    @staticmethod
    def of(options: Prepare) -> "ConvertRows":
        """The conversion of a data stage, without the detected format."""
        return ConvertRows(
            kind=options.produces, seed=options.seed, system_prompt=options.system_prompt,
            prompt_template=options.prompt_template, tool_nulls=options.tool_nulls,
        )  # fmt: skip

    def __call__(self, chunk: Chunk) -> Converted:
        found = Converted(split_by=chunk.split_by)
        rows: list[CanonicalRow] = []
        named: list[tuple[int, int, int]] = []  # place, content and share of each
        shapes: Counter[tuple[str, ...]] = Counter()
        group_column = self.detected.columns.get(GROUP, GROUP) if self.detected else GROUP
        for place, entry in enumerate(chunk.rows()):
            found.count += 1
            if isinstance(entry, Broken):
                found.rejects.append((place, entry))
                continue
            try:
                fields = with_prompt(entry.fields, self.prompt_template) if self.prompt_template else entry.fields
                group = optional_name(fields.get(group_column), "group")
                if self.detected is None:
                    raise _NOT_DETECTED
                fields = self.detected.filled(fields)
                fields, sees = self._with_images(fields)
                row = self.detected.convert(fields)
                nulls = self._nulls_of_tools(fields, row)
                if nulls:
                    cleaned = without_tool_nulls(fields)
                    assert isinstance(cleaned, dict)
                    row = self.detected.convert(cleaned)
                require_none_in_answers(row, ROW_KINDS[self.kind].answers if sees else ())
                label = self._label(fields)
            except BadRowError as error:
                found.rejects.append((place, _reject(entry, error)))
                continue
            share = key_share(group or key_of(row), self.seed)
            shapes[tuple(fields)] += 1
            if self.system_prompt is not None:
                row = with_system(row, self.system_prompt)
            rows.append(row)
            named.append((place, content_hash(canonical(row)), share))
            for text in (*remarks(row), *([WITHOUT_NULLS] if nulls else [])):
                found.remarks.setdefault(text, Remark()).add(1, [entry.where])
            row.update(label)  # no part of its content
        for names, count in shapes.items():
            assert self.detected
            read = self.detected.read_columns(dict.fromkeys(names))
            found.ignored.update({name: count for name in names if name not in read})
        if rows:
            kind = ROW_KINDS[self.kind]
            found.rare = frozenset(name for name in kind.rare if any(name in row for row in rows))
            batch = record_batch(rows, kind.schema_with(kind.rare).remove(0))  # the first is the id
            found.rows, found.keys = _stream_of(batch), _keys(batch, named)
        return found

    def _with_images(self, fields: Fields) -> tuple[Fields, bool]:
        """A row with marks in place of its images, and whether it has any.

        Raises:
            BadRowError: an image is bad, or a text spells such a mark.
        """
        if self.images and has_images(fields):
            return with_images(fields, self.images), True
        if self.images:
            require_no_marks(fields)
        return fields, False

    def _label(self, fields: Fields) -> dict[str, str]:
        """The label of a row, where its source names a column of them.

        Raises:
            BadRowError: it is no short text, whole number, true or false.
        """
        if not (self.detected and self.detected.domain):
            return {}
        value = with_inner(fields, self.detected.columns).get(self.detected.domain)
        if value is not None and (not isinstance(value, str | int) or len(str(value)) > _MAX_DOMAIN):
            accepted = f"a text of at most {_MAX_DOMAIN} characters, a number or null"
            raise BadRowError(f"{DOMAIN} is {named(value)}", "not a label", accepted)
        return {} if value in (None, "") else {DOMAIN: str(value)}

    def _nulls_of_tools(self, fields: Fields, row: CanonicalRow) -> bool:
        """Whether there are nulls in calls and tools, which are to be dropped.

        Raises:
            BadRowError: there are, and nothing says what they mean.
        """
        if self.tool_nulls == "keep" or not (self.detected and _has_tools(row)):
            return False
        mapping, ours = self.detected.format.mapping, self.detected.columns
        read = {ours.get(name, name) for name in mapping}  # other columns of prompts are for a reward function
        place = next(tool_nulls({name: fields[name] for name in fields if name in read}), None)
        if place and self.tool_nulls is None:
            raise BadRowError(
                f"{place} is null, as `datasets` and polars write the keys of other calls", "null in a call or tool",
                "arguments without nulls, or as JSON text",
                "leave such nulls out with tool_nulls=drop, or take them as they are with tool_nulls=keep",
            )  # fmt: skip
        return place is not None


def _has_tools(row: CanonicalRow) -> bool:
    turns = [turn for value in row.values() if isinstance(value, list) for turn in value]
    return "tools" in row or any("tool_calls" in turn for turn in turns)


def with_system(row: CanonicalRow, text: str) -> CanonicalRow:
    """A row with this system turn, unless it has its own."""
    name = "messages" if "messages" in row else "prompt"
    turns = row[name]
    assert isinstance(turns, list), "rows of text have no turns"
    if turns[0]["role"] == "system":
        return row
    return {**row, name: [{"role": "system", "content": text}, *turns]}


def _keys(batch: pa.RecordBatch, named: Sequence[tuple[int, int, int]]) -> pa.RecordBatch:
    texts = texts_of(batch)
    numbers = [pa.array(each, of) for each, of in zip(zip(*named, strict=True), KEYS.types, strict=False)]
    bands = map(pa.array, np.ascontiguousarray(band_hashes(texts).T))
    return pa.record_batch([*numbers, pc.binary_length(texts).cast(pa.int64()), *bands], KEYS)


def _reject(row: Row, error: BadRowError) -> Broken:
    raw = ""
    with suppress(RecursionError):  # nested too deep to be shown
        raw = json.dumps(dict(row.fields), default=str)[:_MAX_RAW]
    return Broken(
        where=row.where, found=error.found, reason=error.reason, accepted=error.accepted, remedy=error.remedy, raw=raw
    )


def _stream_of(batch: pa.RecordBatch) -> pa.Buffer:
    """A batch as an Arrow stream; concatenated streams form a file."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def remarks(row: CanonicalRow) -> tuple[str, ...]:
    """Warnings on a row's texts, as categories for counts."""
    joined = "\n".join(_texts(row))
    found = [text for text, odd in _ASCII.items() if any(map(joined.__contains__, odd))]
    if not joined.isascii():
        found += [text for text, odd in _BEYOND.items() if any(map(joined.__contains__, odd))]
    messages = row.get("messages")
    if isinstance(messages, list) and messages[-1]["role"] != "assistant":
        found.append("no answer to the last turn")
    if any(mark in text for text in _texts(row, "assistant") for mark in _ROLE_MARKS):
        found.append(ROLE_MARKS)
    if "<tool_call>" in joined and any(map(PYTHONS_CALL.search, _texts(row, "assistant"))):
        found.append("calls as literals of Python, not as JSON")
    return tuple(dict.fromkeys(found))


def _texts(row: CanonicalRow, role: str | None = None) -> list[str]:
    """The texts of a row, or of its messages of one role."""
    texts: list[str] = []
    for value in row.values():
        if isinstance(value, str) and role is None:
            texts.append(value)
        elif isinstance(value, list):
            texts += [message["content"] for message in value if role in (None, message["role"])]
    return texts


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A source with its detected format, whose rows are read only once.

    Args:
        detected: how rows are read; None: none of the first rows is readable.
        chunks: all rows, including those read for the detection.
        unused: number of messages of trees that no row has.
    """

    source: Source
    detected: Detected | None
    chunks: Iterator[Chunk]
    unused: int = 0

    @property
    def kind(self) -> Kind | None:
        """Kind of the converted rows."""
        return self.detected.format.kind if self.detected else None

    def report(self) -> SourceReport:
        """The report before any row is counted."""
        name, evidence, mapping = "unknown", "not one of the first rows can be read", dict[str, str]()
        if self.detected:
            name, evidence, mapping = self.detected.name, self.detected.evidence, self.detected.mapping
        unused = {"messages of trees in no row": Remark(count=self.unused)} if self.unused else {}
        return SourceReport(path=self.source.path, format=name, evidence=evidence, mapping=mapping, remarks=unused)

    def refusal(self, accepted: Kind, remedy: str) -> DataError:
        """The error for rows of another kind than ``accepted``."""
        assert self.detected
        return DataError(self.detected.refusal(self.source.path, accepted, remedy))

    def require_kind(self, kind: Kind) -> None:
        """Refuses rows of another kind."""
        refusal = self.detected and self.detected.refusal_by_stage(self.source.path, kind)
        if refusal:
            raise DataError(refusal)


def detect_source(source: Source, template: str | None = None, kind: Kind | None = None) -> Opened:
    """Opens a source and detects its format from the first rows.

    Args:
        template: prompt template, applied before the detection.
        kind: what trees of messages become, if the source does not set it by ``format``; None: conversations, and
            pairs where answers are rated.

    Raises:
        DataError: there are no rows, no format fits them, or several do.
    """
    chunks = read_chunks(source)
    looked_at, count, sample = list[Chunk](), 0, list[Fields]()
    for chunk in chunks:
        looked_at.append(chunk)
        for entry in chunk.rows():
            count += 1
            if isinstance(entry, Row) and len(sample) < SAMPLE:
                with suppress(BadRowError):  # reported when all rows are read
                    sample.append(with_prompt(entry.fields, template) if template else entry.fields)
        if count >= SAMPLE:
            break
    messages = [_named(fields, source) for fields in sample]
    if source.format in (None, "messages", "preference") and is_tree(messages, source.columns, kind):
        what = "prompts with rated answers, {} messages" if is_rated(sample) else "trees of {} messages"
        default = Kind.PREFERENCES if is_rated(sample) else None
        return _of_trees(source, chain(looked_at, chunks), kind or default, what)
    detected = None
    if sample or not count:
        detected = detect(
            sample, source.path, columns=source.columns, configured=source.format, kind=kind,
            templated=template is not None,
        )  # fmt: skip
    return Opened(source=source, detected=detected, chunks=chain(looked_at, chunks))


def _of_trees(source: Source, chunks: Iterable[Chunk], kind: Kind | None, what: str) -> Opened:
    """The conversations or pairs of trees of messages, all of which are read into memory.

    Args:
        what: they are, with a place for the number of messages.

    Raises:
        DataError: there are none, or texts are to be made of them.
    """
    if source.format is None and kind == Kind.TEXT:
        raise DataError(
            f"{source.path}: its rows are messages of trees, or rated answers; conversations and pairs are made of "
            "them by conf/stage/conversations.yaml and conf/stage/preferences.yaml; use one of these, or set "
            "format=text to read each message as a document"
        )
    into: Into = "preference" if kind in (Kind.PREFERENCES, Kind.UNPAIRED) else "messages"
    if source.format is not None:
        into = "preference" if source.format == "preference" else "messages"
    entries = [
        replace(entry, fields=_named(entry.fields, source)) if isinstance(entry, Row) else entry
        for chunk in chunks for entry in chunk.rows()
    ]  # fmt: skip
    broken = [entry for entry in entries if isinstance(entry, Broken)]
    made, count, unused = rows_of_trees([entry for entry in entries if isinstance(entry, Row)], into)
    if not made:
        raise DataError(
            f"{source.path}: {count} messages of trees give no row of {into}; replies of the assistant to messages of "
            "users are accepted, and for pairs two of different rank to one message; correct parent_id, role and rank"
        )
    columns = {} if _names_messages(source) else source.columns
    detected = detect([row.fields for row in made[:SAMPLE]], source.path, columns=columns, configured=into)
    detected = replace(detected, evidence=what.format(count), configured=source.format is not None)
    parts = [made[start : start + SAMPLE] for start in range(0, len(made), SAMPLE)]
    return Opened(
        source=source, detected=detected, unused=unused,
        chunks=iter([*([parsed(*broken)] if broken else []), *(parsed(*part) for part in parts)]),
    )  # fmt: skip


def _named(fields: Fields, source: Source) -> Fields:
    """A row with the names of a message of a tree, where ``columns`` gives it such."""
    if not _names_messages(source):
        return fields
    with suppress(BadRowError):  # two columns of one name
        return renamed_row(fields, source.columns)
    return fields


def _names_messages(source: Source) -> bool:
    return not {"parent_id", "message_id", "role", "text"}.isdisjoint(source.columns)


def record_batch(rows: Sequence[CanonicalRow], schema: pa.Schema) -> pa.RecordBatch:
    """A batch of rows of one kind; missing values are null. By column, which is six times as fast as by row."""
    return pa.record_batch([_array([row.get(field.name) for row in rows], field.type) for field in schema], schema)


def _array(values: Sequence[object], kind: pa.DataType) -> pa.Array:
    """A column of texts, booleans or lists of messages."""
    if not pa.types.is_list(kind):
        return pa.array(values, kind)
    conversations = [messages for messages in values if isinstance(messages, list)]
    offsets = pa.array(np.cumsum([0, *map(len, conversations)]), pa.int32())
    flat = [message for messages in conversations for message in messages]
    fields = list(kind.value_type)
    parts = [pa.array([message.get(field.name) for message in flat], field.type) for field in fields]
    return pa.ListArray.from_arrays(offsets, pa.StructArray.from_arrays(parts, fields=fields), type=kind)


# The identity of rows.


def content_hash(text: str) -> int:
    """64-bit hash of a row's canonical text; in hexadecimal it is the row's id."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])


def key_of(row: CanonicalRow) -> str:
    """The default group of a row for the split: its prompt, or else the row itself.

    All answers to a prompt belong to one split: a prompt that was trained on measures little.
    """
    if "prompt" in row:
        return canonical(row["prompt"])
    turns = row.get("messages")
    if isinstance(turns, list):
        last_answer = max((place for place, turn in enumerate(turns) if turn["role"] == "assistant"), default=0)
        if any(turn["role"] == "user" for turn in turns[:last_answer]):
            return canonical(turns[:last_answer])
    return canonical(row)


def key_share(key: str, seed: int) -> int:
    """Hash in [0, 2^64) of a group, independent of other rows; the lowest values are held out."""
    return content_hash(f"{seed}:{key}")


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
        self.rows, self.keys, self.bad, self.images = (
            self.directory / name for name in ("rows.arrows", "keys.parquet", "bad.jsonl", "images")
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
            images = None
            if convert.kind in WITH_IMAGES:
                images = ImageFiles.of(with_archive_here(source, directory / f"archive-{slot}"), staging.images)
            convert = replace(convert, detected=each.detected, images=images)
            for converted in ordered_map(convert, each.chunks, workers):
                if converted.rows and converted.keys:
                    rows.write(converted.rows)
                    keys.write_batch(_staged_keys(staging, staged, converted.keys))
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


def _staged_keys(staging: Staging, staged: StagedSource, keys: pa.RecordBatch) -> pa.RecordBatch:
    rows = np.arange(staging.count, staging.count + len(keys))
    places = pc.add(keys.column("place"), staged.report.rows_read)
    columns = [rows, np.full(len(keys), staged.number, np.int32), places, *keys.columns[1:]]
    return pa.record_batch(columns, _STAGED_KEYS)


def _settle_rejects(staging: Staging, file: Path) -> list[str]:
    """Writes and counts the bad rows inside the slices; returns the first ones of each problem as ``where: problem``.

    Rows that their columns leave out are only counted.

    They stay in the stage's ``output/`` after a failure, until the stage runs again.
    """
    shown, alike = list[str](), Counter[str]()
    with staging.bad.open() as bad, file.open("w") as rejects:
        for line in bad:
            fields = json.loads(line)
            staged = staging.sources[fields.pop("slot")]
            if not staged.start <= fields.pop("place") < staged.stop:
                continue
            staged.report.drop({fields["reason"]: 1})
            if fields["reason"] != WITHOUT_LOSS:
                rejects.write(json.dumps(fields) + "\n")
                if len(shown) < MAX_SHOWN:
                    shown += few_alike([f"{fields['where']}: {fields['problem']}"], alike)
    if not shown:
        file.unlink()
    return shown


def settle_bad_rows(staging: Staging, report: DataReport, options: Prepare, directory: Path) -> DataError | None:
    """Writes and counts the bad rows; the error if there are more than ``max_bad_rows``."""
    shown = _settle_rejects(staging, directory / REJECTS)
    report.rejects = REJECTS if shown else None
    num_rows = sum(staged.stop - staged.start for staged in staging.sources.values())
    bad = Counter[str]()
    for source in report.sources.values():
        bad.update({reason: count for reason, count in source.dropped.items() if reason != WITHOUT_LOSS})
    if options.accepts_bad_rows(bad, num_rows):
        return None
    count = bad.total()
    report.counts |= {"rows": num_rows - report.num_dropped, "dropped": report.num_dropped}
    more = [f"and {count - len(shown)} more"] if count > len(shown) else []
    listed = "\n  ".join([f"{count} of {num_rows} rows cannot be used:", *shown, *more])
    where = f"all of them are in {directory / REJECTS}"
    others = f", or leave them out with max_bad_rows={count}" if count < num_rows else "; no row is left without them"
    return DataError(f"{listed}\n{where}; correct them{others}")


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


def write_placed(connection: DuckDBPyConnection, staging: Staging, files: SplitFiles, *, as_read: bool) -> None:
    """Writes the rows of the table ``placed`` to the files of their splits, with ids, in order."""
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
        files.write(TRAIN, rows.filter(pc.invert(held_out)))
        files.write(HELD_OUT, rows.filter(held_out))


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
