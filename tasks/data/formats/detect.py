"""Detects the format of a source from its first rows, and refuses ambiguous ones; renames columns.

Before conversion a template may build the prompt from several columns; afterwards a system turn may be added.
"""

import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property, lru_cache

from lineage.artifact import Kind
from lineage.errors import ConfigError, DataError
from tasks.data.formats.known import BY_NAME, FORMATS, REST, Format
from tasks.data.formats.turns import BadRowError, CanonicalRow, Fields, images_are_not_read, is_nothing, named

_NEAR = 3  # number of formats whose mismatch a message explains
_MEDIA = frozenset({"images", "image", "videos", "video", "audios", "audio"})
# Columns that formats read, and the column that groups rows for the split.
_KNOWN_NAMES = frozenset({"group", *(name for each in FORMATS for name in each.mapping if name != REST)})


@dataclass(frozen=True, kw_only=True)
class Detected:
    """How the rows of a source are read. Picklable: the format is looked up by name.

    Args:
        evidence: reason, and number of matching rows, for the report.
        columns: the format's names -> the user's.
        seen: the format's columns that the source has.
        stated: the user has set the format, which permits to ignore columns that it does not read.
    """

    name: str
    evidence: str
    columns: Mapping[str, str]
    seen: frozenset[str]
    stated: bool

    @cached_property
    def format(self) -> Format:
        return BY_NAME[self.name]

    @property
    def mapping(self) -> dict[str, str]:
        """The user's columns -> their meaning, for the report."""
        used = [name for name in self.format.mapping if name in self.seen or name == REST]
        return {self.columns.get(name, name): self.format.mapping[name] for name in used}

    def refusal(self, place: str, accepted: Kind, remedy: str) -> str:
        """The message for rows of another kind than ``accepted``.

        Args:
            place: path of the source.
        """
        return (
            f"{place}: detected {self.name} ({self.evidence}), which gives {self.format.kind}; {accepted} is accepted "
            f"{remedy}, or set another format with format=NAME"
        )

    def refusal_by_stage(self, place: str, kind: Kind) -> str | None:
        """The message of a data stage that writes rows of this kind; None: it takes these rows."""
        found = self.format.kind
        if found == kind:
            return None
        splits = (found, kind) == (Kind.PREFERENCES, Kind.UNPAIRED)
        after = " and conf/stage/unpair.yaml after it, which splits pairs" if splits else ""
        return self.refusal(place, kind, f"by this stage; use conf/stage/{found}.yaml for it{after}")

    def read_columns(self, fields: Fields) -> set[str]:
        """The columns of a row that are read; others are ignored."""
        return set(fields) if REST in self.format.mapping else fields.keys() & self._read

    @cached_property
    def _read(self) -> frozenset[str]:
        kept = self.format.mapping.keys() - set(self.columns.values())
        return frozenset(kept | {theirs for ours, theirs in self.columns.items() if ours in self.format.mapping})

    def convert(self, fields: Fields) -> CanonicalRow:
        """A row in the form of its kind.

        Raises:
            BadRowError: what is wrong with it.
        """
        if self.columns:
            fields = _renamed(fields, self.columns)
        if not _MEDIA.isdisjoint(fields) and self.name != "text":
            for name in sorted(_MEDIA & fields.keys()):
                if not is_nothing(fields[name]):
                    raise images_are_not_read(f"the row has {name}")
        for name in () if self.stated else self.format.lost(fields):
            if fields[name] is not None:
                raise BadRowError(
                    f"the row has {name}, which {self.name} does not read", "unread answer or label",
                    f"rows of {self.name}", f"remove the row, or leave {name} unread with format={self.name}",
                )  # fmt: skip
        for name in () if self.stated else self.format.unread(fields):
            raise BadRowError(
                f"the row has {name}, which {self.name} does not read and which changes what is trained",
                "unread column", f"the columns {', '.join(each for each in self.format.mapping if each != REST)}",
                f"rename it to one of them with columns, remove it, or leave it unread with format={self.name}",
            )  # fmt: skip
        return self.format.convert(fields)


@dataclass(frozen=True, kw_only=True)
class _Fit:
    """The rows of a sample that match a format, by index, and the columns that match."""

    format: Format
    rows: frozenset[int]
    columns: frozenset[str]
    words: str


def detect(
    sample: Sequence[Fields], place: str, *, columns: Mapping[str, str] | None = None, stated: str | None = None
) -> Detected:
    """Detects the format of a source.

    Args:
        sample: its first rows.
        place: its path, for messages.
        columns: our names -> the user's columns.
        stated: name of the format, if the user sets it.

    Raises:
        ConfigError: there is no format of that name.
        DataError: no format fits, or several fit equally well; the message names the candidates. Or a rename does
            not fit the columns.
    """
    if stated and stated not in BY_NAME:
        nearest = get_close_matches(stated, BY_NAME, n=1, cutoff=0.0)[0]
        raise ConfigError(f"format={stated}: no such format; accepted: {', '.join(BY_NAME)}; did you mean {nearest}?")
    if not sample:
        raise DataError(f'{place}: no rows; give at least one row, such as a line {{"text": "..."}}')
    _check_renames(sample, place, columns or {})
    rows = [_renamed(fields, columns or {}) for fields in sample]
    # Columns that are null in all rows are ignored.
    present = frozenset(name for fields in rows for name, value in fields.items() if value is not None)
    known = [BY_NAME[stated]] if stated else FORMATS
    fits = [_fit(each, rows, present, stated=stated is not None) for each in known]
    fitting = _best(fits, 1 if stated else len(rows) / 2)  # bad rows among good ones do not hide the format
    if len(fitting) > 1:
        listed = ", ".join(
            f"{each.format.name} ({each.words}: {len(each.rows)} rows from row {min(each.rows) + 1} on)"
            for each in sorted(fitting, key=lambda each: min(each.rows))
        )
        raise DataError(
            f"{place}: {len(fitting)} formats fit: {listed}; rows of one format are accepted; make a source of each, "
            "or say with format=NAME (sources.NAME.format=...) as what all are read"
        )
    if not fitting:
        raise DataError(f"{place}: {_misfit(fits, rows, present)}")
    best = fitting[0]
    return Detected(
        name=best.format.name, columns=columns or {}, stated=stated is not None,
        seen=best.columns | (best.format.mapping.keys() & present),
        evidence=f"{best.words}: {len(best.rows)} of {len(rows)} rows looked at",
    )  # fmt: skip


def _fit(format: Format, rows: Sequence[Fields], present: frozenset[str], *, stated: bool) -> _Fit:
    found = {}
    for index, fields in enumerate(rows):
        said = {name: value for name, value in fields.items() if name in present}
        if (stated or not format.lost(fields)) and (names := format.recognize(said, stated=stated)):
            found[index] = names
    most = Counter(found.values()).most_common(1)
    words = f"has {' and '.join(most[0][0])}" if most else ""
    return _Fit(format=format, rows=frozenset(found), columns=frozenset().union(*found.values()), words=words)


def _best(fits: Sequence[_Fit], needed: float) -> list[_Fit]:
    """Formats that fit enough rows, without those whose columns are a proper subset of another one's.

    A format that explains only a few rows, but more of their columns, is kept as a candidate: those columns would be
    lost.
    """
    enough = [each for each in fits if len(each.rows) >= needed]
    best = [each for each in enough if not any(each.columns < other.columns for other in enough)]
    rare = [each for each in fits if each.rows and each not in enough]
    return best + [each for each in rare if any(other.columns < each.columns for other in best)]


def _misfit(fits: Sequence[_Fit], rows: Sequence[Fields], present: frozenset[str]) -> str:
    """Why no format fits: what the nearest formats miss in the first row that does not match them."""
    columns = list(dict.fromkeys(str(name) for fields in rows for name in fields))
    near = [each for each in fits if each.rows or each.format.mapping.keys() & set(columns) or len(fits) == 1]
    near.sort(key=lambda each: (-len(each.rows), -len(each.format.mapping.keys() & set(columns))))
    problems = "; ".join(f"{each.format.name}: {_problem(each, rows)}" for each in near[:_NEAR])
    way = "name columns, such as columns={prompt: question}"
    if not present and columns:
        way = "fill them: they are null in all rows looked at"
    elif len(columns) == 1:
        way = f"name it, such as columns={{text: {columns[0]}}}"
    return (
        f"no format fits the columns {', '.join(columns) or 'none'}{problems and f' ({problems})'}; accepted: "
        f"{', '.join(each.format.name for each in fits)}; {way}, or say which format is meant with format=NAME"
    )


def _problem(fit: _Fit, rows: Sequence[Fields]) -> str:
    other = next(fields for index, fields in enumerate(rows) if index not in fit.rows)
    if lost := fit.format.lost(other):
        return f"it does not read {', '.join(lost)}"
    try:
        fit.format.convert(other)
    except BadRowError as error:
        return error.found
    return "it is null in all rows looked at"


def _renamed(fields: Fields, columns: Mapping[str, str]) -> Fields:
    """A row with its columns renamed to the formats' names."""
    ours = {theirs: name for name, theirs in columns.items()}
    renamed = {ours.get(name, name): value for name, value in fields.items()}
    if len(renamed) < len(fields):
        ((twice, _),) = Counter(ours.get(name, name) for name in fields).most_common(1)
        raise BadRowError(f"columns makes two columns {twice!r} of this row", accepted="one column of a name")
    return renamed


def check_direction(field: str, columns: Mapping[str, str], format: str | None) -> None:
    """Checks that ``columns`` maps our names to the rows' columns and not vice versa, as far as names tell.

    Args:
        field: name of the setting, such as ``sources.rows.columns``.
        format: format of the source, if set.

    Raises:
        ConfigError: shows the inverted mapping.
    """
    for ours, theirs in columns.items():
        # Prompts keep all columns for reward functions, which may have any name.
        if ours not in _KNOWN_NAMES and theirs in _KNOWN_NAMES and format != "prompts":
            raise ConfigError(
                f"{field}.{ours}={theirs}: {ours!r} is not a name that a format knows; "
                f"{_inverted_hint(field, theirs, ours)} "
                f"(or format=prompts, if the rows' column {theirs!r} is for a reward function that calls it {ours!r})"
            )


def _check_renames(sample: Sequence[Fields], place: str, columns: Mapping[str, str]) -> None:
    """Refuses renames of missing columns, and renames of two columns to one name."""
    present = list(dict.fromkeys(str(name) for fields in sample for name in fields))
    for ours, theirs in columns.items():
        turned = f"; {_inverted_hint('columns', theirs, ours)}" if ours in present else ""
        if theirs not in present:
            found = f"{theirs!r} is not a column; there are: {', '.join(present)}{turned or '; name one of these'}"
        elif list(columns.values()).count(theirs) > 1:
            found = f"the column {theirs!r} is named twice; one name for a column is accepted; remove the other"
        elif ours in present and ours not in columns.values():
            found = f"there is a column {ours!r} already; one column of a name is accepted; rename the other one too"
            found += turned if theirs in _KNOWN_NAMES and ours not in _KNOWN_NAMES else ""
        else:
            continue
        raise DataError(f"{place}: columns.{ours}={theirs}: {found}")


def _inverted_hint(field: str, ours: str, theirs: str) -> str:
    text = f"{field}.{ours}={theirs}"
    quoted = f'"{text}"' if set(text) & set(" '\"$&|;()<>*?") else text
    return f"columns maps our name to the rows' column: set {quoted}"


# Prompt templates and system turns.

_TEMPLATE = "text with named placeholders, such as '{context}\\n\\n{question}'"


@lru_cache(maxsize=8)
def placeholders(template: str) -> frozenset[str]:
    """The columns in a prompt template.

    Raises:
        ConfigError: it has no placeholder, or one with a conversion or format.
    """
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(f"prompt_template: {error}; accepted: {_TEMPLATE}; write {{{{ for a brace") from error
    names = [name for _, name, _, _ in parts if name is not None]
    odd = [name for name in names if not name or name.isdigit() or set(name) & set(".[]")]
    if odd or not names or any(form or conversion for _, _, form, conversion in parts):
        found = f"the placeholder {{{odd[0]}}}" if odd else "a conversion or a format" if names else "no placeholder"
        raise ConfigError(f"prompt_template: {found}; accepted: {_TEMPLATE}; name columns alone")
    return frozenset(names)


def with_prompt(fields: Fields, template: str) -> Fields:
    """A row with ``prompt`` filled from the template, in place of the columns that the template names.

    Raises:
        BadRowError: the row lacks one of them, or it holds no text.
    """
    names, accepted = placeholders(template), "the columns of prompt_template, as text, and no other prompt"
    for name in sorted(names):
        value = fields.get(name)
        if not isinstance(value, str | int | float) or isinstance(value, bool):
            listed = ", ".join(sorted(map(str, fields))) or "none"
            found = f"{name} is {named(value)}" if name in fields else f"no field {name!r} (fields: {listed})"
            raise BadRowError(found, accepted=accepted, remedy="add it, or change the template")
    if "prompt" in fields and "prompt" not in names:
        raise BadRowError("prompt is there already", accepted=accepted, remedy="put {prompt} into the template")
    made = template.format_map({name: fields[name] for name in names})
    return {**{name: value for name, value in fields.items() if name not in names}, "prompt": made}


def with_system(row: CanonicalRow, text: str) -> CanonicalRow:
    """A row with this system turn, unless it has its own."""
    name = "messages" if "messages" in row else "prompt"
    turns = row[name]
    assert isinstance(turns, list), "rows of text have no turns"
    if turns[0]["role"] == "system":
        return row
    return {**row, name: [{"role": "system", "content": text}, *turns]}
