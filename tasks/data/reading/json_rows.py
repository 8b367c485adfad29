"""JSON: an object per line, or one array over the whole file, whose items are found here and parsed later.

Python's parser tells where a value ends, and so where the next one begins, also in a text that is read only in part.
ijson would parse the items too, but reports no position, and turns half a surrogate pair into "?".
"""

import json
import re
from collections.abc import Iterator, Sequence
from functools import partial
from io import BufferedReader
from pathlib import Path

import orjson

from lineage.errors import DataError
from tasks.data.reading.chunk import Broken, Chunk, Row, Rows, no_rows, not_utf8, parsed, shown
from tasks.data.reading.lines import BLOCK_BYTES, MAX_ROW_BYTES, MOST, line_chunks, opened

_BOM = b"\xef\xbb\xbf"
_DIGITS = bytes(ord("0") if chr(byte).isdecimal() and byte < 128 else 0 for byte in range(256))
_LONG = 19  # digits of the shortest number that may be beyond 64 bits
_ARRAY = "correct or remove it; if the whole file is one JSON array, name it .json, or `jq -c '.[]' FILE > NEW.jsonl`"
_SPACE = re.compile(r"[ \t\r\n]*")
_LONGEST_WORD = 16  # characters of a literal or an escape by which it can be recognized
_SHOWN = 40  # characters around a fault


def read_json_lines(path: Path, name: str) -> Iterator[Chunk]:
    """One JSON object per line."""
    with opened(path, name) as stream:
        yield from line_chunks(stream, name, json_row)


def read_json(path: Path, name: str) -> Iterator[Chunk]:
    """One JSON array over the whole file, or one JSON object per line: the first character decides."""
    with opened(path, name) as stream:
        if stream.peek().lstrip().startswith(b"["):
            yield from _item_chunks(stream, name)
        else:
            yield from line_chunks(stream, name, json_row)


def json_row(raw: bytes, where: str) -> Row | Broken:
    """The row in a line of JSON Lines, or in an item of an array."""
    try:
        fields = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        return _fault(raw, where, error)
    if not isinstance(fields, dict):
        return _broken(raw, where, "not an object", f"not an object, but the JSON {shown(raw)[:_SHOWN]}")
    try:
        orjson.dumps(fields)
    except TypeError:  # nested deeper than orjson can write and Python's own parser can read
        return _broken(raw, where, "nested too deep", "values nested more than 250 deep")
    # Such a long number has three digits at multiples of six, so that few lines are parsed again.
    if b"000" in raw[::6].translate(_DIGITS) and b"0" * _LONG in raw.translate(_DIGITS):
        beyond = list[str]()
        json.loads(raw, parse_int=lambda digits: None if -(2**63) <= int(digits) < 2**64 else beyond.append(digits))
        if beyond:
            return _broken(raw, where, "number too large", f"the integer {beyond[0]} needs more than 64 bits")
    return Row(fields=fields, where=where)


def _fault(raw: bytes, where: str, refusal: orjson.JSONDecodeError) -> Broken:
    """Why orjson refused a row, in the more exact words of Python's own parser where that refuses it too."""
    if raw.startswith(_BOM):
        return _broken(raw, where, "not JSON", "a byte order mark in the middle of the file (files were joined?)")
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        return not_utf8(error, where, raw)
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg.startswith("Unterminated string") or error.pos >= len(text.rstrip()):
            found = "the line ends inside a value: it was cut here, or continues in the next line"
            return _broken(raw, where, "cut short", found)
        return _broken(raw, where, "not JSON", f"not JSON: {error.msg.removesuffix(' at')} at {_place(error)}")
    except (RecursionError, ValueError):  # too deep, or a number of thousands of digits
        pass
    if "surrogate" in refusal.msg:
        return _broken(raw, where, "not UTF-8", f"half a surrogate pair at {_place(refusal)}")
    constant = re.match("NaN|Infinity", text[refusal.pos :])
    found = f"{constant[0]}, which JSON does not have" if constant else refusal.msg
    return _broken(raw, where, "not JSON", f"not JSON: {found} at {_place(refusal)}")


def _broken(raw: bytes, where: str, reason: str, found: str) -> Broken:
    of_array = raw.lstrip()[:1] in (b"[", b"]") or raw.rstrip()[-1:] == b","
    return Broken(where=where, found=found, reason=reason, raw=shown(raw), **({"remedy": _ARRAY} if of_array else {}))


def _place(error: json.JSONDecodeError) -> str:
    column = f"column {error.colno}"
    return column if error.lineno == 1 else f"line {error.lineno} of the item, {column}"


class _CutError(Exception):
    """The file ends before the array does."""


def _item_chunks(stream: BufferedReader, name: str) -> Iterator[Chunk]:
    """The items of an array.

    Raises:
        DataError: the array is empty, or malformed so that the items that follow cannot be told apart.
    """
    text, items, size, last_line, cut = _Array(stream, name), list[tuple[str, bytes]](), 0, 0, False
    try:
        for line, raw in text.items():
            # Several items may begin on one line, so that messages also name an item by its number.
            items.append((f"{name}:{line}" if line != last_line else f"{name}:{line}[{text.index}]", raw))
            size, last_line = size + len(raw), line
            if size >= BLOCK_BYTES:
                yield Chunk(rows=partial(_rows, items))
                items, size = [], 0
    except _CutError:
        cut = True
    if items:
        yield Chunk(rows=partial(_rows, items))
    if cut:
        found = f"the file ends inside its JSON array, at item [{text.index}]: it was cut here"
        rest = shown(text.text[text.position :].encode("latin-1"))
        yield parsed(Broken(where=f"{name}:{text.line}", reason="cut short", raw=rest, found=found))
    elif not text.index:
        raise no_rows(name, ": an empty JSON array")


def _rows(items: Sequence[tuple[str, bytes]]) -> Rows:
    """The rows in items of an array.

    Args:
        items: the place and the bytes of each.
    """
    for where, raw in items:
        yield json_row(raw, where)


class _Array:
    """The part of a file that was read but not yet consumed, as one character per byte, with a position in it."""

    def __init__(self, stream: BufferedReader, name: str) -> None:
        self._stream, self._name = stream, name
        self._decode = json.JSONDecoder(strict=False, parse_int=str, parse_float=str).raw_decode
        self.text, self.position, self.line, self.index = "", 0, 1, 0

    def items(self) -> Iterator[tuple[int, bytes]]:
        """The line and the bytes of each item; ``index`` counts the items."""
        self._next()
        mark = self._next(step=1)  # after the opening bracket, by which the array was recognized
        while mark not in ("]", ""):
            yield self.line, self._value()
            self.index += 1
            if (mark := self._next()) == ",":
                self._next(step=1)
            elif mark not in ("]", ""):
                raise self._malformed("no comma after an item", self.position)
        if not mark:
            raise _CutError
        if self._next(step=1):
            raise self._malformed("something after the end of the array", self.position)

    def _next(self, step: int = 0) -> str:
        """Moves to the next character other than white space, and returns it; empty at the end of the file."""
        self._pass(self.position + step)
        while True:
            found = _SPACE.match(self.text, self.position)
            assert found  # the pattern also matches an empty text
            self._pass(found.end())
            if self.position < len(self.text) or not self._more():
                return self.text[self.position : self.position + 1]

    def _value(self) -> bytes:
        """Consumes one JSON value, and returns its bytes."""
        while True:
            try:
                end = self._decode(self.text, self.position)[1]
            except json.JSONDecodeError as error:
                is_open = error.msg.startswith("Unterminated")
                # Further text could complete the value, unless a string, list or object was closed after the fault.
                if (is_open or error.pos > len(self.text) - _LONGEST_WORD) and self._more():
                    continue
                if is_open or not set(self.text[error.pos :]) & set('"]}'):
                    raise _CutError from error
                raise self._malformed(error.msg, error.pos) from error
            except RecursionError as error:
                raise self._malformed("values nested too deep", self.position) from error
            if end < len(self.text) or not self._more():  # a number may continue in the text that is read next
                raw = self.text[self.position : end].encode("latin-1")
                self._pass(end)
                return raw

    def _pass(self, end: int) -> None:
        self.line += self.text.count("\n", self.position, end)
        self.position = end

    def _more(self) -> bool:
        """Doubles the text, so that a long item is not parsed too often."""
        pending = self.text[self.position :]
        if len(pending) > MAX_ROW_BYTES:
            raise self._malformed(f"an item of more than {MOST}", self.position)
        block = self._stream.read(max(BLOCK_BYTES, len(pending)))
        if block:
            self.text, self.position = pending + block.decode("latin-1"), 0
        return bool(block)

    def _malformed(self, found: str, position: int) -> DataError:
        line = self.line + self.text.count("\n", self.position, position)
        near = self.text[position : position + _SHOWN].encode("latin-1").decode(errors="replace")
        return DataError(
            f"{self._name}:{line}: not a JSON array: {found} at {near!r} (item [{self.index}]); objects between commas "
            "are accepted; correct it there, since the items that follow cannot be told apart"
        )
