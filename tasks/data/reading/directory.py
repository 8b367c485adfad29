"""A directory: all data below it, in order of name, or the files of the split that is asked for."""

import logging
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from lineage.errors import DataError
from tasks.data.reading.chunk import Chunk
from tasks.data.reading.data_sets import is_saved, no_split, read_saved
from tasks.data.reading.files import is_beside_data, is_readable, read_file

logger = logging.getLogger(__name__)

# As the hub tells splits by the names of files and directories.
_WORDS = {
    "train": "train|training",
    "validation": "validation|valid|val|dev",
    "test": "test|testing|eval|evaluation",
}
_SPLITS = {split: re.compile(rf"(?<![a-z])(?:{words})(?![a-z])", re.IGNORECASE) for split, words in _WORDS.items()}


def read_directory(directory: Path, split: str) -> Iterator[Chunk]:
    """The rows of a directory, or of a data set saved in it; never of a part of it without a word.

    Raises:
        ConfigError: it has no such split.
        DataError: it holds no data, or some that nothing reads.
    """
    if is_saved(directory):
        yield from read_saved(directory, split)
        return
    for name in _files_of(directory, split):
        yield from read_file(directory / name, str(directory / name))


def _files_of(directory: Path, split: str) -> list[PurePosixPath]:
    below = sorted(path for path in directory.rglob("*") if path.is_file())
    names = [PurePosixPath(path.relative_to(directory).as_posix()) for path in below]
    data = [name for name in names if not is_beside_data(name)]
    if not data:
        beside = f" ({names[0]} and the like are no data)" if names else ""
        raise DataError(f"{directory}: no data in this directory{beside}; put files of rows there, or give another")
    unread = [name for name in data if not is_readable(name)]
    if unread:
        raise DataError(
            f"{directory}: holds {unread[0]}, of which rows are not read; a directory is read as a whole; convert or "
            f"remove it, or name the files you mean by a glob such as {directory}/*.jsonl"
        )
    splits: dict[str, list[PurePosixPath]] = {}
    for name in data:
        splits.setdefault(_split_of(name), []).append(name)
    if split not in splits:
        raise no_split(str(directory), split, splits)
    if len(splits) > 1:
        others = ",".join(each for each in splits if each != split)
        logger.info("directory=%s split=%s files=%s not_read=%s", directory, split, len(splits[split]), others)
    return splits[split]


def _split_of(name: PurePosixPath) -> str:
    return next((split for split, word in _SPLITS.items() if word.search(str(name))), "train")
