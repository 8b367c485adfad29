"""Columns that the user gives other names: ``columns: {question: prompt}``."""

from collections import Counter
from collections.abc import Mapping, Sequence

from lineage.errors import DataError
from tasks.data.formats.bad_row import BadRowError
from tasks.data.formats.format import Fields


def rename(fields: Fields, columns: Mapping[str, str]) -> Fields:
    """A row under the names that formats know."""
    renamed = {columns.get(name, name): value for name, value in fields.items()}
    if len(renamed) < len(fields):
        twice = next(name for name, count in Counter(columns.get(name, name) for name in fields).items() if count > 1)
        raise BadRowError(
            f"columns makes two columns {twice!r} of this row", "one column of a name", "rename or remove one of them"
        )
    return renamed


def check_renames(sample: Sequence[Fields], place: str, columns: Mapping[str, str]) -> None:
    """Whether the renames fit a source.

    Raises:
        DataError: one names a column that the source lacks, or would put two columns in one place.
    """
    present = list(dict.fromkeys(str(name) for fields in sample for name in fields))
    for old, new in columns.items():
        if old not in present:
            raise DataError(
                f"{place}: columns renames {old!r}, which is no column; "
                f"there are: {', '.join(present)}; name one of these"
            )
        if (new in present and new not in columns) or list(columns.values()).count(new) > 1:
            raise DataError(
                f"{place}: columns renames {old!r} to {new!r}, and there is such a column already; "
                f"one column of a name is accepted; give the other one another name as well"
            )
