"""Formatting of numbers, names, tables and messages for people.

Control characters, as in file names, are escaped: they could move a terminal's cursor or hide text.
"""

import contextlib
import json
import logging
import os
import re
import sys
import unicodedata
from collections.abc import Iterator, Sequence
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


def spelled(value: object) -> str:
    """A value as an override has it."""
    return value if isinstance(value, str) else json.dumps(value)


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


_LEAST_COLUMNS = 40  # below which nothing is laid out
_QUOTED = r"(?<![^\s=(])'[^'\n]*'"
_WORDS = re.compile(rf"(?:{_QUOTED}|\S)+")
_COMMAND = re.compile(rf"(?<!\S)posttrain [a-z][\w-]*(?: (?:{_QUOTED}|[^\s;'()]*[^\s;,'()])+)*[;,.)]*")
_INSTALL = rf"(?<!\S)pip install(?: -\S+)* (?:{_QUOTED}|\S)+"
_UNBROKEN = re.compile(f"{_COMMAND.pattern}|{_INSTALL}|{_WORDS.pattern}")
_BRANCH = re.compile("(?: *[│├└]─?)+ *")
_LABEL = re.compile(r"\s*\S+(?: \S+)*? {2,}")  # name  text


def screen_cells(text: str) -> int:
    """Columns of a screen that a text takes: two for an East Asian letter, none for a mark on the letter before."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(letter) in "WF" for letter in text)
    return len(text) + wide - sum(unicodedata.category(letter) in ("Mn", "Me", "Cf") for letter in text)


def padded(text: str, cells: int, *, right: bool = False) -> str:
    """A text with spaces after it, or before it, so that it takes so many columns of a screen."""
    spaces = " " * (cells - screen_cells(text))
    return spaces + text if right else text + spaces


def screen_width() -> int:
    """Columns of the screen, which COLUMNS may set; 0: other programs read the output, and lines stay whole."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal():
        return int(columns)
    with contextlib.suppress(OSError, ValueError):  # closed, or no terminal
        return os.get_terminal_size(sys.stdout.fileno()).columns
    return 0


def on_screen(text: str) -> str:
    """Printable text with lines wrapped to the screen: indented, and within a command after a backslash."""
    text, width = printable_text(text), screen_width()
    if width < _LEAST_COLUMNS:
        return text
    return "\n".join(part for line in text.split("\n") for part in _folded(line, width))


def _folded(line: str, width: int, hang: int | None = None) -> list[str]:
    """A line as lines of a width; a word that is longer, and a command that is not, stay whole to be copied.

    Args:
        hang: indentation from the second line on; None: below the text after a label, or two more than the line's own.
    """
    if screen_cells(line) <= width:
        return [line]
    if branch := _BRANCH.match(line):  # the lines of a tree go on beside its branches
        below = branch[0].replace("├─", "│ ").replace("└─", "  ")
        first, *more = _folded(line[branch.end() :], width - branch.end())
        return [branch[0] + first, *(below + each for each in more)]
    if hang is None:
        label = _LABEL.match(line)
        hang = label.end() if label and label.end() <= width // 2 else len(line) - len(line.lstrip()) + 2
    lines, now, end = list[str](), "", 0
    for chunk in _UNBROKEN.finditer(line):
        is_long = screen_cells(chunk[0]) > width - hang and bool(_COMMAND.fullmatch(chunk[0]))
        for word in _WORDS.finditer(line, *chunk.span()) if is_long else (chunk,):
            if now.strip() and screen_cells(now + line[end : word.end()]) > width - 2 * is_long:
                lines.append(now + " \\" * (word.start() > chunk.start()))
                now, end = " " * hang, word.start()
            now, end = now + line[end : word.end()], word.end()
    return [*lines, now]


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


class ScreenFormatter(logging.Formatter):
    """Formats log records as lines of the screen."""

    def format(self, record: logging.LogRecord) -> str:
        return on_screen(super().format(record))


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


def plain_text(table: Table, unseen: int = 0) -> str:
    """The table with columns two spaces apart; on a screen the widest columns of text are folded until it fits.

    Args:
        unseen: the width without a screen; 0: lines stay whole.
    """
    rows = [table.columns, *(tuple(map(relative, row)) for row in table.rows)]
    widths = [max(map(screen_cells, column)) for column in zip(*rows, strict=True)]
    room = (screen_width() or unseen) - 2 * (len(widths) - 1)
    if room >= _LEAST_COLUMNS and sum(widths) > room:
        widths = _narrowed(widths, rows, room)
        rows = [row for each in rows for row in _folded_row(each, widths)]
    rights = [name in table.numbers for name in table.columns]
    return "\n".join(
        "  ".join(
            padded(cell, width, right=right) for cell, width, right in zip(row, widths, rights, strict=True)
        ).rstrip()
        for row in rows
    )


def _narrowed(widths: list[int], rows: Sequence[Sequence[str]], room: int) -> list[int]:
    """Widths that fit, none below its longest word: the widest gives first."""
    words = [[screen_cells(word) for row in rows for word in row[at].split()] for at in range(len(widths))]
    least = [max(each, default=0) for each in words]
    while sum(widths) > room and (wide := [at for at, width in enumerate(widths) if width > least[at]]):
        widths[max(wide, key=widths.__getitem__)] -= 1
    return widths


def _folded_row(row: Sequence[str], widths: Sequence[int]) -> Iterator[tuple[str, ...]]:
    cells = [_folded(cell, width, 0) for cell, width in zip(row, widths, strict=True)]
    return zip_longest(*cells, fillvalue="")
