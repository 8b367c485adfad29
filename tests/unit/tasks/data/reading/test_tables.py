"""Parquet and Arrow: rows by their number, in chunks of bounded size, and damage as what it is."""

import os
import pickle
from datetime import date
from decimal import Decimal
from itertools import accumulate
from pathlib import Path

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, Dataset, Features

from lineage.artifact import Source
from lineage.errors import DataError
from tasks.data.formats.turns import BadRowError, text
from tasks.data.reading.chunk import Broken, Row, Unread
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


def of_type(of: pa.DataType, values: list[object]) -> pa.Array:
    if isinstance(of, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(of, pa.array(values, of.storage_type))
    return pa.array(values, of)


MESSAGE = '{"role": "user", "content": "a", "n": null}'
READ = [
    (pa.json_(), ['"a \\"b\\""', None, "null"], ['a "b"', None, None]),
    (pa.json_(), [f"[{MESSAGE}]"], [[{"role": "user", "content": "a", "n": None}]]),
    (pa.json_(pa.large_string()), ['{"x": 1}'], [{"x": 1}]),
    (pa.list_(pa.json_()), [[MESSAGE]], [[{"role": "user", "content": "a", "n": None}]]),
    (pa.struct([("x", pa.json_()), ("y", pa.json_())]), [{"x": '"t"'}], [{"x": "t"}]),
    (pa.decimal128(9, 2), [Decimal("0.25"), Decimal("3.00"), None], [0.25, 3.0, None]),
    (pa.decimal256(60, 0), [Decimal(12), Decimal(10**40 + 1)], [12, Decimal(10**40 + 1)]),
    (pa.decimal128(30, 20), [Decimal("0.12345678901234567891")], [Decimal("0.12345678901234567891")]),
    (pa.list_(pa.decimal128(3, 1)), [[Decimal("0.5")]], [[0.5]]),
    (pa.uuid(), [b"0" * 16, None], ["30303030-3030-3030-3030-303030303030", None]),
    (pa.bool8(), [1, 0], [True, False]),
    *((of, ["a", None], ["a", None])
      for of in (pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string()))),
    *((of, [["a"], None], [["a"], None])
      for of in (pa.large_list(pa.string()), pa.list_view(pa.string()),
                 pa.large_list_view(pa.string()), pa.list_(pa.dictionary(pa.int8(), pa.string())))),
    (pa.list_(pa.string(), 1), [["a"]], [["a"]]),  # a null of them is none that pyarrow reads from Parquet
    (pa.map_(pa.string(), pa.string()), [[("b", "1"), ("a", None)], [], None], [{"b": "1", "a": None}, {}, None]),
    (pa.map_(pa.string(), pa.struct([("x", pa.int8()), ("y", pa.int8())])), [[("k", {"x": 1})]], [{"k": {"x": 1}}]),
    (pa.map_(pa.int8(), pa.string()), [[(1, "a")]], [[[1, "a"]]]),
    (pa.large_list(pa.struct([("x", pa.map_(pa.string(), pa.int8()))])), [[{"x": [("k", 1)]}]], [[{"x": {"k": 1}}]]),
    (pa.fixed_shape_tensor(pa.int8(), (2,)), [[1, 2]], [Unread("arrow.fixed_shape_tensor")]),
    (pa.opaque(pa.string(), "geometry", "postgis"), ["POINT (0 0)"], [Unread("arrow.opaque")]),
]  # fmt: skip


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
@pytest.mark.parametrize(("of", "values", "read_as"), READ, ids=[str(of) for of, *_ in READ])
def test_values_of_every_type_are_those_of_json_or_refused(
    tmp_path: Path, suffix: str, of: pa.DataType, values: list[object], read_as: list[object]
) -> None:
    file = stored(tmp_path / f"rows{suffix}", pa.table({"c": nested(of, values)}))
    assert [row["c"] for row in rows_of(file)] == read_as
    for row in rows_of(file):
        if isinstance(row["c"], Unread):
            with pytest.raises(BadRowError, match=rf"text is of Arrow's type {row['c'].type}, which is not read"):
                text(row["c"], "text", "no text")


def nested(of: pa.DataType, values: list[object]) -> pa.Array:
    """Values of a type with an extension type in it, which pyarrow makes of no Python values."""
    if isinstance(of, pa.ListType) and isinstance(of.value_type, pa.BaseExtensionType):
        flat = [each for value in values for each in value]  # type: ignore[attr-defined]
        return pa.ListArray.from_arrays([0, *accumulate(map(len, values))], of_type(of.value_type, flat))  # type: ignore[arg-type]
    if isinstance(of, pa.StructType) and isinstance(of[0].type, pa.BaseExtensionType):
        parts = [of_type(each.type, [value.get(each.name) for value in values]) for each in of]  # type: ignore[attr-defined]
        return pa.StructArray.from_arrays(parts, fields=list(of))
    return of_type(of, values)


@pytest.mark.parametrize("names", [["desirable", "undesirable"], ["true", "false"]])
def test_a_label_of_datasets_is_its_name(tmp_path: Path, names: list[str]) -> None:
    """Its number follows the order of the names: 0 is the desirable one here."""
    features = Features({"label": ClassLabel(names=names), "other": ClassLabel(names=names)})
    rows = Dataset.from_dict({"label": [0, 1, None], "other": [0, 1, None]}, features=features)
    rows.to_parquet(str(tmp_path / "rows.parquet"))
    rows.save_to_disk(str(tmp_path / "saved"))
    for place in ("rows.parquet", "saved"):
        assert rows_of(tmp_path / place) == [
            {"label": name, "other": number} for name, number in zip([*names, None], [0, 1, None], strict=True)
        ]


def test_an_extension_type_of_a_library_that_is_not_here_is_not_read(tmp_path: Path) -> None:
    field = pa.field("text", pa.string(), metadata={"ARROW:extension:name": "a.library.tokens"})
    file = stored(tmp_path / "rows.arrow", pa.table([pa.array(["a"])], pa.schema([field])))
    assert rows_of(file) == [{"text": Unread("a.library.tokens")}]


@pytest.mark.parametrize(
    ("of", "value", "found"),
    [
        (pa.json_(), "{", "a value is not readable (unexpected end of data"),
        (pa.json_(), str(2**64), f"a value is not readable (the integer {2**64} needs more than 64 bits)"),
        (pa.map_(pa.string(), pa.int8()), [("a", 1), ("a", 2)], "a value is not readable (a map has a key twice)"),
    ],
)
def test_a_value_that_json_does_not_have_breaks_its_row_alone(
    tmp_path: Path, of: pa.DataType, value: object, found: str
) -> None:
    fault, good = read(stored(tmp_path / "rows.parquet", pa.table({"c": of_type(of, [value, None])})))
    assert isinstance(fault, Broken) and fault.found.startswith(found)
    assert isinstance(good, Row) and good.fields == {"c": None}


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
