"""Reads what a source names: rows with the place that each came from."""

from collections.abc import Iterator

from lineage.artifact import Source
from lineage.errors import ConfigError
from lineage.python_source import PYTHON
from lineage.remote_files import is_url
from lineage.sources import QUICKSTART, local_paths
from tasks.data.reading.chunk import Chunk, ParsedChunk, Row
from tasks.data.reading.data_sets import read_hub
from tasks.data.reading.directory import read_directory
from tasks.data.reading.files import read_file
from tasks.data.reading.python_rows import read_function
from tasks.data.reading.remote import read_remote
from tasks.data.reading.slices import parse_split
from tasks.quickstart import quickstart_rows


def read_chunks(source: Source) -> Iterator[Chunk]:
    """The rows of a source's split, in order and in pieces. Who counts them cuts a slice from them.

    Raises:
        ConfigError: it has no such split, or is not of those that are streamed.
        DataError: nothing can be read from it at all. One line that is no row is a ``Broken`` in its chunk.
    """
    split, part = parse_split(source.split)
    if source.path.startswith(QUICKSTART):
        _require_no_splits(source, split)
        yield _quickstart(source.path)
    elif is_url(source.path):
        _require_no_splits(source, split)
        yield from read_remote(source)
    elif source.path.startswith(PYTHON):
        _require_no_splits(source, split)
        yield from read_function(source)
    elif paths := local_paths(source.path):
        _require_no_stream(source)
        for path in paths:
            if path.is_dir():
                yield from read_directory(path, split)
            else:
                _require_no_splits(source, split)
                yield from read_file(path, str(path))
    else:
        yield from read_hub(source, split, part)


def _require_no_splits(source: Source, split: str) -> None:
    _require_no_stream(source)
    if split != "train":
        raise ConfigError(
            f"{source.path}: split={source.split!r} of what has no splits; a slice of all rows is accepted, such as "
            "split=train[:1000]; leave split out, or give the file of that split"
        )


def _require_no_stream(source: Source) -> None:
    if source.streaming:
        raise ConfigError(
            f"{source.path}: streaming is for data sets of the hub; all else is read piece by piece anyway; "
            "leave streaming out"
        )


def _quickstart(path: str) -> Chunk:
    rows = quickstart_rows(path.removeprefix(QUICKSTART))
    return ParsedChunk(entries=tuple(Row(fields=fields, where=f"{path}[{index}]") for index, fields in enumerate(rows)))
