"""Opens local files as bytes, unpacking packed ones, and reads text in blocks of lines.

A row is a line, or, of plain text, a line, a paragraph or the file, which is the default for Markdown. Other
processes parse the blocks. A file whose content does not match its name is refused.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from io import BufferedReader, RawIOBase
from pathlib import Path
from tempfile import TemporaryDirectory

from lineage.errors import DataError
from lineage.text_split import BLANK_LINE, SplitBy, compression_of, detected_split
from tasks.data.reading.chunk import Broken, Chunk, Row, Rows, no_rows, not_utf8, parsed

BLOCK_BYTES = 2**20
MAX_ROW_BYTES = 64 * 2**20  # about ten million tokens; a longer line is a file without line ends
MOST = f"{MAX_ROW_BYTES // 2**20} MB"

_BOM = b"\xef\xbb\xbf"  # of UTF-8; without meaning
_ICONV = "UTF-8 is accepted; convert it: `iconv -f {} -t UTF-8 FILE > NEW`"
_PACKED = "text is accepted; if it is packed text, add {} to its name"
_NO_TEXT = {  # first bytes of a file -> what it is, and what to do; the first that fits counts
    b"\xff\xfe\x00\x00": ("UTF-32 (by its byte order mark)", _ICONV.format("UTF-32")),
    b"\x00\x00\xfe\xff": ("UTF-32 (by its byte order mark)", _ICONV.format("UTF-32")),
    b"\xff\xfe": ("UTF-16 (by its byte order mark)", _ICONV.format("UTF-16")),
    b"\xfe\xff": ("UTF-16 (by its byte order mark)", _ICONV.format("UTF-16")),
    b"\x1f\x8b": ("gzip", _PACKED.format(".gz")),
    b"\x28\xb5\x2f\xfd": ("Zstandard", _PACKED.format(".zst")),
    b"BZh": ("bzip2", _PACKED.format(".bz2")),
    b"PK\x03\x04": ("a zip archive, or a workbook of Excel", "text is accepted; unpack it, or save it as CSV"),
    b"PAR1": ("Parquet", "text is accepted; name it .parquet"),
    b"ARROW1": ("Arrow", "text is accepted; name it .arrow"),
    b"SQLite format 3": ("a SQLite database", "text is accepted; export its rows as CSV"),
    b"%PDF-": ("PDF", "text is accepted; extract its text"),
    b"version https://git-lfs": ("a pointer of Git LFS, not the data", "the data is accepted; run `git lfs pull`"),
}

Parse = Callable[[bytes, str], Row | Broken]
"""Turns a line into a row; the second argument is its place. A module's function, so that it can be pickled."""


@contextmanager
def opened(path: Path, name: str) -> Iterator[BufferedReader]:
    """The bytes of a text file, after its byte order mark.

    Args:
        name: of the file, for messages.

    Raises:
        DataError: it is empty, cannot be read, is damaged, or its first bytes are not those of UTF-8 text.
    """
    with _unpacked(path, name) as stream:
        found, remedy = kind_of(stream.peek(64), name)
        if remedy:
            raise DataError(f"{name} is {found}; {remedy}")
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
        if packing:
            raise DataError(
                f"{name}: cannot be unpacked ({error}); {packing} is accepted, to its end; "
                "it was cut or damaged: write or download it again"
            ) from error
        raise DataError(
            f"{name}: cannot be read ({error}); a file that you may read is accepted; check its permissions"
        ) from error


def _raw(path: Path, packing: str | None) -> RawIOBase:
    if not packing:
        return path.open("rb", buffering=0)
    import pyarrow as pa

    stream: RawIOBase = pa.input_stream(str(path), compression=packing)
    return stream


def kind_of(head: bytes, name: str) -> tuple[str, str]:
    """The format of a file that begins with these bytes, and what to do if text was meant; empty: it may be text.

    Raises:
        DataError: the file is empty.
    """
    if not head:
        raise no_rows(name, " is empty (0 bytes)")
    for start, (found, remedy) in _NO_TEXT.items():
        if head.startswith(start):
            return found, remedy
    for order, high in (("LE", 1), ("BE", 0)):  # of UTF-16, whose letters have a byte that is 0
        if all(head[1 - high : 8 : 2]) and len(head) >= 8 and not any(head[high:8:2]):
            return "UTF-16 (every second byte is 0)", _ICONV.format(f"UTF-16{order}")
    return ("text" if head[:1] in b'{["' else "of another kind"), ""


def line_chunks(stream: BufferedReader, name: str, parse: Parse, split_by: SplitBy | None = None) -> Iterator[Chunk]:
    """The rows of a text with one row per line; blank lines are skipped.

    Raises:
        DataError: as ``_filled``.
    """
    for first, data in _filled(stream, name):
        if data is None:
            found = f"a line of more than {MOST}"
            yield parsed(Broken(where=f"{name}:{first}", found=found, reason="line too long", raw=""))
        elif not data.isspace():
            yield Chunk(rows=partial(_line_rows, name, first, data, parse), split_by=split_by)


def _line_rows(name: str, first: int, data: bytes, parse: Parse) -> Rows:
    """The rows in whole lines; ``first`` is the number of the first line."""
    for number, line in enumerate(data.split(b"\n"), start=first):
        if line and not line.isspace():
            yield parse(line, f"{name}:{number}")


def _filled(stream: BufferedReader, name: str) -> Iterator[tuple[int, bytes | None]]:
    """Blocks of whole lines, each with the number of its first line; None in place of a line that is too long.

    Raises:
        DataError: all lines are blank, or they do not end with a line feed.
    """
    found = False
    for first, data in _blocks(stream):
        if not found and data is not None and b"\n" not in data and b"\r" in data.strip():
            raise DataError(
                f"{name}: its lines end with a carriage return only; a line feed at their end is accepted; "
                "convert it: `tr '\\r' '\\n' < FILE > NEW`"
            )
        found = found or data is None or not data.isspace()
        yield first, data
    if not found:
        raise no_rows(name, ": only blank lines")


def _blocks(stream: BufferedReader) -> Iterator[tuple[int, bytes | None]]:
    number, pending, block = 1, bytearray(), stream.read(BLOCK_BYTES)
    while block:
        pending += block
        unfinished = len(block) - block.rfind(b"\n") - 1
        if unfinished < len(block):
            lines = bytes(pending[: len(pending) - unfinished])
            del pending[: len(lines)]
            yield number, lines
            number += lines.count(b"\n")
        elif len(pending) > MAX_ROW_BYTES:
            yield number, None
            number, pending = number + 1, bytearray()
            block = _after_line(stream)
            continue
        block = stream.read(BLOCK_BYTES)
    if pending:
        yield number, bytes(pending)


def _after_line(stream: BufferedReader) -> bytes:
    """Skips the rest of a line. Returns some of the bytes after it; empty at the end of the file."""
    while block := stream.read(BLOCK_BYTES):
        if b"\n" in block:
            return block.partition(b"\n")[2] or stream.read(BLOCK_BYTES)
    return b""


def read_text(path: Path, name: str, split_by: SplitBy | None) -> Iterator[Chunk]:
    """Rows ``{"text": ...}``: by default paragraphs where there are blank lines, else lines."""
    split: SplitBy = split_by or detected_split(path)
    with opened(path, name) as stream:
        if split == "line":
            yield from line_chunks(stream, name, _text_row, split)
        elif split == "paragraph":
            yield from _paragraph_chunks(stream, name)
        else:
            yield _document(stream, name)


def _document(stream: BufferedReader, name: str) -> Chunk:
    raw = stream.read(MAX_ROW_BYTES + 1)
    if len(raw) > MAX_ROW_BYTES:
        raise DataError(
            f"{name}: a document of more than {MOST}; the file is read as one row; split it, or set "
            "split_by=paragraph or split_by=line"
        )
    if raw.isspace():
        raise no_rows(name, ": only blank lines")
    return parsed(_text_row(raw.replace(b"\r\n", b"\n"), name), split_by="document")


def _paragraph_chunks(stream: BufferedReader, name: str) -> Iterator[Chunk]:
    """Blocks of lines, each ending at a blank line."""
    pending, first = b"", 1
    for number, data in _filled(stream, name):
        if data is None or len(pending) > MAX_ROW_BYTES:
            raise DataError(
                f"{name}:{first}: a paragraph of more than {MOST}; blank lines between paragraphs are accepted; put "
                "some, or set split_by=line"
            )
        first = first if pending else number
        pending += data
        end = max((match.end() for match in BLANK_LINE.finditer(pending)), default=0)
        if end:
            yield Chunk(rows=partial(_paragraphs, name, first, pending[:end]), split_by="paragraph")
            first += pending.count(b"\n", 0, end)
            pending = pending[end:]
    yield Chunk(rows=partial(_paragraphs, name, first, pending), split_by="paragraph")


def _paragraphs(name: str, first: int, data: bytes) -> Rows:
    """The rows in whole paragraphs; ``first`` is the number of the first line."""
    lines, begin = list[bytes](), 0
    for number, line in enumerate([*data.split(b"\n"), b""], start=first):
        if line and not line.isspace():
            begin = begin if lines else number
            lines.append(line.removesuffix(b"\r"))
        elif lines:
            yield _text_row(b"\n".join(lines), f"{name}:{begin}")
            lines.clear()


def _text_row(raw: bytes, where: str) -> Row | Broken:
    try:
        return Row(fields={"text": raw.decode().removesuffix("\r")}, where=where)
    except UnicodeDecodeError as error:
        return not_utf8(error, where, raw)
