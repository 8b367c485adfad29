"""CSV and TSV with a header: each cell is a string, and an empty one is no value."""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path

from lineage.errors import DataError
from tasks.data.reading.chunk import Broken, Chunk, Row
from tasks.data.reading.lines import BLOCK_BYTES, MAX_ROW_BYTES
from tasks.data.reading.opened import no_rows, opened

_SEPARATORS = {",": "commas", "\t": "tabs", ";": "semicolons"}
_MAX_ROWS = 10_000  # per chunk
_SHOWN = 200  # characters

_Line = tuple[int, Sequence[str] | str]
"""Number of a row's first line, and its cells; or what is wrong with its quotes."""


@dataclass(frozen=True, kw_only=True)
class CellsChunk:
    """Rows of a table that is text."""

    name: str
    columns: tuple[str, ...]
    lines: tuple[_Line, ...]

    def rows(self) -> Iterator[Row | Broken]:
        for number, cells in self.lines:
            where = f"{self.name}:{number}"
            broken = self._broken(where, cells)
            named = zip(self.columns, cells, strict=False)
            yield broken or Row(fields={column: cell for column, cell in named if cell}, where=where)

    def _broken(self, where: str, cells: Sequence[str] | str) -> Broken | None:
        if isinstance(cells, str):
            mend = "a cell that holds a quote stands in quotes, and doubles it; mend or remove the row"
            return Broken(where=where, reason="quotes", problem=f"{cells}; {mend}", raw="")
        raw = ",".join(cells)[:_SHOWN].encode(errors="replace").decode()
        if len(cells) != len(self.columns):
            problem = (
                f"{len(cells)} cells, and the header has {len(self.columns)}; one cell per column is accepted; "
                "put a cell that holds the separator or a line break in quotes, or mend the row"
            )
            return Broken(where=where, reason="number of cells", problem=problem, raw=raw)
        for column, cell in zip(self.columns, cells, strict=True):
            byte = _stray_byte(cell)
            if byte:
                problem = (
                    f"byte {byte:#04x} in column {column!r} is not UTF-8; UTF-8 is accepted; "
                    "convert the file: `iconv -f ENCODING -t UTF-8 FILE > NEW`, or mend the row"
                )
                return Broken(where=where, reason="not UTF-8", problem=problem, raw=raw)
        return None


def read_csv(path: Path, name: str) -> Iterator[Chunk]:
    """Cells between commas."""
    return _read(path, name, ",")


def read_tsv(path: Path, name: str) -> Iterator[Chunk]:
    """Cells between tabs."""
    return _read(path, name, "\t")


def _read(path: Path, name: str, separator: str) -> Iterator[Chunk]:
    with opened(path, name) as stream:
        # Bytes that are no UTF-8 pass as half surrogates, which UTF-8 never yields, until their row is known.
        text = TextIOWrapper(stream, encoding="utf-8", errors="surrogateescape", newline="")
        lines = _lines(text, separator)
        columns = _header(next(lines, None), name, separator)
        pending, size, found = list[_Line](), 0, False
        for line in lines:
            pending.append(line)
            size += sum(map(len, line[1]))
            if size >= BLOCK_BYTES or len(pending) == _MAX_ROWS:
                yield CellsChunk(name=name, columns=columns, lines=tuple(pending))
                pending, size, found = [], 0, True
        if pending:
            yield CellsChunk(name=name, columns=columns, lines=tuple(pending))
        elif not found:
            raise no_rows(name, "a header alone")


def _lines(text: TextIOWrapper, separator: str) -> Iterator[_Line]:
    """Rows, without blank lines. After a fault the reader goes on with the next line."""
    csv.field_size_limit(MAX_ROW_BYTES)  # of the whole process; by default a document of 128 kB is refused
    reader = csv.reader(text, delimiter=separator, strict=True)
    while True:
        first = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield first, _fault(str(error), first, reader.line_num)
        else:
            if cells:
                yield first, cells


def _fault(message: str, first: int, last: int) -> str:
    if message.startswith("unexpected end"):
        return f"a quote that opens in this row is never closed: lines {first} to {last}, the last, became one row"
    if message.startswith("field larger"):
        return f"a cell of more than {MAX_ROW_BYTES // 2**20} MB: a quote that opens in this row is never closed"
    return f"a quote closes a cell on line {last}, and the cell goes on"


def _header(line: _Line | None, name: str, separator: str) -> tuple[str, ...]:
    if line is None:
        raise no_rows(name, "blank lines alone")
    columns = line[1]
    if isinstance(columns, str):
        raise DataError(f"{name}:{line[0]}: {columns}; a header of column names is accepted; mend it")
    others = [each for each in _SEPARATORS if each != separator and len(columns) == 1 and each in columns[0]]
    if others:
        raise DataError(
            f"{name}: its header, {columns[0]!r}, is separated by {_SEPARATORS[others[0]]}; {_SEPARATORS[separator]} "
            "are accepted; write it again with those (.csv: commas, .tsv: tabs)"
        )
    for place, column in enumerate(columns):
        if _stray_byte(column):
            raise DataError(
                f"{name}: the name of column {place + 1} is not UTF-8; UTF-8 is accepted; "
                "convert the file: `iconv -f ENCODING -t UTF-8 FILE > NEW`"
            )
        if column in columns[:place]:
            raise DataError(f"{name}: two columns are named {column!r}; one of each name is accepted; rename one")
    return tuple(columns)


def _stray_byte(cell: str) -> int | None:
    """The first byte of a cell that is no UTF-8."""
    if cell.isascii():
        return None
    try:
        cell.encode()
    except UnicodeEncodeError as error:
        return ord(cell[error.start]) - 0xDC00
    return None
