"""One JSON object made into a row; what is wrong with one that cannot be is named as what it is."""

import json

import orjson

from tasks.data.reading.chunk import Broken, Row
from tasks.data.reading.lines import not_utf8, shown

_BOM = b"\xef\xbb\xbf"
_MEND = "mend or remove it"
_DIGITS = bytes(ord("0") if chr(byte).isdecimal() and byte < 128 else 0 for byte in range(256))
_LONG = 19  # digits of the shortest number that may be beyond 64 bits
_ARRAY = (
    "if the whole file is one JSON array, name it .json, or put each item on a line: `jq -c '.[]' FILE > NEW.jsonl`"
)
_TYPES = {list: "a list", str: "a string", int: "a number", float: "a number", bool: "a boolean", type(None): "null"}


def json_row(raw: bytes, where: str) -> Row | Broken:
    """A row, of a line of JSON Lines or of an item of an array."""
    try:
        fields = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        return _fault(raw, where, error)
    if isinstance(fields, dict):
        return _lost(raw, where, fields) or Row(fields=fields, where=where)
    if isinstance(fields, list):
        return _broken(raw, where, "not an object", "a JSON list, not an object", f"{_ARRAY}; otherwise {_MEND}")
    return _broken(raw, where, "not an object", f"{_TYPES[type(fields)]}, not a JSON object", _MEND)


def _lost(raw: bytes, where: str, fields: dict[str, object]) -> Broken | None:
    """Of a row that is JSON, and would not be the same any more further on."""
    try:
        orjson.dumps(fields)
    except TypeError:  # nested deeper than orjson writes, and than Python's own parser goes
        return _broken(raw, where, "nested too deep", "values nested more than 250 deep", _MEND)
    # A number so long has three digits in places that are multiples of six: few lines are looked at as a whole.
    if b"000" in raw[::6].translate(_DIGITS) and b"0" * _LONG in raw.translate(_DIGITS):
        try:
            json.loads(raw, parse_int=_refuse_beyond)
        except _BeyondError as error:
            found = f"the integer {error} needs more than 64 bits"
            return _broken(raw, where, "number too large", found, "write it as text, in quotes")
    return None


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
        mend = "write the whole row on one line (`jq -c . FILE > NEW.jsonl` does), or remove it"
        return _broken(raw, where, "cut short", found, _ARRAY if text.strip() == "[" else mend)
    if error.msg == "Extra data":
        if text[error.pos :].strip() == ",":
            return _broken(raw, where, "not JSON", f"a comma behind the row, at {_place(error)}", _ARRAY)
        return _broken(raw, where, "not JSON", f"more than one JSON value: another at {_place(error)}", _MEND)
    mend = _ARRAY if text.lstrip().startswith(("[", "]")) else _MEND
    return _broken(raw, where, "not JSON", f"not JSON: {error.msg.removesuffix(' at')} at {_place(error)}", mend)


def _broken(raw: bytes, where: str, reason: str, found: str, mend: str) -> Broken:
    problem = f"{found}; one JSON object per row is accepted; {mend}"
    return Broken(where=where, problem=problem, reason=reason, raw=shown(raw))


def _place(error: json.JSONDecodeError) -> str:
    column = f"column {error.colno}"
    return column if error.lineno == 1 else f"line {error.lineno} of the item, {column}"


class _BeyondError(Exception):
    """An integer that orjson makes a float of."""


def _refuse_beyond(digits: str) -> int:
    number = int(digits)
    if -(2**63) <= number < 2**64:
        return number
    raise _BeyondError(digits)


class _ConstantError(Exception):
    """NaN, Infinity or -Infinity, which Python's parser takes for numbers."""


def _refuse_constant(name: str) -> float:
    raise _ConstantError(name)
