"""Text in which each line is a row: read in blocks of lines, which other processes take apart."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BufferedReader

from lineage.errors import DataError
from tasks.data.reading.chunk import Broken, Chunk, ParsedChunk, Row
from tasks.data.reading.opened import no_rows

BLOCK_BYTES = 2**20
MAX_ROW_BYTES = 64 * 2**20  # some ten million tokens; more is a file whose lines do not end
_SHOWN_BYTES = 200

Parse = Callable[[bytes, str], Row | Broken]
"""Makes a row of a line; its second argument is the place. A function of a module, so that it can be pickled."""


@dataclass(frozen=True, kw_only=True)
class LinesChunk:
    """Whole lines, as they stand in the file.

    Args:
        name: of the file, for messages.
        first: number of the first line.
    """

    name: str
    first: int
    data: bytes
    parse: Parse

    def rows(self) -> Iterator[Row | Broken]:
        for number, line in enumerate(self.data.split(b"\n"), start=self.first):
            if line and not line.isspace():
                yield self.parse(line, f"{self.name}:{number}")


def line_chunks(stream: BufferedReader, name: str, parse: Parse) -> Iterator[Chunk]:
    """The rows of a text with one row per line; blank lines are skipped.

    Raises:
        DataError: as ``blocks``.
    """
    for first, data in blocks(stream, name):
        if data is None:
            yield ParsedChunk(entries=(_endless(f"{name}:{first}"),))
        elif not data.isspace():
            yield LinesChunk(name=name, first=first, data=data, parse=parse)


def shown(raw: bytes) -> str:
    """The beginning of what is no row, as far as it is text."""
    return raw[:_SHOWN_BYTES].decode(errors="replace")


def not_utf8(error: UnicodeDecodeError, where: str, raw: bytes) -> Broken:
    """Of a line that does not decode."""
    return Broken(
        where=where, reason="not UTF-8", raw=shown(raw),
        problem=f"byte {raw[error.start]:#04x} at column {error.start + 1} is not UTF-8; UTF-8 is accepted; "
        "convert the file: `iconv -f ENCODING -t UTF-8 FILE > NEW`, or mend the line",
    )  # fmt: skip


def blocks(stream: BufferedReader, name: str) -> Iterator[tuple[int, bytes | None]]:
    """Number of the first line, and whole lines; None in place of a line that is too long.

    Raises:
        DataError: all lines are blank, or they do not end with a line feed.
    """
    found = False
    for first, data in _blocks(stream):
        if not found and data is not None and b"\n" not in data and b"\r" in data.strip():
            raise DataError(
                f"{name}: its lines end with a carriage return alone; a line feed at their end is accepted; "
                "convert it: `tr '\\r' '\\n' < FILE > NEW`"
            )
        found = found or data is None or not data.isspace()
        yield first, data
    if not found:
        raise no_rows(name, "blank lines alone")


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
    """Reads beyond the end of a line. Returns some of what follows it; nothing at the end of the file."""
    while block := stream.read(BLOCK_BYTES):
        if b"\n" in block:
            return block.partition(b"\n")[2] or stream.read(BLOCK_BYTES)
    return b""


def _endless(where: str) -> Broken:
    return Broken(
        where=where, reason="line too long", raw="",
        problem=f"a line of more than {MAX_ROW_BYTES // 2**20} MB; one row per line is accepted; "
        "end the lines with a line feed, or split the row",
    )  # fmt: skip
