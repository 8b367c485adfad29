"""What readers hand on: pieces of a source that another process can take apart into rows."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

_OBJECT = "one JSON object per row"
_ICONV = "convert the file: `iconv -f ENCODING -t UTF-8 FILE > NEW`, or correct the row"
_REFUSALS = {  # by reason: what is accepted, and the remedy
    "not JSON": (_OBJECT, "correct or remove it"),
    "not an object": (_OBJECT, "correct or remove it"),
    "nested too deep": (_OBJECT, "correct or remove it"),
    "number too large": (_OBJECT, "write it as text, in quotes"),
    "cut short": ("the whole row or file", "write or download it again, or remove the row"),
    "line too long": ("one row per line", "end the lines with a line feed, or split the row"),
    "not UTF-8": ("UTF-8", _ICONV),
    "not readable": ("text in UTF-8 and times of our calendar", "correct or remove the row"),
    "number of cells": (
        "one cell per column", "put a cell that holds the separator or a line break in quotes, or correct the row"
    ),
    "quotes": ("a cell that holds a quote stands in quotes, and doubles it", "correct or remove the row"),
    "rows in a cell": ("one row per line, or text in quotes", "close the quote, or double those of the text"),
    "not a mapping": ("a function that yields mappings of column names to values", "yield a dict"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row as the user has it.

    Args:
        where: ``file:line`` or ``dataset[index]``, for messages.
    """

    fields: Mapping[str, object]
    where: str


@dataclass(frozen=True, kw_only=True)
class Broken:
    """A place where a row should be and is none: half a line, bytes that are no text, a table's odd cell.

    Args:
        found: what is wrong.
        reason: a few words to count by, such as ``not JSON``; what is accepted and the remedy follow from it.
        raw: the beginning of what was found.
        remedy: a closer one.
    """

    where: str
    found: str
    reason: str
    raw: str
    remedy: str = ""

    @property
    def problem(self) -> str:
        """What was found; what is accepted; the remedy."""
        accepted, remedy = _REFUSALS[self.reason]
        return f"{self.found}; accepted: {accepted}; {self.remedy or remedy}"


class Chunk(Protocol):
    """Some consecutive rows of a source, not yet parsed. Can be pickled."""

    def rows(self) -> Iterator[Row | Broken]: ...


@dataclass(frozen=True, kw_only=True)
class ParsedChunk:
    """Rows that came as such, from a reader whose library parses them."""

    entries: tuple[Row | Broken, ...]

    def rows(self) -> Iterator[Row | Broken]:
        yield from self.entries
