"""What readers return: rows and unusable places, in chunks that another process can parse; and slices of splits."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from lineage.errors import ConfigError, DataError
from lineage.source.text_split import SplitBy

BLOCK_BYTES = 2**20  # that are read at once
MAX_ROW_BYTES = 64 * 2**20  # about ten million tokens; a longer line is a file without line ends
MOST = f"{MAX_ROW_BYTES // 2**20} MB"
_SHOWN_BYTES = 200  # of an unusable place, in messages


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row as it is in the user's data.

    Args:
        where: ``file:line`` or ``dataset[index]``, for messages.
    """

    fields: Mapping[str, object]
    where: str


@dataclass(frozen=True)
class Unread:
    """A value of a column whose type has no form in JSON.

    Args:
        type: name of the type.
    """

    type: str


@dataclass(frozen=True, kw_only=True)
class Broken:
    """A place where a row was expected but there is none, or one that cannot be used.

    Args:
        found: what is wrong.
        reason: a few words that such places are counted by, such as ``not JSON``.
        raw: the beginning of what was found.
    """

    where: str
    found: str
    reason: str
    raw: str = ""
    accepted: str = "one JSON object per row, in UTF-8"
    remedy: str = "correct or remove the row"

    @property
    def problem(self) -> str:
        """What was found; what is accepted; the remedy."""
        return f"{self.found}; accepted: {self.accepted}; {self.remedy}"


Rows = Iterator[Row | Broken]


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Some consecutive rows of a source, not yet parsed. Can be pickled.

    Args:
        rows: parses the rows: a ``partial`` of a module's function.
        split_by: the unit of plain text that is a row.
    """

    rows: Callable[[], Rows]
    split_by: SplitBy | None = None


def parsed(*entries: Row | Broken, split_by: SplitBy | None = None) -> Chunk:
    """A chunk of rows that the reader's library has already parsed."""
    return Chunk(rows=partial(iter, entries), split_by=split_by)


def shown(raw: bytes) -> str:
    """The beginning of an unusable place, as far as it is text."""
    return raw[:_SHOWN_BYTES].decode(errors="replace")


def refused(where: str, found: str, accepted: str, remedy: str = "correct it") -> DataError:
    """The error for a whole file or directory, in the form of a ``Broken``."""
    return DataError(f"{where}: {found}; accepted: {accepted}; {remedy}")


def no_split(name: str, split: str, splits: Mapping[str, object]) -> ConfigError:
    """The error for a directory that has only other splits."""
    return ConfigError(f"{name}: no split {split!r} in it; accepted: {', '.join(splits)}; set split to one of them")


_SPLIT = re.compile(r"([\w.-]+)(?:\[(-?\d+%?)?:(-?\d+%?)?\])?")
_PARTS = "a split, or a part of one in rows or percent, such as train[:1000], train[90%:] or train[-100:]"


@dataclass(frozen=True, kw_only=True)
class Slice:
    """A part of some rows, as ``datasets`` understands it: percent are rounded to the nearest row.

    Args:
        text: as the user wrote it, for messages.
        start, stop: rows, or percent such as ``90%``; negative: from the end.
    """

    text: str
    start: str
    stop: str

    @property
    def last(self) -> int | None:
        """How many rows from the beginning contain the slice; None: this depends on the number of rows."""
        return int(self.stop) if self.start.isdecimal() and self.stop.isdecimal() else None

    def bounds(self, count: int) -> tuple[int, int]:
        """Indices of the first row and of the one after the last, in a split of ``count`` rows.

        Raises:
            DataError: the slice is empty.
        """
        start, stop = _index(self.start, count), _index(self.stop, count)
        if start >= stop:
            raise DataError(f"split={self.text!r} of {count} rows has no row; set a part that has at least one row")
        return start, stop


def parse_split(text: str) -> tuple[str, Slice | None]:
    """The name of a split, and the slice of it.

    Raises:
        ConfigError: it is neither.
    """
    found = _SPLIT.fullmatch(text)
    if not found or any(bound and bound.endswith("%") and abs(int(bound[:-1])) > 100 for bound in found.groups()[1:]):
        raise ConfigError(f"split={text!r}: {_PARTS} is accepted")
    name, start, stop = found.groups()
    return name, Slice(text=text, start=start or "0", stop=stop or "100%") if text != name else None


def _index(bound: str, count: int) -> int:
    place = round(int(bound[:-1]) * count / 100) if bound.endswith("%") else int(bound)
    return min(max(place + count if bound.startswith("-") else place, 0), count)
