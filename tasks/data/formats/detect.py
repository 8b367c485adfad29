"""Tells the format of a source from its first rows, says why, and refuses where two would do."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from itertools import combinations

from lineage.errors import ConfigError, DataError
from tasks.data.formats.detected import Detected
from tasks.data.formats.fit import Fit, Sample
from tasks.data.formats.format import Fields, Format
from tasks.data.formats.known import BY_NAME, FORMATS
from tasks.data.formats.renames import check_renames, rename

_NEAR = 3  # formats of which it is said why they do not fit


def detect(
    sample: Sequence[Fields], place: str, *, columns: Mapping[str, str] | None = None, stated: str | None = None
) -> Detected:
    """The format of a source.

    Args:
        sample: its first rows.
        place: its path, for messages.
        columns: our names -> the columns of the user that hold them.
        stated: the name of the format, where the user says it.

    Raises:
        ConfigError: there is no format of the stated name.
        DataError: no format fits, or several do that explain the columns as well; both name the candidates. Or a rename
            does not fit the columns.
    """
    known = [_stated(stated)] if stated else FORMATS
    if not sample:
        raise DataError(f'{place}: no rows; give at least one row, such as a line {{"text": "..."}}')
    check_renames(sample, place, columns or {})
    seen = Sample.of([rename(fields, columns or {}) for fields in sample])
    fits = [Fit.of(each, seen, stated=stated is not None) for each in known]
    needed = 1 if stated else len(sample) / 2  # bad rows among good ones do not hide the format
    fitting = _best(fits, needed)
    if not fitting:
        raise DataError(f"{place}: {_misfit(fits, seen)}")
    if len(fitting) > 1:
        raise DataError(f"{place}: {_undecided(fitting)}")
    best = fitting[0]
    return Detected(
        name=best.format.name, columns=columns or {}, stated=stated is not None,
        seen=best.columns | (best.format.mapping.keys() & seen.columns),
        evidence=f"{best.words}: {len(best.rows)} of {len(sample)} rows looked at",
    )  # fmt: skip


def _stated(name: str) -> Format:
    if name not in BY_NAME:
        nearest = get_close_matches(name, BY_NAME, n=1, cutoff=0.0)[0]
        raise ConfigError(f"format={name}: no such format; accepted: {', '.join(BY_NAME)}; did you mean {nearest}?")
    return BY_NAME[name]


def _best(fits: Sequence[Fit], needed: float) -> list[Fit]:
    """Of the formats that fit enough rows, those that no other explains better: by the same columns and more.

    One that explains only a few rows better stands beside them: they say something that would be lost.
    """
    enough = [each for each in fits if len(each.rows) >= needed]
    best = [each for each in enough if not any(each.columns < other.columns for other in enough)]
    rare = [each for each in fits if each.rows and each not in enough]
    return best + [each for each in rare if any(other.columns < each.columns for other in best)]


def _undecided(fits: Sequence[Fit]) -> str:
    which = "format=NAME (sources.NAME.format=...)"
    number = "two" if len(fits) == 2 else str(len(fits))
    if any(one.rows.isdisjoint(other.rows) for one, other in combinations(fits, 2)):
        listed = ", ".join(
            f"{each.format.name} ({each.words}: {len(each.rows)} rows from row {min(each.rows) + 1} on)"
            for each in sorted(fits, key=lambda each: min(each.rows))
        )
        return (
            f"its rows are of {number} formats: {listed}; rows of one format are accepted; "
            f"make a source of each, or say with {which} as what all are read"
        )
    listed = ", ".join(f"{each.format.name} ({each.words})" for each in fits)
    return f"{number} formats fit: {listed}; say which with {which}"


def _misfit(fits: Sequence[Fit], sample: Sample) -> str:
    """Why none of some formats fits: what those that come nearest miss in the first row that is not of them."""
    columns = list(dict.fromkeys(str(name) for fields in sample.rows for name in fields))
    listed = ", ".join(columns) or "none"
    near = [each for each in fits if each.rows or each.format.mapping.keys() & set(columns) or len(fits) == 1]
    near.sort(key=lambda each: (-len(each.rows), -len(each.format.mapping.keys() & set(columns))))
    problems = "; ".join(f"{each.format.name}: {each.problem(sample)}" for each in near[:_NEAR])
    way = _way(sample, columns)
    if len(fits) == 1:
        return f"not of format={fits[0].format.name} ({problems}); columns found: {listed}; give its columns, or {way}"
    return (
        f"no format fits the columns {listed}{problems and f' ({problems})'}; "
        f"accepted: {', '.join(BY_NAME)}; {way}, or say which format is meant with format=NAME"
    )


def _way(sample: Sample, columns: Sequence[str]) -> str:
    if not sample.columns and columns:
        return "fill them: they are null in all rows looked at"
    if len(columns) == 1 and any(isinstance(fields[columns[0]], str) for fields in sample.rows if fields):
        return f"name it: columns={{text: {columns[0]}}}"
    return "name columns, such as columns={prompt: question}"
