"""``train[90%:]``: the split that a source names, and the part of its rows."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from lineage.errors import ConfigError, DataError

_SPLIT = re.compile(r"([\w.-]+)(?:\[(-?\d+%?)?:(-?\d+%?)?\])?")
_ACCEPTED = "a split, or a part of one in rows or percent, such as train[:1000], train[90%:] or train[-100:]"


@dataclass(frozen=True, kw_only=True)
class Slice:
    """A part of some rows, as ``datasets`` understands it: percent are rounded to the nearest row.

    Args:
        text: as the user wrote it, for messages.
        start, stop: rows, or percent such as ``90%``; negative: from the end; None: the beginning, the end.
    """

    text: str
    start: str | None
    stop: str | None

    @property
    def last(self) -> int | None:
        """How many rows from the beginning hold the slice; None: that depends on how many there are."""
        bounds = (self.start or "0", self.stop)
        if any(bound is None or bound.startswith("-") or bound.endswith("%") for bound in bounds):
            return None
        return int(str(self.stop))

    def bounds(self, count: int) -> tuple[int, int]:
        """Indices of the first row and of the one after the last, of so many rows.

        Raises:
            DataError: it leaves none.
        """
        start, stop = _index(self.start or "0", count), _index(self.stop or "100%", count)
        if start >= stop:
            raise DataError(f"split={self.text!r} of {count} rows leaves none; give a part that has at least one row")
        return start, stop


def parse_split(text: str) -> tuple[str, Slice | None]:
    """The name of a split and the part of it.

    Raises:
        ConfigError: it is neither.
    """
    found = _SPLIT.fullmatch(text)
    if not found:
        raise ConfigError(f"split={text!r}: {_ACCEPTED} is accepted; write it so")
    name, start, stop = found.groups()
    for bound in (start, stop):
        if bound and bound.endswith("%") and abs(int(bound[:-1])) > 100:
            raise ConfigError(f"split={text!r}: {bound} is more than all rows; {_ACCEPTED} is accepted; write it so")
    part = Slice(text=text, start=start, stop=stop) if text != name else None
    return name, part


def _index(bound: str, count: int) -> int:
    place = round(int(bound[:-1]) * count / 100) if bound.endswith("%") else int(bound)
    return min(max(place + count if bound.startswith("-") else place, 0), count)


def no_split(name: str, split: str, splits: Iterable[str]) -> ConfigError:
    """Of a directory that has other splits."""
    return ConfigError(f"{name}: no split {split!r} in it; it has {', '.join(splits)}; set split to one of them")
