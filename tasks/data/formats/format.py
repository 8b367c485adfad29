"""What a format is: how its rows are known, and how one becomes a row of the kind that stages read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from lineage.artifact import Kind

Fields = Mapping[str, object]
CanonicalRow = dict[str, object]  # the columns of its kind (``schema.py``), without ``row_id`` and without nulls

REST = "*"  # in a mapping: every column that it does not name
JUDGED = frozenset({"label", "chosen", "rejected"})  # what says which answers are wanted


@dataclass(frozen=True, kw_only=True)
class Format:
    """One shape in which users bring rows.

    Args:
        name: what ``format=`` is set to.
        kind: what its rows become.
        mapping: column -> what it becomes, as the report shows it; all columns that the format reads.
        recognize: the columns that make a row one of this format; none: it is not. It looks at their names alone: a bad
            value is a bad row, and no reason to take the row for one of another format. Transcripts alone are known by
            what they say; more than names, it makes them the better explanation.
        convert: brings a row into the form of ``kind``; raises ``BadRowError`` naming what is wrong with it.
        losing: columns that it does not read and that change what a row teaches: a row that has one is of this format
            only where the user says so.
    """

    name: str
    kind: Kind
    mapping: Mapping[str, str]
    recognize: Callable[[Fields], tuple[str, ...]]
    convert: Callable[[Fields], CanonicalRow]
    losing: frozenset[str] = frozenset()

    def lost(self, fields: Fields) -> list[str]:
        """The columns of a row that would be lost."""
        return [] if self.losing.isdisjoint(fields) else sorted(self.losing & fields.keys())


def having(*needed: str | tuple[str, ...]) -> Callable[[Fields], tuple[str, ...]]:
    """Recognizes rows that have each of some columns; one with several names under any of them."""
    return partial(_found, [(names,) if isinstance(names, str) else names for names in needed])


def _found(needed: Sequence[tuple[str, ...]], fields: Fields) -> tuple[str, ...]:
    found = [next((name for name in names if name in fields), None) for names in needed]
    return tuple(name for name in found if name is not None) if None not in found else ()
