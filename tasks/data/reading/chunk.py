"""What readers return: rows and unusable places, in chunks that another process can parse; slices; files, opened."""

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from io import BufferedReader, RawIOBase
from pathlib import Path
from tempfile import TemporaryDirectory

import orjson

from lineage.errors import ConfigError, DataError
from lineage.source.text_split import SplitBy, compression_of

BLOCK_BYTES = 2**20  # that are read at once
MAX_ROW_BYTES = 64 * 2**20  # about ten million tokens; a longer line is a file without line ends
MOST = f"{MAX_ROW_BYTES // 2**20} MB"
_SHOWN_BYTES = 200  # of an unusable place, in messages


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row as it is in the user's data.

    Args:
        where: ``file:line`` or ``dataset[index]``, for messages.
    """

    fields: Mapping[str, object]
    where: str


@dataclass(frozen=True)
class Unread:
    """A value of a column whose type has no form in JSON.

    Args:
        type: name of the type.
    """

    type: str


ENCODED = "convert the file: `iconv -f ENCODING -t UTF-8 FILE > NEW`"  # what to do where it is not UTF-8


@dataclass(frozen=True, kw_only=True)
class Broken:
    """A place where a row was expected but there is none, or one that cannot be used.

    Args:
        found: what is wrong.
        reason: a few words that such places are counted by, such as ``not JSON``.
        raw: the beginning of what was found.
    """

    where: str
    found: str
    reason: str
    raw: str = ""
    accepted: str = "one JSON object per row, in UTF-8"
    remedy: str = "correct or remove the row"

    @property
    def problem(self) -> str:
        """What was found; what is accepted; the remedy."""
        return f"{self.found}; accepted: {self.accepted}; {self.remedy}"


Rows = Iterator[Row | Broken]


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Some consecutive rows of a source, not yet parsed. Can be pickled.

    Args:
        rows: parses the rows: a ``partial`` of a module's function.
        split_by: the unit of plain text that is a row.
    """

    rows: Callable[[], Rows]
    split_by: SplitBy | None = None


def parsed(*entries: Row | Broken, split_by: SplitBy | None = None) -> Chunk:
    """A chunk of rows that the reader's library has already parsed."""
    return Chunk(rows=partial(iter, entries), split_by=split_by)


def shown(raw: bytes) -> str:
    """The beginning of an unusable place, as far as it is text."""
    return raw[:_SHOWN_BYTES].decode(errors="replace")


def refused(where: str, found: str, accepted: str, remedy: str = "correct it") -> DataError:
    """The error for a whole file or directory, in the form of a ``Broken``."""
    return DataError(f"{where}: {found}; accepted: {accepted}; {remedy}")


def no_split(name: str, split: str, splits: Mapping[str, object]) -> ConfigError:
    """The error for a directory that has only other splits."""
    return ConfigError(f"{name}: no split {split!r} in it; accepted: {', '.join(splits)}; set split to one of them")


_SPLIT = re.compile(r"([\w.-]+)(?:\[(-?\d+%?)?:(-?\d+%?)?\])?")
_PARTS = "a split, or a part of one in rows or percent, such as train[:1000], train[90%:] or train[-100:]"


@dataclass(frozen=True, kw_only=True)
class Slice:
    """A part of some rows, as ``datasets`` understands it: percent are rounded to the nearest row.

    Args:
        text: as the user wrote it, for messages.
        start, stop: rows, or percent such as ``90%``; negative: from the end.
    """

    text: str
    start: str
    stop: str

    @property
    def last(self) -> int | None:
        """How many rows from the beginning contain the slice; None: this depends on the number of rows."""
        return int(self.stop) if self.start.isdecimal() and self.stop.isdecimal() else None

    def bounds(self, count: int) -> tuple[int, int]:
        """Indices of the first row and of the one after the last, in a split of ``count`` rows.

        Raises:
            DataError: the slice is empty.
        """
        start, stop = _index(self.start, count), _index(self.stop, count)
        if start >= stop:
            raise DataError(f"split={self.text!r} of {count} rows has no row; set a part that has at least one row")
        return start, stop


def parse_split(text: str) -> tuple[str, Slice | None]:
    """The name of a split, and the slice of it (ConfigError: it is neither)."""
    found = _SPLIT.fullmatch(text)
    if not found or any(bound and bound.endswith("%") and abs(int(bound[:-1])) > 100 for bound in found.groups()[1:]):
        raise ConfigError(f"split={text!r}: {_PARTS} is accepted")
    name, start, stop = found.groups()
    return name, Slice(text=text, start=start or "0", stop=stop or "100%") if text != name else None


def _index(bound: str, count: int) -> int:
    place = round(int(bound[:-1]) * count / 100) if bound.endswith("%") else int(bound)
    return min(max(place + count if bound.startswith("-") else place, 0), count)


# Files, unpacked.

_BOM = b"\xef\xbb\xbf"  # of UTF-8; without meaning
_SIGNATURES = {  # first bytes -> format of a file that is not text; the first that fits counts
    b"\xff\xfe\x00\x00": "UTF-32", b"\x00\x00\xfe\xff": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16",
    b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "Zstandard", b"BZh": "bzip2", b"PK\x03\x04": "a zip archive or workbook",
    b"PAR1": "Parquet", b"ARROW1": "Arrow", b"SQLite format 3": "a SQLite database", b"%PDF-": "PDF",
    b"version https://git-lfs": "a pointer of Git LFS (`git lfs pull` gets the data)",
}  # fmt: skip
_TEXT, _OTHER = "text", "of another kind"


def format_of(head: bytes) -> str:
    """The format of a file that begins with these bytes."""
    for start, found in _SIGNATURES.items():
        if head.startswith(start):
            return found
    for order, high in (("LE", 1), ("BE", 0)):  # of UTF-16, whose letters have a byte that is 0
        if all(head[1 - high : 8 : 2]) and len(head) >= 8 and not any(head[high:8:2]):
            return f"UTF-16{order}"
    return _TEXT if head[:1] in b'{["' else _OTHER


@contextmanager
def opened(path: Path, name: str) -> Iterator[BufferedReader]:
    """The bytes of a text file, after its byte order mark.

    Args:
        name: of the file, for messages.

    Raises:
        DataError: it cannot be read, is damaged, or its first bytes are not those of UTF-8 text.
    """
    with _unpacked(path, name) as stream:
        found = format_of(stream.peek(64))
        if found not in (_TEXT, _OTHER):
            remedy = "convert it (`iconv -f UTF-16 -t UTF-8 FILE > NEW`, or export it), or name it as what it is"
            raise refused(name, f"the file is {found}", "text in UTF-8", remedy)
        if stream.peek(64).startswith(_BOM):
            stream.read(len(_BOM))
        yield stream


@contextmanager
def on_disk(path: Path, name: str) -> Iterator[Path]:
    """The unpacked file, for a reader that seeks in it."""
    if not compression_of(path):
        yield path
        return
    with TemporaryDirectory() as scratch:
        copy = Path(scratch, path.stem)
        with _unpacked(path, name) as stream, copy.open("wb") as file:
            shutil.copyfileobj(stream, file, BLOCK_BYTES)
        yield copy


@contextmanager
def _unpacked(path: Path, name: str) -> Iterator[BufferedReader]:
    """The bytes of a file (DataError: it cannot be read, or the packed file is damaged)."""
    packing = compression_of(path)
    try:
        stream: BufferedReader = BufferedReader(_raw(path, packing), BLOCK_BYTES)
        with stream:
            yield stream
    except OSError as error:  # from the disk, or from any decompressor
        accepted, remedy = "a file that you may read", "check its permissions"
        if packing:
            accepted, remedy = f"{packing}, to its end", "it was cut or damaged: write or download it again"
        raise refused(name, f"cannot be read ({error})", accepted, remedy) from error


def _raw(path: Path, packing: str | None) -> RawIOBase:
    if not packing:
        return path.open("rb", buffering=0)
    import pyarrow as pa

    stream: RawIOBase = pa.input_stream(str(path), compression=packing)
    return stream


_DIGITS = bytes(ord("0") if chr(byte).isdecimal() and byte < 128 else 0 for byte in range(256))
_LONG = b"0" * 19  # digits of the shortest number that may be beyond 64 bits


def json_value(raw: bytes) -> object:
    """The value in a JSON text of a column (ValueError: it is not JSON, or has an integer of more than 64 bits)."""
    value: object = orjson.loads(raw)
    if beyond := beyond_64_bits(raw):
        raise ValueError(beyond)
    return value


def beyond_64_bits(raw: bytes) -> str:
    """What is wrong with integers of more than 64 bits, which orjson would round; empty: there are none."""
    beyond = list[str]()
    if _LONG in raw.translate(_DIGITS):
        json.loads(raw, parse_int=lambda digits: None if -(2**63) <= int(digits) < 2**64 else beyond.append(digits))
    return f"the integer {beyond[0]} needs more than 64 bits" if beyond else ""
