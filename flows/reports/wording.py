"""Formatting of numbers, names and messages for people.

Control characters, as in file names, are escaped: they could move a terminal's cursor or hide text.
"""

import logging
import os
import re
import unicodedata
from pathlib import Path

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


def relative(path: Path) -> str:
    """A path below the current folder without that folder; any other as it is."""
    here = os.getcwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def counted(number: int, what: str) -> str:
    """``1 CPU``, ``2 CPUs``"""
    return f"{number} {what}{'' if number == 1 else 's'}"


def printable(line: str) -> str:
    """A line with invisible characters escaped and secrets of URLs removed."""
    line = redacted(line)
    if line.isprintable():
        return line
    shown = (char.isprintable() or unicodedata.category(char) == "Zs" for char in line)
    return "".join(char if visible else ascii(char)[1:-1] for char, visible in zip(line, shown, strict=True))


def printable_text(text: str) -> str:
    """``printable`` for several lines, without colour codes."""
    return "\n".join(map(printable, _COLOURS.sub("", text).expandtabs().split("\n")))


class PrintableFormatter(logging.Formatter):
    """Formats log records as printable text."""

    def format(self, record: logging.LogRecord) -> str:
        return printable_text(super().format(record))
