"""The tools that an assistant may call, and its calls, in OpenAI's form, as the JSON text that prepared rows hold.

Keys keep the user's order, below the fixed outer ones: a chat template writes them as they stand, so another order
would be another text than the one that the model meets when it is used.
"""

from collections.abc import Mapping

from tasks.data.formats.values import (
    BadRowError,
    CanonicalRow,
    Fields,
    as_json,
    is_nothing,
    named,
    optional_name,
    parsed_json,
    require_nothing_else,
)

_TOOL = 'a list of {"type": "function", "function": {"name": ..., "parameters": ...}}, or that as JSON text'
_CALL = 'a list of {"name": ..., "arguments": {...}}, bare or as "function" of {"type": "function"}'
_ACCEPTED = {"tools that cannot be read": _TOOL, "tool call that cannot be read": _CALL}
_BAD_TOOLS, _BAD_CALL = _ACCEPTED
_OUTER = {"type", "id", "index"}  # beside a function; the index is that of a part of a stream


def add_tools(row: CanonicalRow, fields: Fields, name: str = "tools") -> CanonicalRow:
    """The row, with the tools of a user's column where it holds some."""
    tools = fields.get(name)
    listed = [] if is_nothing(tools) else _items(tools, name, _BAD_TOOLS, _BAD_TOOLS)
    if listed:
        row["tools"] = as_json([_tool(tool, f"{name}[{index}]") for index, tool in enumerate(listed)], name)
    return row


def _tool(value: object, what: str) -> Mapping[str, object]:
    outer, function = _function(value, what, _BAD_TOOLS)
    if outer is function:
        function = {key: item for key, item in function.items() if key != "type"}
    return {"type": "function", "function": function}


def calls_json(value: object, what: str) -> str:
    """JSON text of at least one call.

    Raises:
        BadRowError: it is none; one that is no JSON is counted as an unclosed tool call.
    """
    calls = _items(value, what, _BAD_CALL, "unclosed tool call")  # JSON that ends too early, mostly
    if not calls:
        raise BadRowError(f"{what} is empty", "no answer", _CALL)
    return as_json([_call(call, f"{what}[{index}]") for index, call in enumerate(calls)], what)


def _call(value: object, what: str) -> Mapping[str, object]:
    outer, function = _function(value, what, _BAD_CALL)
    require_nothing_else(function, {"name", "arguments", *(_OUTER if outer is function else ())}, what)
    name = optional_name(outer.get("id"), f"{what} id", _BAD_CALL)
    call = {"name": function["name"], "arguments": _arguments(function.get("arguments"), f"{what} arguments")}
    return {"type": "function", **({"id": name} if name else {}), "function": call}


def _arguments(value: object, what: str) -> Mapping[str, object]:
    if is_nothing(value):
        return {}  # a function without arguments
    arguments = parsed_json(value, what, "unclosed tool call") if isinstance(value, str) else value
    if not isinstance(arguments, Mapping):
        raise BadRowError(f"{what} is {named(arguments)}", _BAD_CALL, 'an object, such as {"city": "Paris"}')
    return arguments


def _items(value: object, what: str, reason: str, not_json: str) -> list[object]:
    """Of a list, of one object, or of their JSON text."""
    if isinstance(value, str):
        value = parsed_json(value, what, not_json)
    if isinstance(value, Mapping):
        return [value]
    if isinstance(value, list):
        return value
    raise BadRowError(f"{what} is {named(value)}", reason, _ACCEPTED[reason])


def _function(value: object, what: str, reason: str) -> tuple[Mapping[str, object], Mapping[str, object]]:
    """A tool or a call, and the function of it: the same where it is bare."""
    if not isinstance(value, Mapping):
        raise BadRowError(f"{what} is {named(value)}", reason, _ACCEPTED[reason])
    kind = value.get("type")
    if kind not in (None, "function"):
        raise BadRowError(f"{what} type is {named(kind)}", reason, _ACCEPTED[reason])
    function = value.get("function", value)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise BadRowError(f"{what} names no function", reason, _ACCEPTED[reason])
    assert isinstance(function, Mapping)
    if function is not value:
        require_nothing_else(value, {"function", *_OUTER}, what)
    return value, function
