"""Tables: batches of rows of Parquet, Arrow, or `datasets`, passed on as columns and converted to rows later."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lineage.artifact import Source
from lineage.errors import ConfigError, PipelineError
from lineage.source.sources import filled_in
from tasks.data.reading.chunk import (
    BLOCK_BYTES,
    Broken,
    Chunk,
    Row,
    Rows,
    Slice,
    Unread,
    format_of,
    json_value,
    no_split,
    on_disk,
    refused,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import IterableDataset

BATCH_ROWS = 1000
_SHUFFLE_BUFFER = 10_000  # rows
_EXTENSION = b"ARROW:extension:name"
_LABEL = "label"


Convert = Callable[[object], object]  # a value as ``to_pylist`` gives it -> as JSON has it; null is converted to null


def _table_rows(name: str, first: int, stream: bytes) -> Rows:
    """The rows of columns in Arrow's stream format; ``first`` is the index of the first."""
    import pyarrow as pa

    table = pa.ipc.open_stream(stream).read_all()
    converts = {field.name: convert for field in table.schema if (convert := _conversion(field))}
    converts |= _label_names(table.schema.metadata)
    try:
        rows: list[dict[str, object] | None] = table.to_pylist()
    except (ValueError, OverflowError):  # not representable in Python: half a character, a year beyond 9999
        rows = [None] * table.num_rows
    for index, row in enumerate(rows):
        where = f"{name}[{first + index}]"
        try:
            fields = table.slice(index, 1).to_pylist()[0] if row is None else row
            fields |= {column: convert(fields[column]) for column, convert in converts.items()}
        except (ValueError, OverflowError) as error:
            found, accepted = f"a value is not readable ({error})", "text in UTF-8 and times of our calendar"
            yield Broken(where=where, reason="not readable", found=found, accepted=accepted)
        else:
            yield Row(fields=fields, where=where)


def _label_names(metadata: Mapping[bytes, bytes] | None) -> dict[str, Convert]:
    """The conversion of a column ``label`` that `datasets` stores as numbers of names, often in alphabetical order."""
    try:
        names = json.loads((metadata or {})[b"huggingface"])["info"]["features"][_LABEL]["names"]
    except (KeyError, TypeError, ValueError):  # it is no such column
        return {}
    return {_LABEL: _nullable(lambda value: names[value] if value in range(len(names)) else value)}


def _conversion(field: "pa.Field") -> Convert | None:
    """How values of a column, or of a part of it, become values as JSON has them; None: they are such values.

    What has no such form (bytes, times, tensors, unions ...) becomes no text, list or object, so that a format that
    reads the column refuses it by name.
    """
    import pyarrow as pa

    of = field.type
    if field.metadata and _EXTENSION in field.metadata:  # of a library that is not loaded here
        return _unread(field.metadata[_EXTENSION].decode(errors="replace"))
    if leaf := _of_leaf(of):
        return _nullable(leaf)
    if isinstance(of, pa.BaseExtensionType) and not isinstance(of, pa.Bool8Type):
        return _unread(of.extension_name)
    if pa.types.is_struct(of):
        return _of_struct([(each.name, _conversion(each)) for each in of])
    if pa.types.is_map(of):
        return _of_map(_conversion(of.item_field))
    if pa.types.is_dictionary(of) or pa.types.is_run_end_encoded(of):
        return _conversion(pa.field("value", of.value_type))
    if pa.types.is_union(of):
        return _unread(str(of))
    if pa.types.is_nested(of):  # all other nested types are lists: large, of a fixed size, views
        return _of_list(_conversion(of.value_field))
    return None


def _of_leaf(of: "pa.DataType") -> Convert | None:
    import pyarrow as pa

    if isinstance(of, pa.JsonType):
        return lambda value: json_value(str(value).encode())
    if pa.types.is_decimal(of):  # as DuckDB writes a literal such as 0.5
        return _number
    return str if isinstance(of, pa.UuidType) else None


def _nullable(convert: Convert) -> Convert:
    return lambda value: None if value is None else convert(value)


def _unread(name: str) -> Convert:
    return _nullable(lambda value: Unread(name))


def _number(value: object) -> object:
    """A decimal as the number of JSON with the same digits; one with more digits stays a decimal."""
    assert isinstance(value, Decimal)
    if value.as_tuple().exponent == 0 and int(value).bit_length() <= 63:
        return int(value)
    return float(value) if Decimal(repr(float(value))) == value else value


def _of_list(convert: Convert | None) -> Convert | None:
    return convert and _nullable(lambda values: [convert(value) for value in values])  # type: ignore[attr-defined]


def _of_struct(parts: Sequence[tuple[str, Convert | None]]) -> Convert:
    """An object without the null fields that a table adds to give all structs the same fields."""
    converts = {name: convert for name, convert in parts if convert}

    def converted(value: object) -> object:
        assert isinstance(value, dict)
        fields = {name: converts[name](each) if name in converts else each for name, each in value.items()}
        return {name: each for name, each in fields.items() if each is not None}

    return _nullable(converted)


def _of_map(convert: Convert | None) -> Convert:
    """An object, whose nulls are the user's; a map with a key that is no text stays a list of pairs."""

    def converted(value: object) -> object:
        assert isinstance(value, list)
        pairs = [(key, convert(each) if convert else each) for key, each in value]
        if not all(isinstance(key, str) for key, _ in pairs):
            return [list(pair) for pair in pairs]
        made = dict(pairs)
        if len(made) < len(pairs):
            raise ValueError("a map has a key twice")
        return made

    return _nullable(converted)


def read_parquet(path: Path, name: str) -> Iterator[Chunk]:
    """The rows of a Parquet file, in parts of a row group."""
    import pyarrow.parquet as pq

    # Without pre_buffer=False a whole row group is in memory, which may be the whole file.
    options = {"pre_buffer": False, "buffer_size": BLOCK_BYTES, "page_checksum_verification": True}
    with _readable(path, name, "Parquet") as file, pq.ParquetFile(file, **options) as rows:
        size = sum(rows.metadata.row_group(index).total_byte_size for index in range(rows.num_row_groups))
        fitting = max(1, rows.metadata.num_rows * BLOCK_BYTES // max(size, 1))  # fewer where rows are long
        yield from table_chunks(rows.iter_batches(batch_size=min(fitting, BATCH_ROWS)), name)


def read_arrow(path: Path, name: str) -> Iterator[Chunk]:
    """The rows of an Arrow file (Feather), or of a file in Arrow's stream format, as `datasets` writes it."""
    import pyarrow as pa

    with _readable(path, name, "Arrow") as file, pa.OSFile(str(file)) as stream:
        is_stream = stream.read(6) != b"ARROW1"
        stream.seek(0)
        if is_stream:
            found = iter(pa.ipc.open_stream(stream))
        else:
            batches = pa.ipc.open_file(stream)
            found = (batches.get_batch(index) for index in range(batches.num_record_batches))
        yield from table_chunks(map(_validated, found), name)


def table_chunks(batches: "Iterable[pa.RecordBatch | pa.Table]", name: str) -> Iterator[Chunk]:
    """Batches cut into chunks of about a megabyte, as streams: a pickled slice would contain the whole batch.

    Raises:
        DataError: two columns have one name.
    """
    import pyarrow as pa

    first = 0
    for batch in batches:
        if twice := {column for column in batch.schema.names if batch.schema.names.count(column) > 1}:
            raise refused(name, f"two columns are named {min(twice)!r}", "one of each name", "rename one")
        count = max(1, batch.num_rows * BLOCK_BYTES // max(batch.nbytes, 1))
        for start in range(0, batch.num_rows, count):
            piece, sink = batch.slice(start, count), pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, batch.schema) as writer:
                writer.write(piece)
            yield Chunk(rows=partial(_table_rows, name, first + start, sink.getvalue().to_pybytes()))
        first += batch.num_rows


def _validated(batch: "pa.RecordBatch") -> "pa.RecordBatch":
    """The batch, after a check of its offsets: with wrong ones a damaged file would crash the process.

    Raises:
        pa.ArrowInvalid: some are wrong.
    """
    import pyarrow as pa

    # As bytes, so that those other than UTF-8 break only their row.
    bare = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}
    for column in batch.columns:
        # A view of some types, such as string_view, as themselves would crash.
        (column.view(bare[column.type]) if column.type in bare else column).validate(full=True)
    return batch


@contextmanager
def _readable(path: Path, name: str, kind: str) -> Iterator[Path]:
    """The unpacked file (DataError: the library of the format cannot read it)."""
    import pyarrow as pa

    with on_disk(path, name) as file:
        try:
            yield file
        except (OSError, ValueError, OverflowError, pa.ArrowException) as error:
            with file.open("rb") as stream:
                found = format_of(stream.read(64))
            cause = "cut or damaged" if found == kind else found
            remedy = "write or download it again, or give it the suffix of what it is"
            if isinstance(error, pa.ArrowNotImplementedError):  # such as integers of 128 bits
                cause, remedy = "of a kind that pyarrow does not read", "write the column as another type"
            raise refused(name, f"the file is {cause} ({str(error).splitlines()[0]})", kind, remedy) from error


def is_saved(directory: Path) -> bool:
    """Whether `datasets` saved a data set there."""
    return any((directory / name).exists() for name in ("dataset_dict.json", "state.json"))


def read_saved(directory: Path, split: str) -> Iterator[Chunk]:
    """The rows of a saved data set, or of a split of it."""
    import datasets

    with _named_errors(str(directory), split):
        data = datasets.load_from_disk(str(directory))
        splits = data if isinstance(data, datasets.DatasetDict) else {"train": data}
        if split not in splits:
            raise no_split(str(directory), split, splits)
        yield from table_chunks(splits[split].with_format("arrow").iter(batch_size=BATCH_ROWS), str(directory))


def read_loaded(source: Source, split: str, part: Slice | None) -> Iterator[Chunk]:
    """The rows of a split of a data set of the hub, or of a directory like one; streaming reads only what is needed."""
    import datasets

    bounded = _bounded(source, part) if source.streaming else None
    with _named_errors(source.path, split):
        rows = datasets.load_dataset(
            filled_in(source.path), name=source.subset, revision=source.revision,
            split=split, streaming=source.streaming, **source.loader,
        )  # fmt: skip
        if bounded:
            rows = bounded(rows)
        yield from table_chunks(rows.with_format("arrow").iter(batch_size=BATCH_ROWS), source.path)


def _bounded(source: Source, part: Slice | None) -> "Callable[[IterableDataset], IterableDataset]":
    """A function that limits how much of a stream is read.

    For a slice, all rows up to its end are read. A sample is drawn from a shuffling buffer.
    """
    count = part.last if part else source.sample_count
    if count is None:
        raise ConfigError(
            f"{source.path}: streaming without an end{f' (split={part.text})' if part else ''}; a number of rows is "
            "accepted; set sample_count, or a slice from the beginning in rows, such as split=train[:100000]"
        )
    if part or source.shuffle_seed is None:
        return lambda stream: stream.take(count)
    seed, buffer = source.shuffle_seed, source.shuffle_buffer or _SHUFFLE_BUFFER
    return lambda stream: stream.shuffle(seed=seed, buffer_size=buffer).take(count)


@contextmanager
def _named_errors(path: str, split: str) -> Iterator[None]:
    """Names the source in errors of `datasets`, its file systems and the network, which have no common base."""
    try:
        yield
    except PipelineError:
        raise
    except Exception as error:
        message = str(error).strip().partition("\n")[0] or "no message"
        found = f"`datasets` reads no split {split!r} from it ({type(error).__name__}: {message})"
        accepted = "a file, a directory or glob of files, a saved data set, or a hub id"
        raise refused(path, found, accepted, "correct the path, or set split or subset") from error
