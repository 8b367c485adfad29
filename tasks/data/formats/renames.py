"""Columns that rows have under other names: ``columns: {prompt: question}``, our name -> the rows' column."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from lineage.errors import ConfigError, DataError
from tasks.data.formats.bad_row import BadRowError
from tasks.data.formats.format import REST, Fields
from tasks.data.formats.known import FORMATS

# What formats read, and what says which rows are held out together.
KNOWN_NAMES = frozenset({"group", *(name for each in FORMATS for name in each.mapping if name != REST)})
_OTHER_WAY = "columns maps our name to the rows' column"


def rename(fields: Fields, columns: Mapping[str, str]) -> Fields:
    """A row under the names that formats know."""
    ours = {theirs: name for name, theirs in columns.items()}
    renamed = {ours.get(name, name): value for name, value in fields.items()}
    if len(renamed) < len(fields):
        twice = next(name for name, count in Counter(ours.get(name, name) for name in fields).items() if count > 1)
        raise BadRowError(
            f"columns makes two columns {twice!r} of this row", "one column of a name", "rename or remove one of them"
        )
    return renamed


def check_direction(field: str, columns: Mapping[str, str], format: str | None) -> None:
    """That a source maps our names to the rows' columns and not the other way round, as far as names tell.

    Args:
        field: the one that states it, such as ``sources.rows.columns``.
        format: that the source states.

    Raises:
        ConfigError: shows the mapping the other way round.
    """
    for ours, theirs in columns.items():
        # Prompts keep all columns for reward functions, which may have any name.
        if ours not in KNOWN_NAMES and theirs in KNOWN_NAMES and format != "prompts":
            raise ConfigError(
                f"{field}.{ours}={theirs}: {ours!r} is no name that a format knows; {_OTHER_WAY}; "
                f"state {_assigned(field, theirs, ours)} (or format=prompts, where the rows' column {theirs!r} is for "
                f"a reward function that calls it {ours!r})"
            )


def check_renames(sample: Sequence[Fields], place: str, columns: Mapping[str, str]) -> None:
    """Whether the renames fit a source.

    Raises:
        DataError: one names a column that the source lacks, or would put two columns in one place.
    """
    present = list(dict.fromkeys(str(name) for fields in sample for name in fields))
    for ours, theirs in columns.items():
        if theirs not in present:
            turned = _turned(ours, theirs, present)
            raise DataError(
                f"{place}: columns.{ours}={theirs}: {theirs!r} is no column; there are: {', '.join(present)}; "
                + (f"{_OTHER_WAY}: state {turned}" if turned else "name one of these")
            )
        if list(columns.values()).count(theirs) > 1:
            raise DataError(
                f"{place}: columns.{ours}={theirs}: the column {theirs!r} is named twice; one name for a column is "
                "accepted; remove the other"
            )
        if ours in present and ours not in columns.values():
            turned = _turned(ours, theirs, present) if theirs in KNOWN_NAMES and ours not in KNOWN_NAMES else None
            raise DataError(
                f"{place}: columns.{ours}={theirs}: there is a column {ours!r} already; one column of a name is "
                f"accepted; give the other one another name as well"
                + (f"; or, if it was meant so, {_OTHER_WAY}: state {turned}" if turned else "")
            )


def _turned(ours: str, theirs: str, present: Collection[str]) -> str | None:
    """The rename the other way round, where that fits the rows."""
    return _assigned("columns", theirs, ours) if ours in present else None


def _assigned(field: str, ours: str, theirs: str) -> str:
    text = f"{field}.{ours}={theirs}"
    return f'"{text}"' if set(text) & set(" '\"$&|;()<>*?") else text
