"""Tells the format of a source from its first rows, says why, and refuses where two would do."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from lineage.errors import ConfigError, DataError
from tasks.data.formats.bad_row import BadRowError
from tasks.data.formats.detected import Detected
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
        columns: renames of the user.
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
    renamed = [rename(fields, columns or {}) for fields in sample]
    needed = 1 if stated else len(sample) / 2  # bad rows among good ones do not hide the format
    fits = [_Fit.of(each, renamed) for each in known]
    fitting = _best([each for each in fits if each.count >= needed])
    if not fitting:
        raise DataError(f"{place}: {_misfit(fits, renamed)}")
    if len(fitting) > 1:
        listed = ", ".join(f"{each.format.name} ({each.words})" for each in fitting)
        number = "two" if len(fitting) == 2 else str(len(fitting))
        raise DataError(
            f"{place}: {number} formats fit: {listed}; say which with format=NAME (sources.NAME.format=...)"
        )
    best = fitting[0]
    return Detected(
        name=best.format.name, columns=columns or {}, seen=best.columns,
        evidence=f"{best.words}: {best.count} of {len(sample)} rows looked at",
    )  # fmt: skip


def _stated(name: str) -> Format:
    if name not in BY_NAME:
        nearest = get_close_matches(name, BY_NAME, n=1, cutoff=0.0)[0]
        raise ConfigError(f"format={name}: no such format; accepted: {', '.join(BY_NAME)}; did you mean {nearest}?")
    return BY_NAME[name]


@dataclass(frozen=True, kw_only=True)
class _Fit:
    """How well a format explains a sample: the rows that are of it, and the columns that it reads of them."""

    format: Format
    count: int
    columns: frozenset[str]
    words: str

    @staticmethod
    def of(format: Format, sample: Sequence[Fields]) -> "_Fit":
        found = [evidence for fields in sample if (evidence := format.recognize(fields))]
        words = Counter(evidence.words for evidence in found).most_common(1)
        return _Fit(
            format=format, count=len(found), words=words[0][0] if words else "",
            columns=frozenset().union(*(evidence.columns for evidence in found)),
        )  # fmt: skip

    def problem(self, sample: Sequence[Fields]) -> str:
        """What is wrong with the first row that is not of the format."""
        other = next(fields for fields in sample if not self.format.recognize(fields))
        try:
            self.format.convert(other)
        except BadRowError as error:
            return error.found
        return "its columns are of other types"


def _best(fits: Sequence[_Fit]) -> list[_Fit]:
    """Those that no other explains the rows better than: by the same columns and more."""
    return [each for each in fits if not any(each.columns < other.columns for other in fits)]


def _misfit(fits: Sequence[_Fit], sample: Sequence[Fields]) -> str:
    """Why none of some formats fits: what those that come nearest miss in the first row that is not of them."""
    columns = list(dict.fromkeys(str(name) for fields in sample for name in fields))
    listed = ", ".join(columns) or "none"
    only = columns[0] if len(columns) == 1 else None
    if only and any(isinstance(fields.get(only), str) for fields in sample):
        way = f"rename it: columns={{{only}: text}}"
    else:
        way = "rename columns, such as columns={question: prompt}"
    near = [each for each in fits if each.count or each.format.mapping.keys() & set(columns) or len(fits) == 1]
    near.sort(key=lambda each: (-each.count, -len(each.format.mapping.keys() & set(columns))))
    problems = "; ".join(f"{each.format.name}: {each.problem(sample)}" for each in near[:_NEAR])
    if len(fits) == 1:
        return f"not of format={fits[0].format.name} ({problems}); columns found: {listed}; give its columns, or {way}"
    return (
        f"no format fits the columns {listed}{problems and f' ({problems})'}; "
        f"accepted: {', '.join(BY_NAME)}; {way}, or say which format is meant with format=NAME"
    )
