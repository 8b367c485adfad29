"""What a format is: how its rows are known, and how one becomes a row of the kind that stages read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lineage.artifact import Kind

Fields = Mapping[str, object]
CanonicalRow = dict[str, object]  # the columns of its kind (``schema.py``), without ``row_id`` and without nulls


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
        mapping: column -> what it becomes, as the report shows it.
        recognize: why a row is of this format; None: it is not.
        convert: brings a row into the form of ``kind``; raises ``BadRowError`` naming what is wrong with it.
    """

    name: str
    kind: Kind
    mapping: Mapping[str, str]
    recognize: Callable[[Fields], Evidence | None]
    convert: Callable[[Fields], CanonicalRow]
