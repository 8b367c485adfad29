"""Single values of a row: text and JSON, and how messages call what is neither."""

import json
from collections import Counter
from collections.abc import Container, Mapping, Sequence

from tasks.data.formats.bad_row import BadRowError
from tasks.data.formats.format import Fields

_SHOWN = 40  # characters of a text in a message
_SPACES = "".join(character for character in map(chr, range(0x3001)) if character.isspace())
_UNSEEN = _SPACES + "\u200b\u200c\u200d\u2060\ufeff"  # and what has no width


def named(value: object) -> str:
    """How a message calls a value that is not what belongs in its place."""
    match value:
        case None:
            return "null"
        case bool():
            return f"the boolean {str(value).lower()}"
        case int() if value.bit_length() > 64:
            return "a number of more than 64 bits"
        case int() | float():
            return f"the number {value}"
        case str():
            return f"the text {quoted(value)}"
        case list() | tuple():
            return "a list"
        case Mapping():
            return "an object"
    return f"of type {type(value).__name__}"


def quoted(text: str) -> str:
    """The beginning of a text, for a message."""
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")


def is_nothing(value: object) -> bool:
    """Whether an optional field says nothing: tables have null or an empty value where a row lacks it."""
    return value is None or value == "" or value == [] or value == {}


def required(fields: Fields, name: str, accepted: str, *, missing: str = "missing field") -> object:
    """A field that has to be there.

    Args:
        missing: what a row without it is counted as.
    """
    if name not in fields:
        raise BadRowError(
            f"no field {name!r} (fields: {', '.join(sorted(map(str, fields))) or 'none'})", accepted,
            f"add {name!r} or rename the field that holds it", reason=missing,
        )  # fmt: skip
    return fields[name]


def one_of(fields: Fields, names: Sequence[str], accepted: str) -> str:
    """Which of several names of one column a row uses."""
    used = [name for name in names if not is_nothing(fields.get(name))]
    if len(used) > 1:
        raise BadRowError(f"{' and '.join(used)} are both there", accepted, "rename or remove one")
    return (used or [name for name in names if name in fields] or list(names))[0]


def is_blank(text: str) -> bool:
    """Whether nothing of a text can be seen."""
    return not text.strip(_UNSEEN)


def require_nothing_else(value: Mapping[str, object], known: Container[str], what: str, accepted: str) -> None:
    """Refuses what would be lost, such as arguments of another name."""
    extra = sorted(str(key) for key, item in value.items() if key not in known and not is_nothing(item))
    if extra:
        raise BadRowError(
            f"{what} has {', '.join(extra)}", accepted, "rename or remove it", reason="unknown field"
        )  # fmt: skip


def text(value: object, what: str, accepted: str, *, empty: str) -> str:
    """A text that says something.

    Args:
        empty: what a row without it is counted as.
    """
    if not isinstance(value, str):
        reason = empty if value is None else "not text"
        raise BadRowError(f"{what} is {named(value)}", accepted, "write a string", reason=reason)
    if is_blank(value):
        raise BadRowError(f"{what} is empty", accepted, "fill it or remove the row", reason=empty)
    return whole_characters(value, what)


def whole_characters(value: str, what: str) -> str:
    """A text that can be written as UTF-8: JSON can spell half a surrogate pair, which is no character."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadRowError(
            f"{what} has half a surrogate pair at character {error.start}", "text", "write the whole character",
            reason="half a surrogate pair",
        ) from error  # fmt: skip
    return value


def parsed_json(value: str, what: str, *, reason: str) -> object:
    """What a column holds as JSON text."""
    try:
        return json.loads(value, parse_constant=_no_number, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise BadRowError(f"{what} is not JSON: {error}", "JSON", "mend or remove the row", reason=reason) from error


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {twice!r} is there twice")
    return made


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def as_json(value: object, what: str) -> str:
    """JSON with the keys in the order in which the user has them: it is text that a model reads or writes."""
    try:
        return whole_characters(json.dumps(value, ensure_ascii=False, allow_nan=False), what)
    except (TypeError, ValueError, RecursionError) as error:
        cause = str(error).partition(": ")[0]  # Python 3.13 adds the value
        raise BadRowError(f"{what} is no JSON value: {cause}", "JSON values", "write it as a string") from error
