"""JSON Lines, and ``.json``, which is an array or such lines."""

from collections.abc import Iterator
from pathlib import Path

from tasks.data.reading.chunk import Chunk
from tasks.data.reading.json_array import item_chunks
from tasks.data.reading.json_row import json_row
from tasks.data.reading.lines import line_chunks
from tasks.data.reading.opened import opened


def read_json_lines(path: Path, name: str) -> Iterator[Chunk]:
    """One JSON object per line."""
    with opened(path, name) as stream:
        yield from line_chunks(stream, name, json_row)


def read_json(path: Path, name: str) -> Iterator[Chunk]:
    """One JSON array over the whole file, or one JSON object per line: told by the first character."""
    with opened(path, name) as stream:
        if stream.peek().lstrip().startswith(b"["):
            yield from item_chunks(stream, name)
        else:
            yield from line_chunks(stream, name, json_row)
