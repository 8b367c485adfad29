"""Rows behind a URL: its files are brought to this machine one after the other, each gone before the next."""

import shutil
from collections.abc import Iterator
from glob import has_magic
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

from lineage.artifact import Source
from lineage.errors import DataError
from lineage.remote_files import open_remote, place_of, remote_versions, revision_of
from lineage.secrets import without_secrets
from tasks.data.reading.chunk import Chunk
from tasks.data.reading.files import read_file
from tasks.data.reading.splits import choose, require_no_splits

_BLOCK_BYTES = 2**20


def read_remote(source: Source, split: str) -> Iterator[Chunk]:
    """The rows of a file, of all that a glob names, or of a split of a directory, in order of name.

    Raises:
        ConfigError: nothing is there or answers, or there is no such split.
        DataError: its files are not those that it was pinned to, or one cannot be read.
    """
    versions = remote_versions("rows", source.path, source.credentials)
    if source.revision and revision_of(versions) != source.revision:
        raise DataError(
            f"{source.path}: its files have changed since the plan was made; the bytes that were planned are accepted; "
            "let them rest, and run again"
        )
    for url in _chosen(source, list(versions), split):
        with TemporaryDirectory() as scratch:
            copy = Path(scratch, place_of(url).name)
            _copy(url, source, copy)
            yield from read_file(copy, url, source.split_by)


def _chosen(source: Source, urls: list[str], split: str) -> list[str]:
    """As of this machine: a directory has splits and notes, what a file or a glob names is read."""
    depth = len(place_of(source.path).parts)
    below = {PurePosixPath(*place_of(url).parts[depth:]): url for url in urls}
    if has_magic(source.path) or PurePosixPath() in below:
        require_no_splits(source, split)
        return urls
    return [below[name] for name in choose(list(below), split, source.path)]


def _copy(url: str, source: Source, target: Path) -> None:
    try:
        with open_remote(url, source.credentials) as remote, target.open("wb") as file:
            shutil.copyfileobj(remote, file, _BLOCK_BYTES)
    except Exception as error:  # of a file system's own library: no common base
        raise DataError(
            f"{url}: cannot be copied here ({without_secrets(error, source.credentials)}); a file that stays as it is "
            "and that the credentials may read is accepted; look for it there, and run again"
        ) from error
