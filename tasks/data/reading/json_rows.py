"""JSON: lines with an object each, or one array over the whole file, whose items are found here and parsed later.

Python's parser tells where a value ends, and so where the next begins, in a text of which the rest is still to be read.
ijson would parse the items too, but tells no place, and makes "?" of half a surrogate pair.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

import orjson

from lineage.errors import DataError
from tasks.data.reading.chunk import Broken, Chunk, ParsedChunk, Row
from tasks.data.reading.lines import BLOCK_BYTES, MAX_ROW_BYTES, line_chunks, no_rows, not_utf8, opened, shown

_BOM = b"\xef\xbb\xbf"
_DIGITS = bytes(ord("0") if chr(byte).isdecimal() and byte < 128 else 0 for byte in range(256))
_LONG = 19  # digits of the shortest number that may be beyond 64 bits
_ARRAY = "correct or remove it; if the whole file is one JSON array, name it .json, or `jq -c '.[]' FILE > NEW.jsonl`"
_SPACE = re.compile(r"[ \t\r\n]*")
_LONGEST_WORD = 16  # characters; how much of a literal or an escape must be there to be known as what it is
_SHOWN = 40  # characters of the place of a fault


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
    """A row, of a line of JSON Lines or of an item of an array."""
    try:
        fields = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        return _fault(raw, where, error)
    if not isinstance(fields, dict):
        return _broken(raw, where, "not an object", f"not an object, but the JSON {shown(raw)[:_SHOWN]}")
    try:
        orjson.dumps(fields)
    except TypeError:  # nested deeper than orjson writes, and than Python's own parser goes
        return _broken(raw, where, "nested too deep", "values nested more than 250 deep")
    # A number so long has three digits in places that are multiples of six: few lines are parsed again.
    if b"000" in raw[::6].translate(_DIGITS) and b"0" * _LONG in raw.translate(_DIGITS):
        beyond = list[str]()
        json.loads(raw, parse_int=lambda digits: None if -(2**63) <= int(digits) < 2**64 else beyond.append(digits))
        if beyond:
            return _broken(raw, where, "number too large", f"the integer {beyond[0]} needs more than 64 bits")
    return Row(fields=fields, where=where)


def _fault(raw: bytes, where: str, refusal: orjson.JSONDecodeError) -> Broken:
    """Why orjson refused: by the message of Python's own parser, which says more, where it refuses too."""
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
            found = "the line ends inside a value: it was cut here, or goes on in the next line"
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
    return Broken(where=where, found=found, reason=reason, raw=shown(raw), remedy=_ARRAY if of_array else "")


def _place(error: json.JSONDecodeError) -> str:
    column = f"column {error.colno}"
    return column if error.lineno == 1 else f"line {error.lineno} of the item, {column}"


class _MalformedError(Exception):
    """The text is no array from a position on."""

    def __init__(self, found: str, position: int) -> None:
        super().__init__(found, position)
        self.found, self.position = found, position


class _CutError(Exception):
    """The file ends before the array does."""


@dataclass(frozen=True, kw_only=True)
class ItemsChunk:
    """Items of an array as they stand in the file, each after its place."""

    items: tuple[tuple[str, bytes], ...]

    def rows(self) -> Iterator[Row | Broken]:
        for where, raw in self.items:
            yield json_row(raw, where)


def _item_chunks(stream: BufferedReader, name: str) -> Iterator[Chunk]:
    """The items of an array.

    Raises:
        DataError: it has none, or is malformed in such a way that what follows cannot be told apart.
    """
    text, items, size, index, last_line, cut = _Text(stream), list[tuple[str, bytes]](), 0, -1, 0, False
    try:
        for index, (line, raw) in enumerate(_items(text)):
            # Items that begin on one line are told apart by their numbers.
            items.append((f"{name}:{line}" if line != last_line else f"{name}:{line}[{index}]", raw))
            size, last_line = size + len(raw), line
            if size >= BLOCK_BYTES:
                yield ItemsChunk(items=tuple(items))
                items, size = [], 0
    except _CutError:
        cut = True
    except _MalformedError as error:
        raise _malformed(text, name, index + 1, error) from error
    if items:
        yield ItemsChunk(items=tuple(items))
    if cut:
        yield ParsedChunk(entries=(_cut(text, f"{name}:{text.line}", index + 1),))
    elif index < 0:
        raise no_rows(name, "an empty JSON array")


def _items(text: "_Text") -> Iterator[tuple[int, bytes]]:
    """Line and bytes of each item."""
    text.next()
    text.step()  # over the bracket, by which the file was known as an array
    mark = text.next()
    while mark not in ("]", ""):
        yield text.line, text.value()
        if (mark := text.next()) == ",":
            text.step()
            text.next()
        elif mark not in ("]", ""):
            raise _MalformedError("no comma after an item", text.position)
    if not mark:
        raise _CutError
    text.step()
    if text.next():
        raise _MalformedError("something after the end of the array", text.position)


class _Text:
    """What was read of a file and not yet passed, a character for each byte; always at a position in it."""

    def __init__(self, stream: BufferedReader) -> None:
        self._stream = stream
        self._decode = json.JSONDecoder(strict=False, parse_int=str, parse_float=str).raw_decode
        self.text, self.position, self.line = "", 0, 1

    def next(self) -> str:
        """Goes to the next character that is no white space; empty at the end of the file."""
        while True:
            found = _SPACE.match(self.text, self.position)
            assert found  # even nothing is white space
            self._pass(found.end())
            if self.position < len(self.text) or not self._more():
                return self.text[self.position : self.position + 1]

    def step(self) -> None:
        self._pass(self.position + 1)

    def value(self) -> bytes:
        """Passes one JSON value."""
        while True:
            try:
                end = self._decode(self.text, self.position)[1]
            except json.JSONDecodeError as error:
                if not self._may_go_on(error) or not self._more():
                    raise self._refusal(error) from error
            except RecursionError as error:
                raise _MalformedError("values nested too deep", self.position) from error
            else:
                if end < len(self.text) or not self._more():  # a number may go on in what comes
                    raw = self.text[self.position : end].encode("latin-1")
                    self._pass(end)
                    return raw

    def _may_go_on(self, error: json.JSONDecodeError) -> bool:
        """Whether what comes could mend it."""
        return error.msg.startswith("Unterminated") or error.pos > len(self.text) - _LONGEST_WORD

    def _refusal(self, error: json.JSONDecodeError) -> Exception:
        """Why there is no value: a file that was cut ends no string, list or object behind the fault."""
        if error.msg.startswith("Unterminated") or not set(self.text[error.pos :]) & set('"]}'):
            return _CutError()
        return _MalformedError(error.msg, error.pos)

    def _pass(self, end: int) -> None:
        self.line += self.text.count("\n", self.position, end)
        self.position = end

    def _more(self) -> bool:
        """Reads on: as much again as is there, so that a long item is not looked at too often."""
        pending = self.text[self.position :]
        if len(pending) > MAX_ROW_BYTES:
            raise _MalformedError(f"an item of more than {MAX_ROW_BYTES // 2**20} MB", self.position)
        block = self._stream.read(max(BLOCK_BYTES, len(pending)))
        if block:
            self.text, self.position = pending + block.decode("latin-1"), 0
        return bool(block)


def _cut(text: _Text, where: str, index: int) -> Broken:
    found = f"the file ends inside its JSON array, at item [{index}]: it was cut here"
    raw = shown(text.text[text.position :].encode("latin-1"))
    return Broken(where=where, reason="cut short", raw=raw, found=found)


def _malformed(text: _Text, name: str, index: int, error: _MalformedError) -> DataError:
    line = text.line + text.text.count("\n", text.position, error.position)
    near = text.text[error.position : error.position + _SHOWN].encode("latin-1").decode(errors="replace")
    return DataError(
        f"{name}:{line}: not a JSON array: {error.found} at {near!r} (item [{index}]); objects between commas "
        "are accepted; mend it there: what follows cannot be told apart into rows"
    )
