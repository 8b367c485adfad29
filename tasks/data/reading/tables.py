"""Tables: batches of rows of Parquet, Arrow, or `datasets`, passed on as columns and converted to rows later."""

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
    """The rows of columns in Arrow's stream format; ``first`` is the index of the first."""
    import pyarrow as pa

    table = pa.ipc.open_stream(stream).read_all()
    nested = [field.name for field in table.schema if pa.types.is_nested(field.type)]
    try:
        rows: Iterable[dict[str, object] | None] = table.to_pylist()
    except (ValueError, OverflowError):  # not representable in Python: half a character, a year beyond 9999
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
            found = f"column {column!r} holds a value that Python cannot represent ({error})"
            accepted = "text in UTF-8 and times of our calendar"
            return Broken(where=where, reason="not readable", raw="", found=found, accepted=accepted)
    row: dict[str, object] = table.slice(index, 1).to_pylist()[0]
    return row


def read_parquet(path: Path, name: str) -> Iterator[Chunk]:
    """The rows of a Parquet file, in parts of a row group."""
    import pyarrow.parquet as pq

    # Without pre_buffer=False a whole row group is in memory, which may be the whole file.
    options = {"pre_buffer": False, "buffer_size": BLOCK_BYTES, "page_checksum_verification": True}
    with _readable(path, name, "Parquet") as (file, _), pq.ParquetFile(file, **options) as rows:
        size = sum(rows.metadata.row_group(index).total_byte_size for index in range(rows.num_row_groups))
        fitting = max(1, rows.metadata.num_rows * BLOCK_BYTES // max(size, 1))  # fewer where rows are long
        yield from table_chunks(rows.iter_batches(batch_size=min(fitting, BATCH_ROWS)), name)


def read_arrow(path: Path, name: str) -> Iterator[Chunk]:
    """The rows of an Arrow file (Feather), or of a file in Arrow's stream format, as `datasets` writes it."""
    import pyarrow as pa

    with _readable(path, name, "Arrow") as (file, kind), pa.OSFile(str(file)) as stream:
        if kind == "Arrow":
            batches = pa.ipc.open_file(stream)
            found = (batches.get_batch(index) for index in range(batches.num_record_batches))
        else:
            found = iter(pa.ipc.open_stream(stream))
        yield from table_chunks(map(_validated, found), name)


def table_chunks(batches: "Iterable[pa.RecordBatch | pa.Table]", name: str) -> Iterator[Chunk]:
    """Batches cut into chunks of about a megabyte, as streams: a pickled slice would contain the whole batch.

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
        raise no_rows(name, ": columns without rows")


def _validated(batch: "pa.RecordBatch") -> "pa.RecordBatch":
    """The batch, after a check of its offsets: with wrong ones a damaged file would crash the process.

    Raises:
        pa.ArrowInvalid: some do not.
    """
    import pyarrow as pa

    bare = {
        pa.string(): pa.binary(),
        pa.large_string(): pa.large_binary(),
    }  # so that bytes other than UTF-8 break only their row
    for column in batch.columns:
        column.view(bare.get(column.type, column.type)).validate(full=True)
    return batch


def _without_nulls(value: object) -> object:
    """A nested value without the null fields that a table adds to give all structs the same fields."""
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


@contextmanager
def _readable(path: Path, name: str, kind: str) -> Iterator[tuple[Path, str]]:
    """The unpacked file, and its format by its first bytes.

    Raises:
        DataError: the library of the format cannot read it.
    """
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
    """The rows of a saved data set, or of a split of it."""
    import datasets

    with _named_errors(str(directory), split):
        data = datasets.load_from_disk(str(directory))
        splits = list(data) if isinstance(data, datasets.DatasetDict) else ["train"]
        if split not in splits:
            raise no_split(str(directory), split, splits)
        rows = data[split] if isinstance(data, datasets.DatasetDict) else data
        yield from table_chunks(rows.with_format("arrow").iter(batch_size=BATCH_ROWS), str(directory))


def read_loaded(source: Source, split: str, part: Slice | None) -> Iterator[Chunk]:
    """The rows of a split of a data set of the hub, or of a directory like one; streaming reads only what is needed."""
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
        raise DataError(
            f"{path}: `datasets` reads no split {split!r} from it ({type(error).__name__}: {message}); "
            "a file, a directory or glob of files, a saved data set, or a hub id is accepted; correct the path, or "
            "set split or subset"
        ) from error
