"""Opens local files as bytes, unpacking packed ones, and reads text in blocks of lines, which other processes parse.

A row is a line, or, of plain text, a line, a paragraph or the file, which is the default for Markdown. A file whose
content does not match its name is refused.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from io import BufferedReader, RawIOBase
from pathlib import Path
from tempfile import TemporaryDirectory

from lineage.text_split import BLANK_LINE, SplitBy, compression_of, detected_split
from tasks.data.reading.chunk import BLOCK_BYTES, MAX_ROW_BYTES, MOST, Broken, Chunk, Row, Rows, not_utf8, refused

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


def line_chunks(stream: BufferedReader, name: str, parse: Callable[[bytes, str], Row | Broken]) -> Iterator[Chunk]:
    """The rows of a text with one row per line; blank lines are skipped.

    Args:
        parse: the row in a line at a place: a module's function, so that it can be pickled.
    """
    for first, data in _blocks(stream, name):
        if not data.isspace():
            yield Chunk(rows=partial(_line_rows, name, first, data, parse))


def _line_rows(name: str, first: int, data: bytes, parse: Callable[[bytes, str], Row | Broken]) -> Rows:
    """The rows in whole lines; ``first`` is the number of the first line."""
    for number, line in enumerate(data.split(b"\n"), start=first):
        if line and not line.isspace():
            yield parse(line, f"{name}:{number}")


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
        return not_utf8(error, where, raw)
