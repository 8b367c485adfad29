"""CSV and TSV with a header: each cell is a string, which may be empty."""

import csv
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from io import TextIOWrapper
from pathlib import Path

from lineage.errors import DataError
from tasks.data.reading.chunk import (
    BLOCK_BYTES,
    ENCODED,
    MAX_ROW_BYTES,
    MOST,
    Broken,
    Chunk,
    Row,
    Rows,
    opened,
    refused,
    shown,
)

_SEPARATORS = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "bars"}
_MAX_ROWS = 10_000  # per chunk
_MAX_COLUMNS = 10_000
_MAX_CELLS = 1_000_000  # of one line
_ACCEPTED = (
    "one cell in UTF-8 per column; a cell that holds a quote stands in quotes, and doubles it, and one that holds a "
    "separator or a line break stands in quotes"
)

_CODED, _CELLS = "not UTF-8", "number of cells"
_Line = tuple[int, Sequence[str] | str]
"""The number of a row's first line, with its cells or with the fault in its quotes."""


def read_csv(path: Path, name: str, separator: str = ",") -> Iterator[Chunk]:
    """Cells between separators."""
    with opened(path, name) as stream:
        # Bytes that are not UTF-8 are kept as half surrogates, which UTF-8 never yields, until their row is known.
        text = TextIOWrapper(stream, encoding="utf-8", errors="surrogateescape", newline="")
        lines = _lines(text, name, separator)
        if (header := next(lines, None)) is None:
            return
        columns, pending, size = _header(header, name, separator), list[_Line](), 0
        for number, cells in lines:
            if len(cells) != len(columns) and (breaks := "".join(cells).count("\n")):
                raise _swallowed(name, _odd_count(cells, columns), number, number + breaks)
            pending.append((number, cells))
            size += sum(map(len, cells))
            if size >= BLOCK_BYTES or len(pending) == _MAX_ROWS:
                yield Chunk(rows=partial(_rows, name, columns, separator, pending))
                pending, size = [], 0
        if pending:
            yield Chunk(rows=partial(_rows, name, columns, separator, pending))


def _rows(name: str, columns: Sequence[str], separator: str, lines: Sequence[_Line]) -> Rows:
    for number, cells in lines:
        where = f"{name}:{number}"
        reason, found = _fault(number, cells, columns, separator)
        if reason:
            raw = "" if isinstance(cells, str) else shown(separator.join(cells).encode(errors="surrogateescape"))
            in_quotes = f"put a cell with {_SEPARATORS.get(separator, 'separators')} in it in quotes"
            own = {
                _CODED: {"accepted": "UTF-8", "remedy": f"{ENCODED}, or correct the row"},
                _CELLS: {"accepted": "one cell per column", "remedy": f"{in_quotes}, or correct the row"},
            }
            yield Broken(
                where=where, reason=reason, found=found, raw=raw, **{"accepted": _ACCEPTED, **own.get(reason, {})}
            )
        else:
            yield Row(fields=dict(zip(columns, cells, strict=True)), where=where)


def _fault(number: int, cells: Sequence[str] | str, columns: Sequence[str], separator: str) -> tuple[str, str]:
    """The reason why a row is unusable, and what was found; both empty: it is usable."""
    if isinstance(cells, str):
        return "quotes", cells
    if len(cells) != len(columns):
        return _CELLS, _odd_count(cells, columns)
    for place, cell in enumerate(cells):
        if "\n" in cell and _holds_rows(cell, place, len(columns) - 1, separator):
            first = number + sum(each.count("\n") for each in cells[:place])
            last = first + cell.count("\n")
            found = f"a cell holds line breaks and separators as if rows were in it: lines {first} to {last}"
            return "rows in a cell", found
    try:
        "".join(cells).encode()
    except UnicodeEncodeError as error:
        return _CODED, f"byte {ord(error.object[error.start]) - 0xDC00:#04x} is not UTF-8"
    return "", ""


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
        DataError: a line is too long, or a fault spans several lines, so that rows cannot be separated.
    """
    csv.field_size_limit(MAX_ROW_BYTES)  # of the whole process; by default a document of 128 kB is refused
    reader = csv.reader(_bounded(text, name, separator), delimiter=separator, strict=True)
    while True:
        first = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            fault = f"the quotes of a cell do not fit ({error})"
            if reader.line_num > first:
                raise _swallowed(name, fault, first, reader.line_num) from error
            yield first, fault
        else:
            if cells:
                yield first, cells


def _bounded(text: TextIOWrapper, name: str, separator: str) -> Iterator[str]:
    """Lines up to the size of a row, so that a file that unpacks to gigabytes never fills the memory."""
    number = 1
    while line := text.readline(MAX_ROW_BYTES + 1):
        if len(line) > MAX_ROW_BYTES or line.count(separator) > _MAX_CELLS:
            found = f"a line of more than {MOST}, or of more than {_MAX_CELLS:,} cells"
            raise refused(f"{name}:{number}", found, "shorter lines", "end rows with a line feed, or split it")
        yield line
        number += 1


def _swallowed(name: str, fault: str, first: int, last: int) -> DataError:
    found = f"{fault}: lines {first} to {last} would be one row"
    return refused(f"{name}:{first}", found, _ACCEPTED, f"close the quote that opens on line {first}, or double it")


def _header(line: _Line, name: str, separator: str) -> tuple[str, ...]:
    number, columns = line
    found = columns if isinstance(columns, str) else ""
    others = [each for each in _SEPARATORS if each != separator and len(columns) == 1 and each in columns[0]]
    if len(columns) > _MAX_COLUMNS and not found:
        found = f"more than {_MAX_COLUMNS:,} columns"
    elif others:
        found = f"its header, {columns[0]!r}, is separated by {_SEPARATORS[others[0]]}"
    elif len(set(columns)) < len(columns) and not found:
        found = f"two columns are named {Counter(columns).most_common(1)[0][0]!r}"
    elif any("\udc80" <= each <= "\udcff" for each in "".join(columns)):
        found = "the name of a column is not UTF-8"
    if found:
        between = _SEPARATORS.get(separator, repr(separator))
        accepted = f"a header of column names in UTF-8, each once, with {between} between them"
        remedy = ENCODED if found.endswith(_CODED) else "correct it"
        remedy += f", or set loader.sep='{others[0]}' on the source" if others else ""
        raise refused(f"{name}:{number}", found, accepted, remedy.replace("\t", "\\t"))
    return tuple(columns)
