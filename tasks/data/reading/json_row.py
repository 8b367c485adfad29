"""One JSON object made into a row; what is wrong with one that cannot be is named as what it is."""

import json

import orjson

from tasks.data.reading.chunk import Broken, Row
from tasks.data.reading.lines import not_utf8, shown

_BOM = b"\xef\xbb\xbf"
_MEND = "mend or remove it"
_TYPES = {list: "a list", str: "a string", int: "a number", float: "a number", bool: "a boolean", type(None): "null"}


def json_row(raw: bytes, where: str) -> Row | Broken:
    """A row, of a line of JSON Lines or of an item of an array."""
    try:
        fields = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        return _fault(raw, where, error)
    if isinstance(fields, dict):
        return Row(fields=fields, where=where)
    if isinstance(fields, list):
        mend = f"for one array over the whole file, name the file .json; otherwise {_MEND}"
        return _broken(raw, where, "not an object", "a JSON list, not an object", mend)
    return _broken(raw, where, "not an object", f"{_TYPES[type(fields)]}, not a JSON object", _MEND)


def _fault(raw: bytes, where: str, refusal: orjson.JSONDecodeError) -> Broken:
    """Why orjson refused: by the message of Python's own parser, which says more, where it refuses too."""
    if raw.startswith(_BOM):
        found = "a byte order mark in the middle of the file"
        return _broken(raw, where, "not JSON", found, "remove its three bytes (files were joined?)")
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        return not_utf8(error, where, raw)
    try:
        json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        return _malformed(raw, where, text, error)
    except _ConstantError as error:
        found = f"{error} at {_place(refusal)}, which JSON does not have"
        return _broken(raw, where, "not JSON", found, "write null, or a number")
    except (RecursionError, ValueError):  # too deep, or a number of thousands of digits
        pass
    if "surrogate" in refusal.msg:
        found = f"half a surrogate pair at {_place(refusal)}"
        return _broken(raw, where, "not UTF-8", found, "write the whole character")
    return _broken(raw, where, "not JSON", f"not JSON: {refusal.msg} at {_place(refusal)}", _MEND)


def _malformed(raw: bytes, where: str, text: str, error: json.JSONDecodeError) -> Broken:
    if error.msg.startswith("Unterminated string"):
        found = f"the line ends inside the string that begins at {_place(error)}: it was cut here"
        return _broken(raw, where, "cut short", found, "write the whole row again, or remove it")
    if error.pos >= len(text.rstrip()):
        found = "the line ends inside an object or a list: it was cut here, or goes on in the next line"
        mend = "write the whole row on one line (`jq -c . FILE > FILE.jsonl` does), or remove it"
        return _broken(raw, where, "cut short", found, mend)
    if error.msg == "Extra data":
        return _broken(raw, where, "not JSON", f"more than one JSON value: another at {_place(error)}", _MEND)
    mend = _MEND
    if text.lstrip().startswith("["):
        mend = "for one array over the whole file, name the file .json"
    return _broken(raw, where, "not JSON", f"not JSON: {error.msg.removesuffix(' at')} at {_place(error)}", mend)


def _broken(raw: bytes, where: str, reason: str, found: str, mend: str) -> Broken:
    problem = f"{found}; one JSON object per row is accepted; {mend}"
    return Broken(where=where, problem=problem, reason=reason, raw=shown(raw))


def _place(error: json.JSONDecodeError) -> str:
    column = f"column {error.colno}"
    return column if error.lineno == 1 else f"line {error.lineno} of the item, {column}"


class _ConstantError(Exception):
    """NaN, Infinity or -Infinity, which Python's parser takes for numbers."""


def _refuse_constant(name: str) -> float:
    raise _ConstantError(name)
