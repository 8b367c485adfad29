"""Values and tools in rows of any format: what is there, of the right type, and readable."""

import json
from collections import Counter
from collections.abc import Container, Mapping, Sequence

Fields = Mapping[str, object]
CanonicalRow = dict[str, object]  # the columns of its kind, without ``row_id`` and without nulls

_SHOWN = 40  # characters of a text in a message
_SPACES = "".join(character for character in map(chr, range(0x3001)) if character.isspace())
_UNSEEN = _SPACES + "\u200b\u200c\u200d\u2060\ufeff"  # and what has no width
_BAD_TOOLS, _BAD_CALL, _UNCLOSED = "tools that cannot be read", "tool call that cannot be read", "unclosed tool call"
_CANONICAL = json.JSONEncoder(sort_keys=True, ensure_ascii=False)
_OUTER = ("type", "id", "index")  # beside a function; the index is that of a part of a stream


class BadRowError(Exception):
    """The refusal of one row.

    Args:
        found: what is wrong, such as ``output is the number 42``.
        reason: a few words to count by, such as ``no answer``.
        accepted: what would be read; empty: a row of the format, which ``Format.convert`` fills in.
    """

    def __init__(self, found: str, reason: str = "not of the format", accepted: str = "", remedy: str = "") -> None:
        found = found.encode(errors="backslashreplace").decode()  # it may quote what cannot be written
        super().__init__(found, reason, accepted, remedy)
        self.found, self.reason, self.accepted = found, reason, accepted
        self.remedy = remedy or "correct or remove the row"

    def __str__(self) -> str:
        return f"{self.found}; accepted: {self.accepted}; {self.remedy}"


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
            return f"the text {value if len(value) <= _SHOWN else value[:_SHOWN] + '...'!r}"
        case list() | tuple():
            return "a list"
        case Mapping():
            return "an object"
    return f"of type {type(value).__name__}"


def is_nothing(value: object) -> bool:
    """Whether an optional field says nothing: tables have null or an empty value where a row lacks it."""
    return value is None or value == "" or value == [] or value == {}


def is_blank(text: str) -> bool:
    """Whether nothing of a text can be seen."""
    return not text.strip(_UNSEEN)


def required(fields: Fields, name: str, missing: str = "missing field") -> object:
    """A field that has to be there; a row without it is counted as ``missing``."""
    if name not in fields:
        raise BadRowError(f"no field {name!r} (fields: {', '.join(sorted(map(str, fields))) or 'none'})", missing)
    return fields[name]


def one_of(fields: Fields, names: Sequence[str]) -> str:
    """Which of several names of one column a row uses."""
    used = [name for name in names if not is_nothing(fields.get(name))]
    if len(used) > 1:
        raise BadRowError(f"{' and '.join(used)} are both there")
    return (used or [name for name in names if name in fields] or list(names))[0]


def require_nothing_else(value: Mapping[str, object], known: Container[str | None], what: str) -> None:
    """Refuses what would be lost, such as arguments of another name."""
    extra = sorted(str(key) for key, item in value.items() if key not in known and not is_nothing(item))
    if extra:
        raise BadRowError(f"{what} has {', '.join(extra)}", "unknown field")


def text(value: object, what: str, empty: str) -> str:
    """A text that says something; a row without it is counted as ``empty``."""
    if not isinstance(value, str):
        raise BadRowError(f"{what} is {named(value)}", empty if value is None else "not text")
    if is_blank(value):
        raise BadRowError(f"{what} is empty", empty)
    return whole_characters(value, what)


def text_of(fields: Fields, empty: str, *names: str) -> str:
    """The text of a required column, which may have one of several names."""
    name = one_of(fields, names)
    return text(required(fields, name, empty), name, empty)


def optional_name(value: object, what: str, reason: str = "not text") -> str | None:
    """A short text that may be null or empty, such as the cell of a table."""
    if not (value is None or isinstance(value, str)):
        raise BadRowError(f"{what} is {named(value)}", reason, "a string or null")
    return value or None


def whole_characters(value: str, what: str) -> str:
    """A text that can be written as UTF-8: JSON can spell half a surrogate pair, which is no character."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        place = f"at character {error.start}"
        raise BadRowError(f"{what} has half a surrogate pair {place}", "half a surrogate pair") from error
    return value


def parsed_json(value: str, what: str, reason: str) -> object:
    """What a column holds as JSON text."""
    try:
        return json.loads(value, parse_constant=_refuse_constant, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise BadRowError(f"{what} is not JSON: {error}", reason) from error


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {twice!r} is there twice")
    return made


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def as_json(value: object, what: str) -> str:
    """JSON with the keys in the order in which the user has them: it is text that a model reads or writes."""
    try:
        return whole_characters(json.dumps(value, ensure_ascii=False, allow_nan=False), what)
    except (TypeError, ValueError, RecursionError) as error:
        cause = str(error).partition(": ")[0]  # Python 3.13 adds the value
        raise BadRowError(f"{what} is no JSON value: {cause}") from error


def canonical(value: object) -> str:
    """One text for equal rows."""
    return _CANONICAL.encode(value)


def add_tools(row: CanonicalRow, fields: Fields, name: str = "tools") -> CanonicalRow:
    """The row, with the tools of a user's column where it holds some."""
    listed = [] if is_nothing(fields.get(name)) else _items(fields[name], name, _BAD_TOOLS, _BAD_TOOLS)
    tools = [_function(tool, f"{name}[{index}]", _BAD_TOOLS) for index, tool in enumerate(listed)]
    if tools:
        bare = [function if outer is not function else _without_type(function) for outer, function in tools]
        row["tools"] = as_json([{"type": "function", "function": each} for each in bare], name)
    return row


def _without_type(function: Mapping[str, object]) -> Mapping[str, object]:
    return {key: item for key, item in function.items() if key != "type"}


def calls_json(value: object, what: str) -> str:
    """JSON text of at least one call; one that is no JSON is counted as unclosed: mostly it ends too early."""
    calls = _items(value, what, _BAD_CALL, _UNCLOSED)
    if not calls:
        raise BadRowError(f"{what} is empty", "no answer")
    return as_json([_call(call, f"{what}[{index}]") for index, call in enumerate(calls)], what)


def _call(value: object, what: str) -> Mapping[str, object]:
    outer, function = _function(value, what, _BAD_CALL)
    require_nothing_else(function, ("name", "arguments", *(_OUTER if outer is function else ())), what)
    name = optional_name(outer.get("id"), f"{what} id", _BAD_CALL)
    arguments = {} if is_nothing(function.get("arguments")) else function["arguments"]
    if isinstance(arguments, str):
        arguments = parsed_json(arguments, f"{what} arguments", _UNCLOSED)
    if not isinstance(arguments, Mapping):
        raise BadRowError(f'{what} arguments is {named(arguments)}, not an object such as {{"a": 1}}', _BAD_CALL)
    call = {"name": function["name"], "arguments": arguments}
    return {"type": "function", **({"id": name} if name else {}), "function": call}


def _items(value: object, what: str, reason: str, not_json: str) -> list[object]:
    """Of a list, of one object, or of their JSON text."""
    if isinstance(value, str):
        value = parsed_json(value, what, not_json)
    if not isinstance(value, Mapping | list):
        raise BadRowError(f'{what} is {named(value)}, not a list of {{"name": ...}}', reason)
    return [value] if isinstance(value, Mapping) else value


def _function(value: object, what: str, reason: str) -> tuple[Mapping[str, object], Mapping[str, object]]:
    """A tool or a call, and the function of it: the same where it is bare."""
    if not isinstance(value, Mapping):
        raise BadRowError(f"{what} is {named(value)}", reason)
    if value.get("type") not in (None, "function"):
        raise BadRowError(f"{what} type is {named(value['type'])}, not 'function'", reason)
    function = value.get("function", value)
    if not (isinstance(function, Mapping) and isinstance(function.get("name"), str) and function["name"]):
        raise BadRowError(f'{what} names no function, as in {{"name": "f"}}', reason)
    if function is not value:
        require_nothing_else(value, ("function", *_OUTER), what)
    return value, function
