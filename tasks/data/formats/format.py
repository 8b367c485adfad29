"""What a format is: how its rows are known, and how one becomes a row of the kind that stages read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lineage.artifact import Kind

Fields = Mapping[str, object]
CanonicalRow = dict[str, object]  # the columns of its kind (``schema.py``), without ``row_id`` and without nulls

REST = "*"  # in a mapping: every column that it does not name


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Why a row is of a format.

    Args:
        columns: those that the format reads. A format that reads more of a row's columns explains it better.
        words: what was seen, such as ``conversations is a list of {from, value}``.
    """

    columns: frozenset[str]
    words: str


@dataclass(frozen=True, kw_only=True)
class Format:
    """One shape in which users bring rows.

    Args:
        name: what ``format=`` is set to.
        kind: what its rows become.
        mapping: column -> what it becomes, as the report shows it; all columns that the format reads.
        recognize: why a row is of this format; None: it is not. It looks at the shape alone: an empty answer is no
            reason to take a row for one of another format.
        convert: brings a row into the form of ``kind``; raises ``BadRowError`` naming what is wrong with it.
    """

    name: str
    kind: Kind
    mapping: Mapping[str, str]
    recognize: Callable[[Fields], Evidence | None]
    convert: Callable[[Fields], CanonicalRow]


def evidence(fields: Fields, mapping: Mapping[str, str], words: str) -> Evidence:
    """Evidence of a row that has what its format needs: the columns are those of the mapping that say something."""
    return Evidence(columns=frozenset(name for name in mapping if fields.get(name) not in (None, "", [])), words=words)
