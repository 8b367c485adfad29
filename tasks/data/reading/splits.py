"""Which files of many are data, and which of those are of the split that is asked for."""

import logging
import re
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath

from lineage.artifact import Source
from lineage.errors import ConfigError, DataError
from lineage.text_split import NOTE, data_suffix
from tasks.data.reading.files import is_readable

logger = logging.getLogger(__name__)

_MAX_SHOWN = 5  # files in a message
_TEXT = (".md", ".txt", ".text")  # suffixes in which notes come too
_BESIDE = ("dataset_infos.json", "dataset_info.json")  # as `datasets` writes them beside its data

# As the hub names directories, files and parts of files, but for words within longer names.
_WORDS = {
    "train": "train|training",
    "validation": "validation|valid|val|dev",
    "test": "test|testing|eval|evaluation",
}
_PART = r"(?:[-_.]\w+)*-\d{5}-of-\d{5}.*|[-_]?\d*"
_DIRECTORIES = {split: re.compile(words, re.IGNORECASE) for split, words in _WORDS.items()}
_FILES = {split: re.compile(rf"(?:{words})(?:{_PART})", re.IGNORECASE) for split, words in _WORDS.items()}


def choose(names: Sequence[PurePosixPath], split: str, place: str) -> list[PurePosixPath]:
    """The files of a split, of all that lie below a place; what is of another split is told.

    Raises:
        ConfigError: there is no such split.
        DataError: there is no data, or some that nothing reads.
    """
    data = [name for name in names if not _is_beside_data(name)]
    if not data:
        beside = f" ({names[0]} and the like are no data)" if names else ""
        raise DataError(f"{place}: no data in this directory{beside}; put files of rows there, or give another")
    unread = [name for name in data if not is_readable(name)]
    if unread:
        raise DataError(
            f"{place}: holds {unread[0]}, of which rows are not read; a directory is read as a whole; convert or "
            f"remove it, or name the files you mean by a glob such as {place}/*.jsonl"
        )
    splits: dict[str, list[PurePosixPath]] = {}
    for name in data:
        splits.setdefault(_split_of(name), []).append(name)
    if split not in splits:
        raise no_split(place, split, splits)
    others = [str(name) for other in sorted(splits) if other != split for name in splits[other]]
    if others:
        more = f" and {len(others) - _MAX_SHOWN} more" if len(others) > _MAX_SHOWN else ""
        shown = ", ".join(others[:_MAX_SHOWN])
        logger.warning("%s: split=%s is read; not read, being of other splits by name: %s%s", place, split, shown, more)
    return splits[split]


def no_split(name: str, split: str, splits: Iterable[str]) -> ConfigError:
    """Of a directory that has other splits."""
    return ConfigError(f"{name}: no split {split!r} in it; it has {', '.join(splits)}; set split to one of them")


def require_no_splits(source: Source, split: str) -> None:
    """Refuses a split of what is one file, or no file at all."""
    if split != "train":
        raise ConfigError(
            f"{source.path}: split={source.split!r} of what has no splits; a slice of all rows is accepted, such as "
            "split=train[:1000]; leave split out, or give the file of that split"
        )


def is_hidden(name: PurePosixPath) -> bool:
    """Whether a file, or a directory that it lies in, is hidden."""
    return any(part.startswith(".") for part in name.parts)


def _is_beside_data(name: PurePosixPath) -> bool:
    """Whether a file in a directory of data is no data: hidden, a note on the data, or a mark such as ``_SUCCESS``."""
    if is_hidden(name) or name.name in _BESIDE:
        return True
    if not is_readable(name):
        return name.name.startswith("_") or bool(NOTE.match(name.name))
    return data_suffix(name) in _TEXT and bool(NOTE.fullmatch(name.stem))


def _split_of(name: PurePosixPath) -> str:
    stem = name.name.partition(".")[0]
    for split in _WORDS:
        if _FILES[split].fullmatch(stem) or any(map(_DIRECTORIES[split].fullmatch, name.parts[:-1])):
            return split
    return "train"
