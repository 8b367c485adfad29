"""Reads the rows of a source, each with its place.

A source is a file, a glob, a directory, a data set saved in one, files at a URL, a Python function, a data set of
the hub, or the quickstart's rows.
"""

import logging
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from glob import has_magic
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

from lineage.artifact import QUICKSTART, Source
from lineage.errors import ConfigError
from lineage.filesystem.remote_files import is_url, open_remote, place_of, remote_versions, revision_of
from lineage.secrets import without_secrets
from lineage.source.source_checks import PYTHON, is_loaded, separator_of
from lineage.source.sources import local_paths
from lineage.source.text_split import NOTE, SplitBy, data_suffix
from tasks.data.reading.chunk import Chunk, Row, no_split, parse_split, parsed, refused
from tasks.data.reading.delimited import read_csv
from tasks.data.reading.lines import read_json, read_json_lines, read_text
from tasks.data.reading.python_rows import read_function
from tasks.data.reading.tables import is_saved, read_arrow, read_loaded, read_parquet, read_saved
from tasks.quickstart import quickstart_rows

logger = logging.getLogger(__name__)

_MAX_SHOWN = 5  # files in a message
_BESIDE = ("dataset_infos.json", "dataset_info.json")  # as `datasets` writes them beside its data

# Names of splits as the hub recognizes them in directories, files and parts of files, except within longer names.
_WORDS = {
    "train": "train|training",
    "validation": "validation|valid|val|dev",
    "test": "test|testing|eval|evaluation",
}
_PART = r"(?:[-_.]\w+)*-\d{5}-of-\d{5}.*|[-_]?\d*"
_DIRECTORIES = {split: re.compile(words, re.IGNORECASE) for split, words in _WORDS.items()}
_FILES = {split: re.compile(rf"(?:{words})(?:{_PART})", re.IGNORECASE) for split, words in _WORDS.items()}
_TEXTS: Mapping[str, SplitBy | None] = {".txt": None, ".text": None, ".md": "document"}  # suffix -> default unit
_READERS: Mapping[str, Callable[[Path, str], Iterator[Chunk]]] = {
    **dict.fromkeys((".jsonl", ".ndjson", ".jsonlines"), read_json_lines), ".json": read_json,
    ".parquet": read_parquet, ".arrow": read_arrow, ".feather": read_arrow, ".csv": read_csv,
    ".tsv": partial(read_csv, separator="\t"),
}  # fmt: skip
_SUFFIXES = (*_READERS, *_TEXTS)
_ACCEPTED = f"{', '.join(_SUFFIXES)}, each also with .gz, .zst or .bz2"


def read_chunks(source: Source) -> Iterator[Chunk]:
    """The rows of a source's split, in order and in chunks. The caller counts them, and takes a slice.

    Raises:
        ConfigError: it has no such split, or cannot be streamed.
        DataError: nothing can be read from it. A single line that is not a row is a ``Broken`` in its chunk.
    """
    split, part = parse_split(source.split)
    paths = local_paths(source.path)
    is_made, is_remote = source.path.startswith((QUICKSTART, PYTHON)), is_url(source.path)
    if source.streaming and (is_made or is_remote or paths):
        raise ConfigError(
            f"{source.path}: streaming is for data sets of the hub; all else is read piece by piece anyway; "
            "leave streaming out"
        )
    if is_made:
        _require_no_splits(source, split)
        yield from _quickstart(source.path) if source.path.startswith(QUICKSTART) else read_function(source)
    elif is_remote:
        yield from _read_remote(source, split)
    elif paths and not is_loaded(source):
        for path in paths:
            if path.is_dir() and is_saved(path):
                yield from read_saved(path, split)
            elif path.is_dir():
                for name in _chosen_files(_files_below(path), split, str(path)):
                    yield from _read_file(path / name, str(path / name), source)
            else:
                _require_no_splits(source, split)
                yield from _read_file(path, str(path), source)
    else:
        yield from read_loaded(source, split, part)


def _quickstart(path: str) -> Iterator[Chunk]:
    rows = quickstart_rows(path.removeprefix(QUICKSTART))
    yield parsed(*(Row(fields=fields, where=f"{path}[{index}]") for index, fields in enumerate(rows)))


def _read_file(path: Path, name: str, source: Source) -> Iterator[Chunk]:
    """The rows of one file.

    Args:
        name: of the file, as the user knows it.
        source: its ``split_by`` is the unit of plain text that is a row; None: it is detected, and for Markdown the
            whole file. Its separator is that of CSV and TSV.

    Raises:
        DataError: files with this suffix are not read, or there is no row in it.
    """
    suffix = data_suffix(path)
    if suffix not in _SUFFIXES:
        found = f"rows are not read from {path.suffix or 'a file without a suffix'}"
        raise refused(name, found, _ACCEPTED, "convert or unpack it")
    separator = separator_of(source)
    if separator is not None:
        chunks = read_csv(path, name, separator)
    elif suffix in _TEXTS:
        chunks = read_text(path, name, source.split_by or _TEXTS[suffix])
    else:
        chunks = _READERS[suffix](path, name)
    first = next(chunks, None)
    if first is None:
        raise refused(name, "there is no row in this file", "at least one", "write it again or leave it out")
    yield first
    yield from chunks


def _files_below(directory: Path) -> list[PurePosixPath]:
    """The files that ``lineage.filesystem.digest`` reads for a source: links to directories are not followed."""
    names = []
    for path in sorted(directory.rglob("*")):
        name = PurePosixPath(path.relative_to(directory).as_posix())
        if path.is_file():
            names.append(name)
        elif path.is_symlink() and not _is_hidden(name):
            target = "a directory" if path.is_dir() else "nothing"
            found, accepted = f"{name} is a link to {target}, which is not followed", "files and links to files"
            raise refused(str(directory), found, accepted, "put the files there, or remove the link")
    return names


def _chosen_files(names: Sequence[PurePosixPath], split: str, place: str) -> list[PurePosixPath]:
    """The files of a split among all files below a place; files of other splits are logged.

    Raises:
        ConfigError: there is no such split.
        DataError: there is no data, or a file that cannot be read.
    """
    data = [name for name in names if not _is_beside_data(name)]
    if not data:
        beside = f" ({names[0]} and the like are not data)" if names else ""
        raise refused(place, f"no data in this directory{beside}", _ACCEPTED, "put files there, or give another")
    unread = [name for name in data if data_suffix(name) not in _SUFFIXES]
    if unread:
        remedy = f"convert or remove it, or name the files you mean by a glob such as {place}/*.jsonl"
        raise refused(place, f"rows of {unread[0]} are not read", _ACCEPTED, remedy)
    splits: dict[str, list[PurePosixPath]] = {}
    for name in data:
        splits.setdefault(_split_of(name), []).append(name)
    if split not in splits:
        raise no_split(place, split, splits)
    others = [str(name) for other in sorted(splits) if other != split for name in splits[other]]
    if others:
        more = f" and {len(others) - _MAX_SHOWN} more" if len(others) > _MAX_SHOWN else ""
        shown = ", ".join(others[:_MAX_SHOWN])
        logger.warning(
            "%s: split=%s is read; not read, because their names are of other splits: %s%s", place, split, shown, more
        )
    return splits[split]


def _require_no_splits(source: Source, split: str) -> None:
    """Refuses a split of a single file, or of a source without files."""
    if split != "train":
        raise ConfigError(
            f"{source.path}: split={source.split!r} of a source without splits; a slice of all rows is accepted, "
            "such as split=train[:1000]; leave split out, or give the file of that split"
        )


def _is_hidden(name: PurePosixPath) -> bool:
    return any(part.startswith(".") for part in name.parts)


def _is_beside_data(name: PurePosixPath) -> bool:
    """Whether a file in a data directory is not data: hidden, a README, or a marker such as ``_SUCCESS``."""
    if _is_hidden(name) or name.name in _BESIDE:
        return True
    if data_suffix(name) not in _SUFFIXES:
        return name.name.startswith("_") or bool(NOTE.match(name.name))
    return data_suffix(name) in _TEXTS and bool(NOTE.fullmatch(name.stem))


def _split_of(name: PurePosixPath) -> str:
    stem = name.name.partition(".")[0]
    for split in _WORDS:
        if _FILES[split].fullmatch(stem) or any(map(_DIRECTORIES[split].fullmatch, name.parts[:-1])):
            return split
    return "train"


def _read_remote(source: Source, split: str) -> Iterator[Chunk]:
    """The rows of a remote file, of all files that a glob matches, or of a directory's split, in order of name.

    Raises:
        ConfigError: there is no file, no answer, or no such split.
        DataError: its files have changed since it was pinned, or one cannot be read.
    """
    versions = remote_versions("rows", source.path, source.credentials)
    if source.revision and revision_of(versions) != source.revision:
        found, accepted = "its files have changed since the plan was made", "the bytes that were planned"
        raise refused(source.path, found, accepted, "do not change them during the run, and run again")
    # A directory is searched as a local one is; a file or the matches of a glob are all read.
    depth = len(place_of(source.path).parts)
    below = {PurePosixPath(*place_of(url).parts[depth:]): url for url in versions}
    urls = list(versions)
    if has_magic(source.path) or PurePosixPath() in below:
        _require_no_splits(source, split)
    else:
        urls = [below[name] for name in _chosen_files(list(below), split, source.path)]
    for url in urls:
        with TemporaryDirectory() as scratch:
            copy = Path(scratch, place_of(url).name)
            try:
                with open_remote(url, source.credentials) as remote, copy.open("wb") as file:
                    shutil.copyfileobj(remote, file)
            except Exception as error:  # file-system libraries have no common base for their errors
                found = f"cannot be copied here ({without_secrets(error, source.credentials)})"
                accepted = "a file that stays as it is and that the credentials may read"
                raise refused(url, found, accepted, "look for it there, and run again") from error
            yield from _read_file(copy, url, source)
