"""JSON arrays: items with their lines, and each fault as what it is."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lineage.errors import DataError
from tasks.data.reading import json_rows
from tasks.data.reading.chunk import Row
from tests.unit.tasks.data.reading.written import PACKED, faults, read, rows_of, write

SETS = Path(__file__).parents[6] / "shared" / "data" / "llamafactory-demo"


def places(path: Path) -> list[str]:
    return [row.where.removeprefix(str(path)) for row in read(path)]


@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("dumps", [json.dumps, lambda rows: json.dumps(rows, indent=1)])
def test_items_of_an_array_are_rows(tmp_path: Path, packed: str, dumps: Callable[[object], str]) -> None:
    rows = [{"a": "ü]"}, {"b": [1, {"c": -2.5}]}, {}]
    text = f" \n{dumps(rows)}\n "
    assert rows_of(write(tmp_path / f"rows.json{packed}", PACKED[packed](text.encode()))) == rows


@pytest.mark.skipif(not SETS.is_dir(), reason="the real sets lie beside the checkout")
@pytest.mark.parametrize("name", ["alpaca_en_demo", "dpo_en_demo", "glaive_toolcall_en_demo", "kto_en_demo"])
def test_a_real_array_is_read_as_a_parser_reads_it(name: str) -> None:
    file = SETS / f"{name}.json"
    assert rows_of(file) == json.loads(file.read_bytes())
    where, lines_of_file = [row.where for row in read(file)], file.read_bytes().split(b"\n")
    assert all(lines_of_file[int(place.rpartition(":")[2]) - 1].strip() == b"{" for place in where)


def test_items_are_named_by_the_line_on_which_they_begin(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.json", '\n[{"a":\n1},\n\n{"a": 2}, {"a": 3}\n, {}, {}]')
    assert places(file) == [":2", ":5", ":5[2]", ":6", ":6[4]"]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (b'[{"a": 1},\n{"a": 2', ":2: ... at item [1]"),
        (b'[{"a": 1},\n{"a": "2 } ] ', ":2: ... at item [1]"),
        (b'[{"a": 1},\n{"a": fal', ":2: ... at item [1]"),
        (b'[{"a": 1},\n{"a": "\\u00', ":2: ... at item [1]"),
        (b'[{"a": 1},\n', ":2: ... at item [1]"),
        (b'[{"a": 1}\n', ":2: ... at item [1]"),
    ],
)
def test_an_array_that_was_cut_is_named_where_it_ends(tmp_path: Path, text: bytes, place: str) -> None:
    file = write(tmp_path / "rows.json", text)
    where, _, item = place.partition(" ... ")
    assert faults(file) == [
        f"rows.json{where} the file ends inside its JSON array, {item}: it was cut here [cut short]"
    ]
    assert read(file)[0] == Row(fields={"a": 1}, where=f"{file}:1")


def test_items_that_are_no_rows_are_named_and_the_others_are_read(tmp_path: Path) -> None:
    file = write(
        tmp_path / "rows.json", b'[3,\n{"a": NaN},\n{"a": "\xe4"},\n{"a": "\\udc00"},\n{"a":\n"\x01"}, {"a": 1}]'
    )
    assert faults(file) == [
        "rows.json:1: not an object, but the JSON 3 [not an object]",
        "rows.json:2: not JSON: NaN, which JSON does not have at column 7 [not JSON]",
        "rows.json:3: byte 0xe4 at column 8 is not UTF-8 [not UTF-8]",
        "rows.json:4: half a surrogate pair at column 8 [not UTF-8]",
        "rows.json:5: not JSON: Invalid control character at line 2 of the item, column 2 [not JSON]",
    ]
    assert [row.fields for row in read(file) if isinstance(row, Row)] == [{"a": 1}]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('[{"a": 1},\n]', "2: not a JSON array: Expecting value at ']' (item [1])"),
        ('[{"a": 1}\n{"a": 2}]', """2: not a JSON array: no comma after an item at '{"a": 2}]' (item [1])"""),
        ('[{"a": 1}]\n{}', "2: not a JSON array: something after the end of the array at '{}' (item [1])"),
        ('[{"a": 1},\n{"b":\ntru, "c": 2}]', """3: not a JSON array: Expecting value at 'tru, "c": 2}]' (item [1])"""),
        ("[" * 200_000, f"1: not a JSON array: values nested too deep at {'[' * 40!r} (item [0])"),
    ],
)
def test_an_array_whose_items_cannot_be_told_apart_is_refused(tmp_path: Path, text: str, found: str) -> None:
    file = write(tmp_path / "rows.json", text)
    with pytest.raises(DataError) as refusal:
        read(file)
    assert str(refusal.value) == (
        f"{file}:{found}; objects between commas are accepted; mend it there: "
        "what follows cannot be told apart into rows"
    )


def test_an_item_that_does_not_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_rows, "BLOCK_BYTES", 64)
    monkeypatch.setattr(json_rows, "MAX_ROW_BYTES", 2**20)
    file = write(tmp_path / "rows.json", json.dumps([{"a": 1}, {"a": "x" * 2**22}]))
    with pytest.raises(DataError, match=r"rows.json:1: not a JSON array: an item of more than 1 MB at .*item \[1\]"):
        read(file)
