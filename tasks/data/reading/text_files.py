"""Plain text: one document per line, or, in Markdown, one per file."""

from collections.abc import Iterator
from pathlib import Path

from lineage.errors import DataError
from tasks.data.reading.chunk import Broken, Chunk, ParsedChunk, Row
from tasks.data.reading.lines import MAX_ROW_BYTES, line_chunks, not_utf8
from tasks.data.reading.opened import no_rows, opened


def read_text(path: Path, name: str) -> Iterator[Chunk]:
    """Rows ``{"text": line}``. A document with line breaks needs JSON Lines, or Markdown."""
    with opened(path, name) as stream:
        yield from line_chunks(stream, name, _text_row)


def read_markdown(path: Path, name: str) -> Iterator[Chunk]:
    """One row ``{"text": ...}``: the file."""
    with opened(path, name) as stream:
        raw = stream.read(MAX_ROW_BYTES + 1)
    if len(raw) > MAX_ROW_BYTES:
        raise DataError(
            f"{name}: a document of more than {MAX_ROW_BYTES // 2**20} MB; a Markdown file is read as one row; "
            "split it, or name it .txt for one row per line"
        )
    if raw.isspace():
        raise no_rows(name, "blank lines alone")
    yield ParsedChunk(entries=(_text_row(raw.replace(b"\r\n", b"\n"), name),))


def _text_row(raw: bytes, where: str) -> Row | Broken:
    try:
        return Row(fields={"text": raw.decode().removesuffix("\r")}, where=where)
    except UnicodeDecodeError as error:
        return not_utf8(error, where, raw)
