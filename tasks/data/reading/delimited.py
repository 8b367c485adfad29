"""CSV and TSV with a header: each cell is a string, which may be empty."""

import csv
from collections.abc import Iterator, Sequence
from functools import partial
from io import TextIOWrapper
from pathlib import Path

from lineage.errors import DataError
from tasks.data.reading.chunk import SHOWN_BYTES, Broken, Chunk, Row, Rows, no_rows, two_columns
from tasks.data.reading.lines import BLOCK_BYTES, MAX_ROW_BYTES, MOST, opened

_SEPARATORS = {",": "commas", "\t": "tabs", ";": "semicolons"}
_MAX_ROWS = 10_000  # per chunk
_MAX_COLUMNS = 10_000
_MAX_CELLS = 1_000_000  # of one faulty row, where separators in text count too
_QUOTES = "a cell that holds a quote stands in quotes, and doubles it"
_ACCEPTED = f"one cell in UTF-8 per column; {_QUOTES}, and one that holds a separator or a line break stands in quotes"

_Line = tuple[int, Sequence[str] | str]
"""The number of a row's first line, with its cells or with the fault in its quotes."""


def read_csv(path: Path, name: str, separator: str = ",") -> Iterator[Chunk]:
    """Cells between separators."""
    with opened(path, name) as stream:
        # Bytes that are not UTF-8 are kept as half surrogates, which UTF-8 never yields, until their row is known.
        text = TextIOWrapper(stream, encoding="utf-8", errors="surrogateescape", newline="")
        lines = _lines(text, name, separator)
        columns = _header(next(lines, None), name, separator)
        pending, size, found = list[_Line](), 0, False
        for line in lines:
            if len(line[1]) != len(columns) and (breaks := "".join(line[1]).count("\n")):
                raise _swallowed(name, _odd_count(line[1], columns), line[0], line[0] + breaks)
            pending.append(line)
            size += sum(map(len, line[1]))
            if size >= BLOCK_BYTES or len(pending) == _MAX_ROWS:
                yield Chunk(rows=partial(_rows, name, columns, separator, pending))
                pending, size, found = [], 0, True
        if pending:
            yield Chunk(rows=partial(_rows, name, columns, separator, pending))
        elif not found:
            raise no_rows(name, ": only a header")


def _rows(name: str, columns: Sequence[str], separator: str, lines: Sequence[_Line]) -> Rows:
    for number, cells in lines:
        where = f"{name}:{number}"
        if fault := _fault(number, cells, columns, separator):
            raw = "" if isinstance(cells, str) else ",".join(cells)[:SHOWN_BYTES].encode(errors="replace").decode()
            yield Broken(where=where, reason=fault[0], found=fault[1], raw=raw, accepted=_ACCEPTED)
        else:
            yield Row(fields=dict(zip(columns, cells, strict=True)), where=where)


def _fault(number: int, cells: Sequence[str] | str, columns: Sequence[str], separator: str) -> tuple[str, str] | None:
    """The reason why a row is unusable, and what was found; None: it is usable."""
    if isinstance(cells, str):
        return "quotes", cells
    if len(cells) != len(columns):
        return "number of cells", _odd_count(cells, columns)
    for place, cell in enumerate(cells):
        if "\n" in cell and _holds_rows(cell, place, len(columns) - 1, separator):
            first = number + sum(each.count("\n") for each in cells[:place])
            last = first + cell.count("\n")
            found = f"a cell holds line breaks and separators as if rows were in it: lines {first} to {last}"
            return "rows in a cell", found
    for column, cell in zip(columns, cells, strict=True):
        if byte := _stray_byte(cell):
            return "not UTF-8", f"byte {byte:#04x} in column {column!r} is not UTF-8"
    return None


def _odd_count(cells: Sequence[str], columns: Sequence[str]) -> str:
    return f"{len(cells)} cells, and the header has {len(columns)}"


def _holds_rows(cell: str, place: int, last: int, separator: str) -> bool:
    """Whether every line of a cell, together with the cells around it, would be a row of its own.

    Prose has spaces after its commas; a text of two lines is too little evidence.
    """
    counts = [line.count(separator) for line in cell.split("\n")]
    expected = [last - place, *[last] * (len(counts) - 2), place]
    return len(counts) > 2 and last > 0 and f"{separator} " not in cell and counts == expected


def _lines(text: TextIOWrapper, name: str, separator: str) -> Iterator[_Line]:
    """Rows, without blank lines. After a fault, reading continues at the next line.

    Raises:
        DataError: the fault spans several lines, so that rows cannot be told apart.
    """
    csv.field_size_limit(MAX_ROW_BYTES)  # of the whole process; by default a document of 128 kB is refused
    bounded = _Bounded(text, name, separator)
    reader = csv.reader(bounded, delimiter=separator, strict=True)
    while True:
        first = bounded.first = reader.line_num + 1
        bounded.size = bounded.cells = 0
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            fault = f"a quote closes a cell on line {reader.line_num}, and the cell goes on"
            if "limit" in str(error):
                fault = f"a cell of more than {MOST}"
            elif str(error).startswith("unexpected end"):
                fault = "a quote that opens in this row is never closed"
            if reader.line_num > first:
                raise _swallowed(name, fault, first, reader.line_num) from error
            yield first, fault
        else:
            if cells:
                yield first, cells


class _Bounded:
    """Lines, up to the size of a row, so that a file that unpacks to gigabytes never fills the memory."""

    def __init__(self, text: TextIOWrapper, name: str, separator: str) -> None:
        self._text, self._name, self._separator = text, name, separator
        self.number = self.first = self.size = self.cells = 0

    def __iter__(self) -> Iterator[str]:
        while line := self._text.readline(MAX_ROW_BYTES - self.size + 1):
            self.number, self.size = self.number + 1, self.size + len(line)
            self.cells += line.count(self._separator)
            if self.size > MAX_ROW_BYTES or self.cells > _MAX_CELLS:
                raise self._refusal()
            yield line

    def _refusal(self) -> DataError:
        most = f"{MAX_ROW_BYTES // 2**20} MB" if self.size > MAX_ROW_BYTES else f"{_MAX_CELLS:,} separators"
        if self.number > self.first:
            return _swallowed(self._name, f"a cell of more than {most}", self.first, self.number)
        return DataError(
            f"{self._name}:{self.first}: a row of more than {most}; less is accepted; end rows with a line feed, or "
            "split it"
        )


def _swallowed(name: str, fault: str, first: int, last: int) -> DataError:
    return DataError(
        f"{name}:{first}: {fault}: lines {first} to {last} would be one row; {_QUOTES}; "
        f"close the quote that opens on line {first}, or double it"
    )


def _header(line: _Line | None, name: str, separator: str) -> tuple[str, ...]:
    if line is None:
        raise no_rows(name, ": only blank lines")
    columns = line[1]
    if isinstance(columns, str):
        raise DataError(f"{name}:{line[0]}: {columns}; a header of column names is accepted; correct it")
    others = [each for each in _SEPARATORS if each != separator and len(columns) == 1 and each in columns[0]]
    if others:
        raise DataError(
            f"{name}: its header, {columns[0]!r}, is separated by {_SEPARATORS[others[0]]}; {_SEPARATORS[separator]} "
            "are accepted; write it again with those (.csv: commas, .tsv: tabs)"
        )
    if len(columns) > _MAX_COLUMNS:
        most = f"at most {_MAX_COLUMNS:,} are accepted; keep those that hold the text"
        raise DataError(f"{name}: {len(columns):,} columns; {most}")
    for place, column in enumerate(columns):
        if _stray_byte(column):
            found = f"{name}: the name of column {place + 1} is not UTF-8; UTF-8 is accepted; "
            raise DataError(f"{found}convert the file: `iconv -f ENCODING -t UTF-8 FILE > NEW`")
        if column in columns[:place]:
            raise two_columns(name, column)
    return tuple(columns)


def _stray_byte(cell: str) -> int | None:
    """The first byte of a cell that is not UTF-8."""
    try:
        cell.encode()
    except UnicodeEncodeError as error:
        return ord(cell[error.start]) - 0xDC00
    return None
