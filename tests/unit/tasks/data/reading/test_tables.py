"""Parquet and Arrow: rows by their number, in chunks of bounded size, and damage as what it is."""

import os
import pickle
from datetime import date
from pathlib import Path

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from lineage.artifact import Source
from lineage.errors import DataError
from tasks.data.reading.chunk import Broken, Row
from tasks.data.reading.read import read_chunks
from tests.unit.tasks.data.reading.written import PACKED, read, rows_of, write

_ROWS = [
    {"text": "ü", "messages": [{"role": "user", "content": "a"}], "day": date(2026, 1, 2), "none": None},
    {"text": "", "messages": [], "day": None, "none": None},
]


def stored(path: Path, table: pa.Table) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    elif path.suffix == ".feather":
        pyarrow.feather.write_feather(table, str(path))
    else:  # as `datasets` writes it
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    return path


@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("suffix", [".parquet", ".feather", ".arrow"])
def test_rows_are_those_of_the_table_named_by_number(tmp_path: Path, suffix: str, packed: str) -> None:
    whole = stored(tmp_path / f"rows{suffix}", pa.Table.from_pylist(_ROWS))
    file = write(tmp_path / f"rows{suffix}{packed}", PACKED[packed](whole.read_bytes()))
    assert rows_of(file) == _ROWS
    assert [row.where for row in read(file)] == [f"{file}[0]", f"{file}[1]"]


@pytest.mark.parametrize("suffix", [".parquet", ".feather", ".arrow"])
def test_chunks_are_small_and_bring_nothing_else_along_when_pickled(tmp_path: Path, suffix: str) -> None:
    file = stored(tmp_path / f"rows{suffix}", pa.table({"text": [f"{n} " * 2000 for n in range(2000)]}))
    chunks = list(read_chunks(Source(path=str(file))))
    assert len(chunks) > 10
    assert max(len(pickle.dumps(chunk)) for chunk in chunks) < 3 * 2**20
    rows = [row for chunk in pickle.loads(pickle.dumps(chunks)) for row in chunk.rows()]
    assert [row.where for row in rows] == [f"{file}[{n}]" for n in range(2000)]
    assert [row.fields["text"] for row in rows] == [f"{n} " * 2000 for n in range(2000)]


def test_a_row_group_is_never_in_memory_as_a_whole(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"text": [os.urandom(5000).hex() for _ in range(4000)]}), file, use_dictionary=False)
    assert file.stat().st_size > 36 * 2**20
    before = pa.total_allocated_bytes()
    assert max(pa.total_allocated_bytes() - before for _ in read_chunks(Source(path=str(file)))) < 18 * 2**20


@pytest.mark.parametrize("suffix", [".parquet", ".feather", ".arrow"])
def test_a_value_that_is_no_text_breaks_its_row_alone(tmp_path: Path, suffix: str) -> None:
    raw = pa.array([b"a", b"\xff", b"c"], pa.binary())
    text = pa.StringArray.from_buffers(3, raw.buffers()[1], raw.buffers()[2])
    file = stored(tmp_path / f"rows{suffix}", pa.table({"text": text}))
    first, fault, last = read(file)
    assert first == Row(fields={"text": "a"}, where=f"{file}[0]")
    assert last == Row(fields={"text": "c"}, where=f"{file}[2]")
    assert isinstance(fault, Broken)
    assert (fault.where, fault.reason) == (f"{file}[1]", "not readable")
    assert fault.problem == (
        "a value is not readable ('utf-8' codec can't decode byte 0xff in position 0: invalid start byte); accepted: "
        "text in UTF-8 and times of our calendar; correct or remove the row"
    )


def _call(**arguments: object) -> dict[str, object]:
    return {"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": arguments}]}], "extra": None}


@pytest.mark.parametrize("suffix", [".parquet", ".feather", ".arrow"])
def test_a_struct_has_the_fields_of_its_own_row_alone(tmp_path: Path, suffix: str) -> None:
    rows = [_call(city="Ulm"), _call(zip=[89073, None]), _call(at={"day": 1}), _call(at={"hour": 0})]
    file = stored(tmp_path / f"rows{suffix}", pa.Table.from_pylist(rows))
    assert rows_of(file) == rows
    raw = pa.StringArray.from_buffers(1, pa.array([b"\xff"]).buffers()[1], pa.array([b"\xff"]).buffers()[2])
    one = pa.table({**pa.Table.from_pylist(rows).slice(0, 1).to_pydict(), "bad": ["a"]}).append_column("text", raw)
    assert isinstance(read(stored(file, one))[0], Broken)


def _refusal(file: Path) -> str:
    with pytest.raises(DataError) as refusal:
        read(file)
    return str(refusal.value)


@pytest.mark.parametrize(("name", "kind"), [("rows.parquet", "Parquet"), ("rows.feather", "Arrow")])
def test_a_file_that_was_cut_or_is_another_kind_is_named_as_what_it_is(tmp_path: Path, name: str, kind: str) -> None:
    whole = stored(tmp_path / name, pa.Table.from_pylist(_ROWS)).read_bytes()
    file = write(tmp_path / name, whole[: len(whole) // 2])
    mend = f"; accepted: {kind}; write or download it again, or give it the suffix of what it is"
    assert _refusal(file).startswith(f"{file}: the file is cut or damaged (") and _refusal(file).endswith(mend)
    for content, found in ((b'{"text": "a"}\n', "text"), (b"PK\x03\x04", "a zip archive or workbook"),
                           (b"\x00" * 99, "of another kind")):  # fmt: skip
        file = write(tmp_path / name, content)
        assert _refusal(file).startswith(f"{file}: the file is {found} (") and _refusal(file).endswith(mend)


@pytest.mark.parametrize("suffix", [".parquet", ".feather", ".arrow"])
def test_a_table_without_a_row_or_with_two_columns_of_a_name_is_refused(tmp_path: Path, suffix: str) -> None:
    file = stored(tmp_path / f"rows{suffix}", pa.table({"text": pa.array([], pa.string())}))
    assert _refusal(file) == (
        f"{file}: there is no row in this file; accepted: at least one; write it again or leave it out"
    )


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    file = stored(tmp_path / "rows.parquet", pa.table([["a"], ["b"]], names=["text", "text"]))
    assert _refusal(file) == f"{file}: two columns are named 'text'; accepted: one of each name; rename one"


def test_a_page_that_does_not_match_its_checksum_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    pq.write_table(
        pa.table({"text": ["needle"]}), file, write_page_checksum=True, compression=None, use_dictionary=False
    )
    assert rows_of(file) == [{"text": "needle"}]
    write(file, file.read_bytes().replace(b"needle", b"noodle"))
    assert _refusal(file).startswith(f"{file}: the file is cut or damaged (")
