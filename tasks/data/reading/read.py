"""Reads what a source names: rows with the place that each came from."""

from collections.abc import Iterator

from lineage.artifact import QUICKSTART, Source
from lineage.errors import ConfigError
from lineage.python_source import PYTHON
from lineage.remote_files import is_url
from lineage.source_checks import is_loaded
from lineage.sources import local_paths
from tasks.data.reading.chunk import Chunk, ParsedChunk, Row
from tasks.data.reading.data_sets import read_loaded
from tasks.data.reading.directory import read_directory
from tasks.data.reading.files import read_file
from tasks.data.reading.python_rows import read_function
from tasks.data.reading.remote import read_remote
from tasks.data.reading.slices import parse_split
from tasks.data.reading.splits import require_no_splits
from tasks.quickstart import quickstart_rows


def read_chunks(source: Source) -> Iterator[Chunk]:
    """The rows of a source's split, in order and in pieces. Who counts them cuts a slice from them.

    Raises:
        ConfigError: it has no such split, or is not of those that are streamed.
        DataError: nothing can be read from it at all. One line that is no row is a ``Broken`` in its chunk.
    """
    split, part = parse_split(source.split)
    if source.streaming and not _is_of_hub(source.path):
        raise ConfigError(
            f"{source.path}: streaming is for data sets of the hub; all else is read piece by piece anyway; "
            "leave streaming out"
        )
    if source.path.startswith(QUICKSTART):
        require_no_splits(source, split)
        yield _quickstart(source.path)
    elif is_url(source.path):
        yield from read_remote(source, split)
    elif source.path.startswith(PYTHON):
        require_no_splits(source, split)
        yield from read_function(source)
    elif (paths := local_paths(source.path)) and not is_loaded(source):
        for path in paths:
            if path.is_dir():
                yield from read_directory(path, split, source.split_by)
            else:
                require_no_splits(source, split)
                yield from read_file(path, str(path), source.split_by)
    else:
        yield from read_loaded(source, split, part)


def _is_of_hub(path: str) -> bool:
    return not (path.startswith((QUICKSTART, PYTHON)) or is_url(path) or local_paths(path))


def _quickstart(path: str) -> Chunk:
    rows = quickstart_rows(path.removeprefix(QUICKSTART))
    return ParsedChunk(entries=tuple(Row(fields=fields, where=f"{path}[{index}]") for index, fields in enumerate(rows)))
