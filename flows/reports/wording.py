"""Formatting of numbers, names, tables and messages for people.

Control characters, as in file names, are escaped: they could move a terminal's cursor or hide text.
"""

import logging
import os
import re
import unicodedata
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import TextIO

from lineage.secrets import redacted

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def clock(seconds: float) -> str:
    """``0:21``, ``12:05``, ``3:04:05``"""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def gib(num_bytes: int) -> str:
    """``1.50 GiB``"""
    return f"{num_bytes / 2**30:.2f} GiB"


def relative(text: str | Path) -> str:
    """A path, or a text with paths: those below the current folder without that folder, all others as they are."""
    try:
        here = re.escape(os.getcwd().rstrip("/"))
    except FileNotFoundError:  # another process has deleted it
        return str(text)
    return re.sub(rf"(?<![\w./~-]){here}/(?=[^\s/])", "", str(text)) if here else str(text)


def counted(number: int, what: str) -> str:
    """``1 CPU``, ``2 CPUs``"""
    return f"{number} {what}{'' if number == 1 else 's'}"


def printable(line: str) -> str:
    """A line with invisible characters escaped, secrets of URLs removed, and relative paths."""
    line = relative(redacted(line))
    if line.isprintable():
        return line
    shown = (char.isprintable() or unicodedata.category(char) == "Zs" for char in line)
    return "".join(char if visible else ascii(char)[1:-1] for char, visible in zip(line, shown, strict=True))


def printable_text(text: str) -> str:
    """``printable`` for several lines, without colour codes."""
    return "\n".join(map(printable, _COLOURS.sub("", text).expandtabs().split("\n")))


_RED, _GREEN, _YELLOW, _BLUE = 31, 32, 33, 36
_PATTERNS = (  # what stands out on a screen, after what is before it; and its colour
    (re.compile(r"^(\S+ +)(reuse)(?=  )", re.MULTILINE), _GREEN),
    (re.compile(r"^(\S+ +)(resume)(?=  )", re.MULTILINE), _YELLOW),
    (re.compile(r"^(\S+ +)(run)(?=  )", re.MULTILINE), _BLUE),
    (re.compile(r"^()(advice:|diagnose \S+:)", re.MULTILINE), _YELLOW),
    (re.compile(r"(  )(\(right\))$", re.MULTILINE), _GREEN),
    (re.compile(r"^()(posttrain:)(?= )"), _RED),
)


def coloured(text: str, stream: TextIO) -> str:
    """The text with states, warnings and errors in colour, where a terminal shows it and NO_COLOR is not set."""
    if not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    for pattern, colour in _PATTERNS:
        text = pattern.sub(rf"\1\033[{colour}m\2\033[0m", text)
    return text


class PrintableFormatter(logging.Formatter):
    """Formats log records as printable text."""

    def format(self, record: logging.LogRecord) -> str:
        return printable_text(super().format(record))


@dataclass
class Table:
    """A table of text cells."""

    columns: tuple[str, ...]
    numbers: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)

    def add_row(self, *cells: str) -> None:
        """Adds a row; cells may have several lines."""
        lines = zip_longest(*(cell.splitlines() for cell in cells), fillvalue="")
        self.rows += list(lines) or [("",) * len(cells)]


def empty_table(*columns: str, numbers: tuple[str, ...] = ()) -> Table:
    """A table without rows; the columns of ``numbers`` are right-aligned."""
    return Table(columns=columns, numbers=numbers)


def plain_text(table: Table) -> str:
    """The table with columns two spaces apart."""
    rows = [table.columns, *(tuple(map(relative, row)) for row in table.rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = [str.rjust if name in table.numbers else str.ljust for name in table.columns]
    return "\n".join(
        "  ".join(align(cell, width) for align, cell, width in zip(aligned, row, widths, strict=True)).rstrip()
        for row in rows
    )
