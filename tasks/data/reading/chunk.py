"""What readers hand on: pieces of a source that another process can take apart into rows."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol


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
        problem: what was found; what is accepted; how to mend it.
        reason: a few words to count by, such as ``not JSON``.
        raw: the beginning of what was found.
    """

    where: str
    problem: str
    reason: str
    raw: str


class Chunk(Protocol):
    """Some consecutive rows of a source, not yet parsed. Can be pickled."""

    def rows(self) -> Iterator[Row | Broken]: ...


@dataclass(frozen=True, kw_only=True)
class ParsedChunk:
    """Rows that came as such, from a reader whose library parses them."""

    entries: tuple[Row | Broken, ...]

    def rows(self) -> Iterator[Row | Broken]:
        yield from self.entries
