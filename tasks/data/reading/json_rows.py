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

from tasks.data.reading.chunk import (
    BLOCK_BYTES,
    MAX_ROW_BYTES,
    MOST,
    Broken,
    Chunk,
    Row,
    Rows,
    not_utf8,
    refused,
    shown,
)
from tasks.data.reading.lines import line_chunks, opened

_DIGITS = bytes(ord("0") if chr(byte).isdecimal() and byte < 128 else 0 for byte in range(256))
_LONG = b"0" * 19  # digits of the shortest number that may be beyond 64 bits
_ARRAY = "correct or remove it; if the whole file is one JSON array, name it .json, or `jq -c '.[]' FILE > NEW.jsonl`"
_MARK = re.compile(r"\s*(\[\s*\]|[\[,\]]?)\s*")  # before an item; the first alternative is an empty array
_SHOWN = 40  # characters around a fault


def read_json_lines(path: Path, name: str) -> Iterator[Chunk]:
    """One JSON object per line."""
    with opened(path, name) as stream:
        yield from line_chunks(stream, name, json_row)


def read_json(path: Path, name: str) -> Iterator[Chunk]:
    """One JSON array over the whole file, or one JSON object per line: the first character decides."""
    with opened(path, name) as stream:
        if not stream.peek().lstrip().startswith(b"["):
            yield from line_chunks(stream, name, json_row)
            return
        items, size, last_line = list[tuple[str, bytes]](), 0, 0
        for index, (line, raw) in enumerate(_items(stream, name)):
            # Several items may begin on one line, so that messages also name an item by its number.
            items.append((f"{name}:{line}" if line != last_line else f"{name}:{line}[{index}]", raw))
            size, last_line = size + len(raw), line
            if size >= BLOCK_BYTES:
                yield Chunk(rows=partial(_item_rows, items))
                items, size = [], 0
        if items:
            yield Chunk(rows=partial(_item_rows, items))


def json_row(raw: bytes, where: str) -> Row | Broken:
    """The row in a line of JSON Lines, or in an item of an array."""
    try:
        fields = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        try:
            raw.decode()
        except UnicodeDecodeError as stray:
            return not_utf8(stray, where, raw)
        line = f"line {error.lineno} of the item, " if error.lineno > 1 else ""
        return _broken(raw, where, "not JSON", f"not JSON: {error.msg} at {line}column {error.colno}")
    if not isinstance(fields, dict):
        return _broken(raw, where, "not an object", f"not an object, but the JSON {shown(raw)[:_SHOWN]}")
    if _LONG in raw.translate(_DIGITS):  # orjson would round a number of more than 64 bits
        beyond = list[str]()
        json.loads(raw, parse_int=lambda digits: None if -(2**63) <= int(digits) < 2**64 else beyond.append(digits))
        if beyond:
            return _broken(raw, where, "number too large", f"the integer {beyond[0]} needs more than 64 bits")
    return Row(fields=fields, where=where)


def _broken(raw: bytes, where: str, reason: str, found: str) -> Broken:
    of_array = raw.lstrip()[:1] in (b"[", b"]") or raw.rstrip()[-1:] == b","
    remedy = _ARRAY if of_array else "correct or remove the row"
    return Broken(where=where, found=found, reason=reason, raw=shown(raw), remedy=remedy)


def _item_rows(items: Sequence[tuple[str, bytes]]) -> Rows:
    """The rows in the places and bytes of items."""
    return (json_row(raw, where) for where, raw in items)


def _items(stream: BufferedReader, name: str) -> Iterator[tuple[int, bytes]]:
    """The line and the bytes of each item of an array.

    Raises:
        DataError: the array is cut or malformed, so that the items that follow cannot be told apart.
    """
    decode = json.JSONDecoder(strict=False, parse_int=str, parse_float=str).raw_decode
    text, place, line, index = "", 0, 1, 0  # what was read but not yet consumed, as one character per byte
    while True:
        mark = _MARK.match(text, place)
        assert mark  # the pattern also matches an empty text
        start = end = at = mark.end()
        is_end, fault = mark[1] == "]" or (mark[1][-1:] == "]" and not index), ""
        if is_end:
            fault = "something after the end" if start < len(text) else ""
        elif mark[1] != ("," if index else "["):
            fault = "no comma after an item"
        else:
            try:
                end = decode(text, start)[1]
            except json.JSONDecodeError as error:
                fault, at = error.msg.removesuffix(" at"), error.pos
            except RecursionError:
                fault = "values nested too deep"
        if not fault and end < len(text):  # a number may continue in the text that is read next
            line += text.count("\n", place, start)
            yield line, text[start:end].encode("latin-1")
            line += text.count("\n", start, end)
            place, index = end, index + 1
            continue
        pending = len(text) - place  # at least doubled, so that a long item is not parsed too often
        if pending <= MAX_ROW_BYTES and (block := stream.read(max(BLOCK_BYTES, pending))):
            text, place = text[place:] + block.decode("latin-1"), 0
        elif is_end and not fault:
            return
        else:
            fault = f"an item of more than {MOST}" if pending > MAX_ROW_BYTES else fault
            near = text[at : at + _SHOWN].encode("latin-1").decode(errors="replace")
            found = f"{fault} at {near!r}" if near.strip() else "the file ends inside it"
            where = f"{name}:{line + text.count(chr(10), place, at)}"
            raise refused(where, f"not a JSON array: {found} (item [{index}])", "objects between commas, to its end")
