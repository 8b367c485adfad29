"""Plain text: a document per line, per paragraph, or per file, which is what Markdown is by itself."""

from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from lineage.errors import DataError
from lineage.text_split import BLANK_LINE, SplitBy, detected_split
from tasks.data.reading.chunk import Broken, Chunk, ParsedChunk, Row
from tasks.data.reading.lines import MAX_ROW_BYTES, blocks, line_chunks, not_utf8
from tasks.data.reading.opened import no_rows, opened


@dataclass(frozen=True, kw_only=True)
class TextChunk:
    """Documents, and what of the file each of them is."""

    chunk: Chunk
    split_by: SplitBy

    def rows(self) -> Iterator[Row | Broken]:
        yield from self.chunk.rows()


@dataclass(frozen=True, kw_only=True)
class ParagraphsChunk:
    """Whole paragraphs, as they stand in the file.

    Args:
        name: of the file, for messages.
        first: number of the first line.
    """

    name: str
    first: int
    data: bytes

    def rows(self) -> Iterator[Row | Broken]:
        lines, begin = list[bytes](), 0
        for number, line in enumerate([*self.data.split(b"\n"), b""], start=self.first):
            if line and not line.isspace():
                begin = begin if lines else number
                lines.append(line.removesuffix(b"\r"))
            elif lines:
                yield _text_row(b"\n".join(lines), f"{self.name}:{begin}")
                lines.clear()


def read_text(path: Path, name: str, split_by: SplitBy | None) -> Iterator[Chunk]:
    """Rows ``{"text": ...}``: paragraphs where there are blank lines, else lines, unless it is stated."""
    split: SplitBy = split_by or detected_split(path)
    if split == "document":
        yield from _document(path, name)
        return
    with opened(path, name) as stream:
        chunks = line_chunks(stream, name, _text_row) if split == "line" else _paragraph_chunks(stream, name)
        for chunk in chunks:
            yield TextChunk(chunk=chunk, split_by=split)


def read_markdown(path: Path, name: str, split_by: SplitBy | None) -> Iterator[Chunk]:
    """One row ``{"text": ...}``: the file, unless another split is stated."""
    return read_text(path, name, split_by or "document")


def _document(path: Path, name: str) -> Iterator[Chunk]:
    with opened(path, name) as stream:
        raw = stream.read(MAX_ROW_BYTES + 1)
    if len(raw) > MAX_ROW_BYTES:
        raise DataError(
            f"{name}: a document of more than {MAX_ROW_BYTES // 2**20} MB; the file is read as one row; "
            "split it, or state split_by=paragraph or split_by=line"
        )
    if raw.isspace():
        raise no_rows(name, "blank lines alone")
    row = _text_row(raw.replace(b"\r\n", b"\n"), name)
    yield TextChunk(chunk=ParsedChunk(entries=(row,)), split_by="document")


def _paragraph_chunks(stream: BufferedReader, name: str) -> Iterator[Chunk]:
    """Blocks of lines, each cut at its last blank line."""
    pending, first = b"", 1
    for number, data in blocks(stream, name):
        if data is None or len(pending) > MAX_ROW_BYTES:
            raise DataError(
                f"{name}:{first}: a paragraph of more than {MAX_ROW_BYTES // 2**20} MB; blank lines between paragraphs "
                "are accepted; put some, or state split_by=line"
            )
        first = first if pending else number
        pending += data
        end = max((match.end() for match in BLANK_LINE.finditer(pending)), default=0)
        if end:
            yield ParagraphsChunk(name=name, first=first, data=pending[:end])
            first += pending.count(b"\n", 0, end)
            pending = pending[end:]
    yield ParagraphsChunk(name=name, first=first, data=pending)


def _text_row(raw: bytes, where: str) -> Row | Broken:
    try:
        return Row(fields={"text": raw.decode().removesuffix("\r")}, where=where)
    except UnicodeDecodeError as error:
        return not_utf8(error, where, raw)
