"""Rows behind a URL: its files are brought to this machine one after the other, each gone before the next."""

import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

from lineage.artifact import Source
from lineage.errors import DataError
from lineage.remote_files import open_remote, remote_versions, revision_of
from lineage.secrets import without_secrets
from tasks.data.reading.chunk import Chunk
from tasks.data.reading.files import is_beside_data, read_file

_BLOCK_BYTES = 2**20


def read_remote(source: Source) -> Iterator[Chunk]:
    """The rows of all files that a source's URL names, in order of name.

    Raises:
        ConfigError: nothing is there or answers.
        DataError: its files are not those that it was pinned to, or one cannot be read.
    """
    versions = remote_versions("rows", source.path, source.credentials)
    if source.revision and revision_of(versions) != source.revision:
        raise DataError(
            f"{source.path}: its files have changed since the plan was made; the bytes that were planned are accepted; "
            "let them rest, and run again"
        )
    # As in a directory of this machine, what is no data is passed over; alone, it is read or refused.
    data = [url for url in versions if not is_beside_data(PurePosixPath(_place(url).name))]
    for url in data or versions:
        with TemporaryDirectory() as scratch:
            copy = Path(scratch, _place(url).name)
            _copy(url, source, copy)
            yield from read_file(copy, url)


def _copy(url: str, source: Source, target: Path) -> None:
    try:
        with open_remote(url, source.credentials) as remote, target.open("wb") as file:
            shutil.copyfileobj(remote, file, _BLOCK_BYTES)
    except Exception as error:  # of a file system's own library: no common base
        raise DataError(
            f"{url}: cannot be copied here ({without_secrets(error, source.credentials)}); a file that stays as it is "
            "and that the credentials may read is accepted; look for it there, and run again"
        ) from error


def _place(url: str) -> PurePosixPath:
    """Of a web page without its query; a bucket's names may hold question marks."""
    return PurePosixPath(urlsplit(url).path if url.startswith(("http://", "https://")) else url)
