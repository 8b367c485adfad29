"""Files of rows for tests, and what is read from them."""

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa

from lineage.artifact import Source
from tasks.data.reading.chunk import Broken, Row
from tasks.data.reading.read import read_chunks

PACKED: dict[str, Callable[[bytes], bytes]] = {
    "": lambda raw: raw,
    ".gz": gzip.compress,
    ".zst": lambda raw: packed(raw, "zstd"),
    ".bz2": lambda raw: packed(raw, "bz2"),
}


def packed(raw: bytes, codec: str) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, codec) as stream:
        stream.write(raw)
    return sink.getvalue().to_pybytes()


def write(path: Path, content: bytes | str) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def json_lines(rows: Sequence[object]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def read(path: Path | str, **fields: object) -> list[Row | Broken]:
    return [row for chunk in read_chunks(Source(path=str(path), **fields)) for row in chunk.rows()]  # type: ignore[arg-type]


def rows_of(path: Path | str, **fields: object) -> list[object]:
    """Of a file without a fault."""
    rows = read(path, **fields)
    assert all(isinstance(row, Row) for row in rows), rows
    return [row.fields for row in rows if isinstance(row, Row)]


def faults(path: Path) -> list[str]:
    """What is found at each place, with the directory left out; and the reason to count by."""
    broken = [row for row in read(path) if isinstance(row, Broken)]
    assert all(row.problem.startswith(f"{row.found}; accepted: ") and row.problem.count("; ") >= 2 for row in broken)
    return [f"{row.where}: {row.found} [{row.reason}]".removeprefix(f"{path.parent}/") for row in broken]
