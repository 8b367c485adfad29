"""Tables: batches of rows of Parquet, Arrow, or `datasets`, handed on as columns and taken apart where rows are."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lineage.artifact import Source
from lineage.errors import ConfigError, DataError, PipelineError
from tasks.data.reading.chunk import Broken, Chunk, Row, Rows, Slice, no_rows, no_split, two_columns
from tasks.data.reading.lines import BLOCK_BYTES, kind_of, on_disk

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import IterableDataset

BATCH_ROWS = 1000
_SHUFFLE_BUFFER = 10_000  # rows


def _table_rows(name: str, first: int, stream: bytes) -> Rows:
    """Of columns in Arrow's stream format, from the row of an index on."""
    import pyarrow as pa

    table = pa.ipc.open_stream(stream).read_all()
    nested = [field.name for field in table.schema if pa.types.is_nested(field.type)]
    try:
        rows: Iterable[dict[str, object] | None] = table.to_pylist()
    except (ValueError, OverflowError):  # Python has no such value: half a character, a day in no year
        rows = [None] * table.num_rows
    for index, row in enumerate(rows):
        entry = _alone(table, index, f"{name}[{first + index}]") if row is None else row
        if isinstance(entry, Broken):
            yield entry
        else:
            bare = {column: _without_nulls(entry[column]) for column in nested}
            yield Row(fields={**entry, **bare}, where=f"{name}[{first + index}]")


def _alone(table: "pa.Table", index: int, where: str) -> dict[str, object] | Broken:
    for column in table.column_names:
        try:
            table[column][index].as_py()
        except (ValueError, OverflowError) as error:
            found = f"column {column!r} holds what Python has no value for ({error})"
            accepted = "text in UTF-8 and times of our calendar"
            return Broken(where=where, reason="not readable", raw="", found=found, accepted=accepted)
    row: dict[str, object] = table.slice(index, 1).to_pylist()[0]
    return row


def read_parquet(path: Path, name: str) -> Iterator[Chunk]:
    """The rows of a Parquet file, some of a row group at a time."""
    import pyarrow.parquet as pq

    # Without pre_buffer=False a whole row group lies in memory, which may be the whole file.
    options = {"pre_buffer": False, "buffer_size": BLOCK_BYTES, "page_checksum_verification": True}
    with _readable(path, name, "Parquet") as (file, _), pq.ParquetFile(file, **options) as rows:
        size = sum(rows.metadata.row_group(index).total_byte_size for index in range(rows.num_row_groups))
        fitting = max(1, rows.metadata.num_rows * BLOCK_BYTES // max(size, 1))  # rows of a book each are few
        yield from table_chunks(rows.iter_batches(batch_size=min(fitting, BATCH_ROWS)), name)


def read_arrow(path: Path, name: str) -> Iterator[Chunk]:
    """The rows of an Arrow file (Feather), or of a stream in a file, as `datasets` writes it."""
    import pyarrow as pa

    with _readable(path, name, "Arrow") as (file, kind), pa.OSFile(str(file)) as stream:
        if kind == "Arrow":
            batches = pa.ipc.open_file(stream)
            found = (batches.get_batch(index) for index in range(batches.num_record_batches))
        else:
            found = iter(pa.ipc.open_stream(stream))
        yield from table_chunks(map(_validated, found), name)


def table_chunks(batches: "Iterable[pa.RecordBatch | pa.Table]", name: str) -> Iterator[Chunk]:
    """Batches cut into chunks of about a megabyte. A pickled slice would bring the whole batch along, a stream not.

    Raises:
        DataError: there is no row, or two columns have one name.
    """
    import pyarrow as pa

    first = 0
    for batch in batches:
        if twice := {column for column in batch.schema.names if batch.schema.names.count(column) > 1}:
            raise two_columns(name, min(twice))
        count = max(1, batch.num_rows * BLOCK_BYTES // max(batch.nbytes, 1))
        for start in range(0, batch.num_rows, count):
            piece, sink = batch.slice(start, count), pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, batch.schema) as writer:
                writer.write(piece)
            yield Chunk(rows=partial(_table_rows, name, first + start, sink.getvalue().to_pybytes()))
        first += batch.num_rows
    if not first:
        raise no_rows(name, ": columns without a row")


def _validated(batch: "pa.RecordBatch") -> "pa.RecordBatch":
    """A batch whose offsets and the like lie within it: with others a damaged file would end the process.

    Raises:
        pa.ArrowInvalid: they do not.
    """
    import pyarrow as pa

    bare = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}  # what is no UTF-8 breaks its row alone
    for column in batch.columns:
        column.view(bare.get(column.type, column.type)).validate(full=True)
    return batch


def _without_nulls(value: object) -> object:
    """A nested value as it was before a table gave all its structs the fields of each."""
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


@contextmanager
def _readable(path: Path, name: str, kind: str) -> Iterator[tuple[Path, str]]:
    """The file unpacked, and what it is by its first bytes; what its library cannot read is refused."""
    import pyarrow as pa

    with on_disk(path, name) as file:
        with file.open("rb") as stream:
            found, _ = kind_of(stream.read(64), name)
        try:
            yield file, found
        except (
            OSError,
            ValueError,
            OverflowError,
            pa.ArrowException,
        ) as error:
            cause = "cut or damaged" if found == kind else f"not {kind}, but {found}"
            raise DataError(
                f"{name} is {cause} ({str(error).splitlines()[0]}); {kind} is accepted; write or download it again, "
                "or give it the suffix of what it is"
            ) from error


def is_saved(directory: Path) -> bool:
    """Whether `datasets` saved a data set there."""
    return any((directory / name).exists() for name in ("dataset_dict.json", "state.json"))


def read_saved(directory: Path, split: str) -> Iterator[Chunk]:
    """The rows of a data set that was saved, or of a split of it."""
    import datasets

    with _named_errors(str(directory), split):
        data = datasets.load_from_disk(str(directory))
        splits = list(data) if isinstance(data, datasets.DatasetDict) else ["train"]
        if split not in splits:
            raise no_split(str(directory), split, splits)
        rows = data[split] if isinstance(data, datasets.DatasetDict) else data
        yield from table_chunks(rows.with_format("arrow").iter(batch_size=BATCH_ROWS), str(directory))


def read_loaded(source: Source, split: str, part: Slice | None) -> Iterator[Chunk]:
    """The rows of a split of a data set of the hub, or of a directory like one; when streaming, no more than are asked
    for."""
    import datasets

    bounded = _bounded(source, part) if source.streaming else None
    with _named_errors(source.path, split):
        rows = datasets.load_dataset(
            os.path.expanduser(os.path.expandvars(source.path)), name=source.subset, revision=source.revision,
            split=split, streaming=source.streaming, **source.loader,
        )  # fmt: skip
        if bounded:
            rows = bounded(rows)
        yield from table_chunks(rows.with_format("arrow").iter(batch_size=BATCH_ROWS), source.path)


def _bounded(source: Source, part: Slice | None) -> "Callable[[IterableDataset], IterableDataset]":
    """What keeps a stream from being read to its end.

    A slice is of the rows as they stand: all up to its end are read. A sample is drawn as the stream goes by.
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
    """Errors of `datasets`, of the file systems below it and of the network, which have no common base."""
    try:
        yield
    except PipelineError:
        raise
    except Exception as error:
        message = str(error).strip().partition("\n")[0] or "no message"
        raise DataError(
            f"{path}: `datasets` reads no split {split!r} from it ({type(error).__name__}: {message}); "
            "a file, a directory or glob of files, a saved data set, or a hub id is accepted; correct the path, or "
            "set split or subset"
        ) from error
