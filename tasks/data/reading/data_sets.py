"""Data sets of the hub, or saved on disk: read through `datasets`, in batches of columns."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from lineage.artifact import Source
from lineage.errors import ConfigError, DataError, PipelineError
from tasks.data.reading.chunk import Chunk
from tasks.data.reading.slices import Slice
from tasks.data.reading.splits import no_split
from tasks.data.reading.tables import BATCH_ROWS, table_chunks

if TYPE_CHECKING:
    from datasets import IterableDataset

_SHUFFLE_BUFFER = 10_000  # rows


def is_saved(directory: Path) -> bool:
    """Whether `datasets` saved a data set there."""
    return any((directory / name).exists() for name in ("dataset_dict.json", "state.json"))


def read_saved(directory: Path, split: str) -> Iterator[Chunk]:
    """The rows of a data set that was saved, or of a split of it."""
    import datasets

    with _told(str(directory), split):
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
    with _told(source.path, split):
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
def _told(path: str, split: str) -> Iterator[None]:
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
