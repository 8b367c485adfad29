"""Whatever was written comes back; whatever was damaged is a row as it stands, a counted fault, or a named refusal."""

import csv
import gzip
import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lineage.errors import DataError
from tasks.data.reading import chunk, delimited
from tasks.data.reading import read as reader
from tasks.data.reading.chunk import Broken, Row
from tests.unit.tasks.data.reading.written import read, rows_of, write

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
names = st.text(st.characters(categories=["L"]), min_size=1, max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)
rows = st.lists(st.dictionaries(names, values, max_size=4), min_size=1, max_size=12)
tables = st.lists(st.fixed_dictionaries({"q": texts, "a": texts}), min_size=1, max_size=12)
blocks = st.sampled_from([1, 7, 64, 2**20])


@contextmanager
def file_of(name: str, content: bytes, block_bytes: int = 2**20) -> Iterator[Path]:
    """A file that is read in blocks of a size."""
    with TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        for module in (chunk, reader, delimited):
            patch.setattr(module, "BLOCK_BYTES", block_bytes)
        yield write(Path(directory, name), content)


def csv_of(table: list[dict[str, str]]) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, ["q", "a"], quoting=csv.QUOTE_ALL)
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue().encode()


def parquet_of(table: list[dict[str, str]]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(table), sink)
    return sink.getvalue()


def arrow_of(table: list[dict[str, str]], *, is_stream: bool) -> bytes:
    sink = io.BytesIO()
    rows = pa.Table.from_pylist([{**row, "messages": [row] * len(row["q"])} for row in table])
    with (pa.ipc.new_stream if is_stream else pa.ipc.new_file)(sink, rows.schema) as writer:
        writer.write_table(rows)
    return sink.getvalue()


WRITERS: dict[str, Callable[[list[dict[str, object]]], bytes]] = {
    "orjson.jsonl": lambda rows: b"\n".join(map(orjson.dumps, rows)),
    "json.jsonl": lambda rows: "".join(json.dumps(row) + "\r\n" for row in rows).encode(),
    "line.json": lambda rows: json.dumps(rows).encode(),
    "indent.json": lambda rows: json.dumps(rows, indent=2, ensure_ascii=False).encode(),
}


@given(rows=rows, block_bytes=blocks)
def test_rows_come_back_from_json(rows: list[dict[str, object]], block_bytes: int) -> None:
    for name, written in WRITERS.items():
        with file_of(name, written(rows), block_bytes) as file:
            assert rows_of(file) == rows


@given(table=tables, block_bytes=blocks)
def test_cells_come_back_from_csv(table: list[dict[str, str]], block_bytes: int) -> None:
    with file_of("rows.csv", csv_of(table), block_bytes) as file:
        assert rows_of(file) == table


@st.composite
def damage(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """Flips a byte, cuts the end off, puts bytes between, or takes some out; at any place, up to three times."""

    def at(content: bytes, place: float, kind: str, what: bytes) -> bytes:
        index = int(place * len(content))
        head, tail = content[:index], content[index:]
        return {"flip": head + what[:1] + tail[1:], "cut": head, "insert": head + what + tail, "drop": head + tail[5:]}[
            kind
        ]

    any_bytes = st.binary(min_size=1, max_size=4) | st.sampled_from(
        [b'"', b"\n", b"{", b"]", b",", b"\\", b"\xff", b"\0"]
    )
    kinds = st.sampled_from(["flip", "cut", "insert", "drop"])
    strokes = draw(st.lists(st.tuples(st.floats(0, 0.999), kinds, any_bytes), min_size=1, max_size=3))

    def damaged(content: bytes) -> bytes:
        for stroke in strokes:
            content = at(content, *stroke)
        return content

    return damaged


def read_or_refused(file: Path) -> list[Row | Broken] | None:
    """None: the file was refused, with its name and what to do."""
    try:
        found = read(file)
    except DataError as error:
        refusal = str(error)
    else:
        refusal = None
    if refusal is not None:
        assert refusal.startswith(str(file)) and refusal.count("; ") >= 2
        return None
    assert all(
        row.where.startswith(str(file)) and row.problem.count("; ") >= 1 for row in found if isinstance(row, Broken)
    )
    return found


@given(rows=rows, damaged=damage(), block_bytes=blocks)
def test_a_damaged_line_is_a_fault_or_what_a_parser_says_of_it(
    rows: list[dict[str, object]], damaged: Callable[[bytes], bytes], block_bytes: int
) -> None:
    content = damaged(WRITERS["json.jsonl"](rows))
    with file_of("rows.jsonl", content, block_bytes) as file:
        found = read_or_refused(file)
    for row in found or []:
        number = int(row.where.rpartition(":")[2])
        if isinstance(row, Row):
            line = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")[number - 1]
            assert row.fields == json.loads(line)
    if found is not None:
        assert len(found) == sum(bool(line.strip()) for line in content.split(b"\n"))


@given(rows=rows, damaged=damage(), block_bytes=blocks)
def test_a_damaged_array_is_refused_faulty_or_what_a_parser_says_of_it(
    rows: list[dict[str, object]], damaged: Callable[[bytes], bytes], block_bytes: int
) -> None:
    for name in ("line.json", "indent.json"):
        content = damaged(WRITERS[name](rows))
        with file_of(name, content, block_bytes) as file:
            found = read_or_refused(file)
        if found and content.lstrip().startswith(b"[") and all(isinstance(row, Row) for row in found):
            assert [row.fields for row in found if isinstance(row, Row)] == json.loads(content)


TABLES = {
    "rows.csv": csv_of, "rows.parquet": parquet_of, "rows.arrow": partial(arrow_of, is_stream=True),
    "rows.feather": partial(arrow_of, is_stream=False),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
@given(table=tables, damaged=damage(), block_bytes=blocks)
def test_a_damaged_table_ends_in_rows_and_faults_or_is_refused(name, table, damaged, block_bytes):
    with file_of(name, damaged(TABLES[name](table)), block_bytes) as file:
        read_or_refused(file)


@given(rows=rows, damaged=damage())
def test_a_damaged_gzip_never_yields_other_rows(
    rows: list[dict[str, object]], damaged: Callable[[bytes], bytes]
) -> None:
    with file_of("rows.jsonl.gz", damaged(gzip.compress(WRITERS["json.jsonl"](rows)))) as file:
        found = read_or_refused(file)
    if found is not None:
        assert [row.fields for row in found if isinstance(row, Row)] == rows
