"""Rows of text files: unpacked, cut into blocks that other processes parse, and parsed.

A row is a line of JSON, an item of one JSON array, or, of plain text, a line, a paragraph or the file, which is the
default for Markdown. A file whose content does not match its name is refused.

Python's parser tells where a value of an array ends, and so where the next one begins, also in a text that is read only
in part. ijson would parse the items too, but reports no position, and turns half a surrogate pair into "?".
"""

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from io import BufferedReader, RawIOBase
from pathlib import Path
from tempfile import TemporaryDirectory

import orjson

from lineage.source.text_split import BLANK_LINE, SplitBy, compression_of, detected_split
from tasks.data.reading.chunk import BLOCK_BYTES, MAX_ROW_BYTES, MOST, Broken, Chunk, Row, Rows, refused, shown

_BOM = b"\xef\xbb\xbf"  # of UTF-8; without meaning
_SIGNATURES = {  # first bytes -> format of a file that is not text; the first that fits counts
    b"\xff\xfe\x00\x00": "UTF-32", b"\x00\x00\xfe\xff": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16",
    b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "Zstandard", b"BZh": "bzip2", b"PK\x03\x04": "a zip archive or workbook",
    b"PAR1": "Parquet", b"ARROW1": "Arrow", b"SQLite format 3": "a SQLite database", b"%PDF-": "PDF",
    b"version https://git-lfs": "a pointer of Git LFS (`git lfs pull` gets the data)",
}  # fmt: skip
_TEXT, _OTHER = "text", "of another kind"
_DIGITS = bytes(ord("0") if chr(byte).isdecimal() and byte < 128 else 0 for byte in range(256))
_LONG = b"0" * 19  # digits of the shortest number that may be beyond 64 bits
_ARRAY = "correct or remove it; if the whole file is one JSON array, name it .json, or `jq -c '.[]' FILE > NEW.jsonl`"
_MARK = re.compile(r"\s*(\[\s*\]|[\[,\]]?)\s*")  # before an item; the first alternative is an empty array
_SHOWN = 40  # characters around a fault


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
    """The bytes of a file.

    Raises:
        DataError: it cannot be read, or the packed file is damaged.
    """
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
    remedy = "convert the file: `iconv -f ENCODING -t UTF-8 FILE > NEW`, or correct the row"
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
    if beyond := _beyond(raw):
        return _broken(raw, where, "number too large", beyond)
    return Row(fields=fields, where=where)


def json_value(raw: bytes) -> object:
    """The value in a JSON text of a column.

    Raises:
        ValueError: it is not JSON, or has an integer of more than 64 bits.
    """
    value: object = orjson.loads(raw)
    if beyond := _beyond(raw):
        raise ValueError(beyond)
    return value


def _beyond(raw: bytes) -> str:
    """What is wrong with integers of more than 64 bits, which orjson would round; empty: there are none."""
    beyond = list[str]()
    if _LONG in raw.translate(_DIGITS):
        json.loads(raw, parse_int=lambda digits: None if -(2**63) <= int(digits) < 2**64 else beyond.append(digits))
    return f"the integer {beyond[0]} needs more than 64 bits" if beyond else ""


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
        DataError: the array is cut or malformed, so that the items that follow cannot be told apart.
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
