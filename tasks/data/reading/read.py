"""Reads the rows of a source, each with its place.

A source is a file, a glob, a directory, a ZIP archive, a data set saved in one, files at a URL, a Python function, a
data set of the hub, or the quickstart's rows. A row of a text file is a line of JSON, an item of one JSON array, or, of
plain text, a line, a paragraph or the file, which is the default for Markdown. Text is cut into blocks that other
processes parse.

Python's parser finds where a value of an array ends, and so where the next one begins, also in a text that is read only
in part. ijson would parse the items too, but reports no position, and turns half a surrogate pair into "?".
"""

import contextlib
import json
import logging
import re
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from glob import has_magic
from io import BufferedReader
from itertools import chain
from pathlib import Path, PurePath, PurePosixPath
from tempfile import TemporaryDirectory
from zipfile import BadZipFile, ZipFile

import orjson

from lineage.artifact import QUICKSTART, Source
from lineage.errors import ConfigError
from lineage.filesystem.remote_files import is_url, open_remote, place_of, remote_versions, revision_of
from lineage.secrets import first_line
from lineage.source.source_checks import PYTHON, is_loaded, separator_of
from lineage.source.sources import filled_in, local_paths
from lineage.source.text_split import BLANK_LINE, NOTE, SplitBy, data_suffix, detected_split, partitions
from tasks.data.reading.chunk import (
    BLOCK_BYTES,
    ENCODED,
    MAX_ROW_BYTES,
    MOST,
    Broken,
    Chunk,
    Row,
    Rows,
    beyond_64_bits,
    no_split,
    opened,
    parse_split,
    parsed,
    refused,
    shown,
)
from tasks.data.reading.delimited import read_csv
from tasks.data.reading.python_rows import read_function
from tasks.data.reading.tables import is_saved, read_arrow, read_loaded, read_parquet, read_saved
from tasks.quickstart import quickstart_rows

logger = logging.getLogger(__name__)

_MAX_SHOWN = 5  # files in a message
_BESIDE = ("dataset_infos.json", "dataset_info.json")  # as `datasets` writes them beside its data

# Names of splits as the hub recognizes them in directories, files and parts of files, except within longer names.
_WORDS = {"train": "train|training", "validation": "validation|valid|val|dev", "test": "test|testing|eval|evaluation"}
_PART = r"(?:[-_.]\w+)*-\d{5}-of-\d{5}.*|[-_]?\d*"
_DIRECTORIES = {split: re.compile(words, re.IGNORECASE) for split, words in _WORDS.items()}
_FILES = {split: re.compile(rf"(?:{words})(?:{_PART})", re.IGNORECASE) for split, words in _WORDS.items()}
_TEXTS: Mapping[str, SplitBy | None] = {".txt": None, ".text": None, ".md": "document"}  # suffix -> default unit
_IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")  # which rows name
_ARCHIVE, _SMALL, _MOST_PACKED = ".zip", 2**24, 100  # its files may unpack to so many times their bytes
_ARRAY = "correct or remove it; if the whole file is one JSON array, name it .json, or `jq -c '.[]' FILE > NEW.jsonl`"
_MARK = re.compile(r"\s*(\[\s*\]|[\[,\]]?)\s*")  # before an item; the first alternative is an empty array
_SHOWN = 40  # characters around a fault
_ONE_OBJECT = 10**8  # bytes of a file that is read whole, to see whether it is one JSON object


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
            if path.suffix.lower() == _ARCHIVE and path.is_file():
                yield from _read_archive(path, str(path), split, source)
            elif path.is_dir() and is_saved(path):
                yield from read_saved(path, split)
            elif path.is_dir():
                for name in _chosen_files(_files_below(path), split, str(path)):
                    yield from _read_file(path / name, str(path / name), source)
            else:
                _require_no_splits(source, split)
                yield from _read_file(path, str(path), source)
    else:
        yield from read_loaded(source, split, part)


def _read_archive(path: Path, place: str, split: str, source: Source) -> Iterator[Chunk]:
    """The rows of the files of a split in a ZIP archive, which are unpacked one by one; images stay in it.

    Args:
        place: of the archive, as the user knows it.

    Raises:
        DataError: it is damaged or encrypted, names a file outside, or unpacks to far more than it has.
    """
    accepted, plain = "a ZIP archive of files of rows, and images", "write it again, without a password"
    try:
        with ZipFile(path) as archive:
            members = [each for each in archive.infolist() if not each.is_dir()]
            for each in members:
                if each.filename.startswith("/") or ".." in PurePosixPath(each.filename).parts:
                    raise refused(place, f"it has {each.filename!r}, which is outside of it", accepted, "remove it")
                if each.file_size > max(_SMALL, _MOST_PACKED * each.compress_size):
                    found = f"{each.filename} unpacks from {each.compress_size} bytes to {each.file_size}"
                    raise refused(place, found, f"at most {_MOST_PACKED} times as many", "unpack it yourself")
            for name in _chosen_files([PurePosixPath(each.filename) for each in members], split, place):
                with TemporaryDirectory() as scratch:
                    copy = Path(scratch, name.name)
                    with archive.open(str(name)) as packed, copy.open("wb") as file:
                        shutil.copyfileobj(packed, file)
                    yield from _read_file(copy, f"{place}/{name}", source)
    except (BadZipFile, RuntimeError, NotImplementedError, zlib.error, EOFError) as error:
        raise refused(place, f"cannot be unpacked ({error})", accepted, plain) from error


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
    place = (place_of(name), place_of(source.path)) if is_url(name) else (path, PurePath(filled_in(source.path)))
    columns = partitions(*place)
    for chunk in chain([first], chunks):
        yield replace(chunk, rows=partial(_with_columns, chunk.rows, columns)) if columns else chunk


def _with_columns(rows: Callable[[], Rows], columns: Mapping[str, str | None]) -> Rows:
    """Rows with the columns that the directories of their file hold, where the file lacks them."""
    return (replace(row, fields={**columns, **row.fields}) if isinstance(row, Row) else row for row in rows())


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
    if _is_hidden(name) or name.name in _BESIDE or name.suffix.lower() in _IMAGES:
        return True
    if data_suffix(name) not in _SUFFIXES:
        return name.name.startswith("_") or bool(NOTE.match(name.name))
    return data_suffix(name) in _TEXTS and bool(NOTE.fullmatch(name.stem))


def _split_of(name: PurePosixPath) -> str:
    stem = name.name.partition(".")[0]
    for split in _WORDS:
        if _FILES[split].fullmatch(stem) or any(
            _DIRECTORIES[split].fullmatch(part.removeprefix("split=")) for part in name.parts[:-1]
        ):
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
        if not _is_archive(source.path):
            _require_no_splits(source, split)
    else:
        urls = [below[name] for name in _chosen_files(list(below), split, source.path)]
    for url in urls:
        with TemporaryDirectory() as scratch:
            copy = _copied(url, source, Path(scratch))
            if _is_archive(url):
                yield from _read_archive(copy, url, split, source)
            else:
                yield from _read_file(copy, url, source)


def _copied(url: str, source: Source, folder: Path) -> Path:
    """A copy of a remote file on this machine."""
    copy = folder / place_of(url).name
    try:
        with open_remote(url, source.credentials) as remote, copy.open("wb") as file:
            shutil.copyfileobj(remote, file)
    except Exception as error:  # file-system libraries have no common base for their errors
        found = f"cannot be copied here ({first_line(error, source.credentials)})"
        accepted = "a file that stays as it is and that the credentials may read"
        raise refused(url, found, accepted, "look for it there, and run again") from error
    return copy


def _is_archive(url: str) -> bool:
    return place_of(url).suffix.lower() == _ARCHIVE


def with_archive_here(source: Source, folder: Path) -> Source:
    """A source whose remote archive, if it is one, is copied into a folder: for the images that stay in it."""
    if not is_url(source.path) or not _is_archive(source.path):
        return source
    folder.mkdir(exist_ok=True)
    return replace(source, path=str(_copied(source.path, source, folder)))


# --- text files


def _blocks(stream: BufferedReader, name: str) -> Iterator[tuple[int, bytes]]:
    """Blocks of whole lines, each with the number of its first line.

    Raises:
        DataError: a line is too long, or lines do not end with a line feed.
    """
    number, pending = 1, b""
    while block := stream.read(BLOCK_BYTES):
        data = pending + block if pending else block
        end = data.rfind(b"\n") + 1
        if end:
            yield number, data[:end]
            number += data.count(b"\n")
        pending = data[end:]
        if len(pending) > MAX_ROW_BYTES:
            raise refused(f"{name}:{number}", f"a line of more than {MOST}", "shorter lines", "break or remove it")
    if b"\r" in pending.strip() and number == 1:
        remedy = "convert it: `tr '\\r' '\\n' < FILE > NEW`"
        raise refused(name, "its lines end with a carriage return only", "a line feed at their end", remedy)
    if pending:
        yield number, pending


def _not_utf8(error: UnicodeDecodeError, where: str, raw: bytes) -> Broken:
    """A line that cannot be decoded as UTF-8."""
    found = f"byte {raw[error.start]:#04x} at column {error.start + 1} is not UTF-8"
    remedy = f"{ENCODED}, or correct the row"
    return Broken(where=where, reason="not UTF-8", raw=shown(raw), found=found, accepted="UTF-8", remedy=remedy)


# --- JSON


def read_json_lines(path: Path, name: str) -> Iterator[Chunk]:
    """One JSON object per line."""
    with opened(path, name) as stream:
        yield from _line_chunks(stream, name)


def read_json(path: Path, name: str) -> Iterator[Chunk]:
    """One JSON array over the whole file, or one JSON object per line: the first character decides."""
    with opened(path, name) as stream:
        if not stream.peek().lstrip().startswith(b"["):
            _require_rows(path, name)
            yield from _line_chunks(stream, name)
            return
        items, size, last_line = list[tuple[str, bytes]](), 0, 0
        for index, (line, raw) in enumerate(_items(stream, name)):
            # Several items may begin on one line, so that messages also name an item by its number.
            items.append((f"{name}:{line}" if line != last_line else f"{name}:{line}[{index}]", raw))
            size, last_line = size + len(raw), line
            if size >= BLOCK_BYTES:
                yield Chunk(rows=partial(_item_rows, items))
                items, size = [], 0
        if items:
            yield Chunk(rows=partial(_item_rows, items))


def _require_rows(path: Path, name: str) -> None:
    """Refuses a small file that is one JSON object over several lines, with rows inside or none."""
    if path.stat().st_size > _ONE_OBJECT:
        return
    with opened(path, name) as stream, contextlib.suppress(orjson.JSONDecodeError):
        text = stream.read()
        first, _, more = text.strip().partition(b"\n")
        if not more or _is_json(first):
            return
        whole = orjson.loads(text)
        key, items = next(((key, value) for key, value in whole.items() if isinstance(value, list) and value), ("", []))
        inside = (f"{key}[]" if key else "") + (" | {messages: .}" if items and isinstance(items[0], list) else "")
        found = f"the file is one JSON object, with {', '.join(list(whole)[:5])}"
        remedy = f"rewrite it: `jq -c '.{inside}' FILE > NEW.jsonl`"
        raise refused(name, found, "an array of rows, or one row a line", remedy)


def _is_json(text: bytes) -> bool:
    with contextlib.suppress(orjson.JSONDecodeError):
        return orjson.loads(text) is not None
    return False


def _line_chunks(stream: BufferedReader, name: str) -> Iterator[Chunk]:
    """The rows of a text with one row per line; blank lines are skipped."""
    for first, data in _blocks(stream, name):
        if not data.isspace():
            yield Chunk(rows=partial(_line_rows, name, first, data))


def _line_rows(name: str, first: int, data: bytes) -> Rows:
    """The rows in whole lines; ``first`` is the number of the first line."""
    for number, line in enumerate(data.split(b"\n"), start=first):
        if line and not line.isspace():
            yield _json_row(line, f"{name}:{number}")


def _json_row(raw: bytes, where: str) -> Row | Broken:
    """The row in a line of JSON Lines, or in an item of an array."""
    try:
        fields = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        try:
            raw.decode()
        except UnicodeDecodeError as stray:
            return _not_utf8(stray, where, raw)
        line = f"line {error.lineno} of the item, " if error.lineno > 1 else ""
        return _broken(raw, where, "not JSON", f"not JSON: {error.msg} at {line}column {error.colno}")
    if not isinstance(fields, dict):
        return _broken(raw, where, "not an object", f"not an object, but the JSON {shown(raw)[:_SHOWN]}")
    if beyond := beyond_64_bits(raw):
        return _broken(raw, where, "number too large", beyond)
    return Row(fields=fields, where=where)


def _broken(raw: bytes, where: str, reason: str, found: str) -> Broken:
    of_array = raw.lstrip()[:1] in (b"[", b"]") or raw.rstrip()[-1:] == b","
    remedy = _ARRAY if of_array else "correct or remove the row"
    return Broken(where=where, found=found, reason=reason, raw=shown(raw), remedy=remedy)


def _item_rows(items: Sequence[tuple[str, bytes]]) -> Rows:
    """The rows in the places and bytes of items."""
    return (_json_row(raw, where) for where, raw in items)


def _items(stream: BufferedReader, name: str) -> Iterator[tuple[int, bytes]]:
    """The line and the bytes of each item of an array.

    Raises:
        DataError: the array is cut or malformed, so that the items that follow cannot be separated.
    """
    decode = json.JSONDecoder(strict=False, parse_int=str, parse_float=str).raw_decode
    text, place, line, index = "", 0, 1, 0  # what was read but not yet consumed, as one character per byte
    while True:
        mark = _MARK.match(text, place)
        assert mark  # the pattern also matches an empty text
        start = end = at = mark.end()
        is_end, fault = mark[1] == "]" or (mark[1][-1:] == "]" and not index), ""
        if is_end:
            fault = "something after the end" if start < len(text) else ""
        elif mark[1] != ("," if index else "["):
            fault = "no comma after an item"
        else:
            try:
                end = decode(text, start)[1]
            except json.JSONDecodeError as error:
                fault, at = error.msg.removesuffix(" at"), error.pos
            except RecursionError:
                fault = "values nested too deep"
        if not fault and end < len(text):  # a number may continue in the text that is read next
            line += text.count("\n", place, start)
            yield line, text[start:end].encode("latin-1")
            line += text.count("\n", start, end)
            place, index = end, index + 1
            continue
        pending = len(text) - place  # at least doubled, so that a long item is not parsed too often
        if pending <= MAX_ROW_BYTES and (block := stream.read(max(BLOCK_BYTES, pending))):
            text, place = text[place:] + block.decode("latin-1"), 0
        elif is_end and not fault:
            return
        else:
            fault = f"an item of more than {MOST}" if pending > MAX_ROW_BYTES else fault
            near = text[at : at + _SHOWN].encode("latin-1").decode(errors="replace")
            found = f"{fault} at {near!r}" if near.strip() else "the file ends inside it"
            where = f"{name}:{line + text.count(chr(10), place, at)}"
            raise refused(where, f"not a JSON array: {found} (item [{index}])", "objects between commas, to its end")


# --- plain text


def read_text(path: Path, name: str, split_by: SplitBy | None) -> Iterator[Chunk]:
    """Rows ``{"text": ...}``: by default paragraphs where there are blank lines, else lines."""
    split: SplitBy = split_by or detected_split(path)
    with opened(path, name) as stream:
        blocks = _blocks(stream, name) if split == "line" else _paragraph_blocks(stream, name)
        if split == "document":
            raw = stream.read(MAX_ROW_BYTES + 1)
            if len(raw) > MAX_ROW_BYTES:
                remedy = "split it, or set split_by=paragraph or split_by=line"
                raise refused(name, f"the file is one row of more than {MOST}", "a shorter one", remedy)
            blocks = iter([(1, raw)])
        for first, data in blocks:
            if data and not data.isspace():
                yield Chunk(rows=partial(_texts, name, first, data, split), split_by=split)


def _paragraph_blocks(stream: BufferedReader, name: str) -> Iterator[tuple[int, bytes]]:
    """Blocks of lines, each ending at a blank line."""
    pending, first = b"", 1
    for number, data in _blocks(stream, name):
        first = first if pending else number
        pending += data
        end = max((match.end() for match in BLANK_LINE.finditer(pending)), default=0)
        if end:
            yield first, pending[:end]
            first += pending.count(b"\n", 0, end)
            pending = pending[end:]
        elif len(pending) > MAX_ROW_BYTES:
            remedy = "put blank lines between paragraphs, or set split_by=line"
            raise refused(f"{name}:{first}", f"a paragraph of more than {MOST}", "shorter ones", remedy)
    if pending:
        yield first, pending


def _texts(name: str, first: int, data: bytes, split: SplitBy) -> Rows:
    """The rows in whole lines or paragraphs, or the document; ``first`` is the number of the first line."""
    if split == "document":
        yield _text_row(data.replace(b"\r\n", b"\n"), name)
        return
    lines, begin = list[bytes](), first
    for number, line in enumerate([*data.split(b"\n"), b""], start=first):
        is_text = bool(line) and not line.isspace()
        if is_text:
            begin = begin if lines else number
            lines.append(line.removesuffix(b"\r"))
        if lines and (split == "line" or not is_text):
            yield _text_row(b"\n".join(lines), f"{name}:{begin}")
            lines.clear()


def _text_row(raw: bytes, where: str) -> Row | Broken:
    try:
        return Row(fields={"text": raw.decode()}, where=where)
    except UnicodeDecodeError as error:
        return _not_utf8(error, where, raw)


# --- the reader of each suffix

_READERS: Mapping[str, Callable[[Path, str], Iterator[Chunk]]] = {
    **dict.fromkeys((".jsonl", ".ndjson", ".jsonlines"), read_json_lines), ".json": read_json,
    ".parquet": read_parquet, ".arrow": read_arrow, ".feather": read_arrow, ".csv": read_csv,
    ".tsv": partial(read_csv, separator="\t"),
}  # fmt: skip
_SUFFIXES = (*_READERS, *_TEXTS)
_ACCEPTED = f"{', '.join(_SUFFIXES)}, each also with .gz, .zst or .bz2"
