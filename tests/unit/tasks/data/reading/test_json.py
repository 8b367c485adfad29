"""JSON Lines and arrays: rows with their lines, and each fault as what it is."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from lineage.errors import DataError
from tasks.data.reading import read as reader
from tasks.data.reading.chunk import Broken, Row
from tests.unit.tasks.data.reading.written import PACKED, faults, json_lines, read, rows_of, write


def places(path: Path) -> list[str]:
    return [row.where.removeprefix(str(path)) for row in read(path)]


@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("suffix", [".jsonl", ".ndjson", ".jsonlines", ".json"])
def test_lines_are_rows_named_by_file_and_line(tmp_path: Path, suffix: str, packed: str) -> None:
    file = write(
        tmp_path / f"rows{suffix}{packed}", PACKED[packed]('{"a": 1}\n\n \r\n{"a": "ü"}\r\n{"a": null}'.encode())
    )
    assert rows_of(file) == [{"a": 1}, {"a": "ü"}, {"a": None}]
    assert places(file) == [":1", ":4", ":5"]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_a_byte_order_mark_of_utf8_is_passed_over(tmp_path: Path, name: str) -> None:
    assert rows_of(write(tmp_path / name, '\ufeff{"a": 1}\n')) == [{"a": 1}]
    assert rows_of(write(tmp_path / "array.json", '\ufeff[{"a": 1}]')) == [{"a": 1}]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b'{"text": "b', "not JSON: unexpected end of data at column 12 [not JSON]"),
        (b'["a"]', 'not an object, but the JSON ["a"] [not an object]'),
        (b'{"a": 1},', "not JSON: unexpected content after document at column 9 [not JSON]"),
        (b'{"a": [-9223372036854775809]}',
         "the integer -9223372036854775809 needs more than 64 bits [number too large]"),
        (b'{"a": 18446744073709551616, "b": ""}',
         "the integer 18446744073709551616 needs more than 64 bits [number too large]"),
        (b"null", "not an object, but the JSON null [not an object]"),
        (b"{'a': 1}", "not JSON: unexpected character, expected a string key at column 2 [not JSON]"),
        (b'{"a": "b\tc"}', "not JSON: unexpected control character in string at column 9 [not JSON]"),
        (b'{"a": NaN}', "not JSON: unexpected character, expected a JSON value at column 7 [not JSON]"),
        (b'{"a": "\\ud83d"}', "not JSON: no low surrogate in string at column 8 [not JSON]"),
        (b'{"text": "\xe4"}', "byte 0xe4 at column 11 is not UTF-8 [not UTF-8]"),
        (b'\xef\xbb\xbf{"a": 1}', "not JSON: UTF-8 byte order mark (BOM) is not supported at column 1 [not JSON]"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("after", [b"", b'\n{"text": "c"}\n'])
def test_a_line_that_is_no_row_is_named_as_what_it_is_and_the_others_are_read(
    tmp_path: Path, line: bytes, fault: str, after: bytes
) -> None:
    file = write(tmp_path / "rows.jsonl", b'{"text": "a"}\n' + line + after)
    assert faults(file) == [f"rows.jsonl:2: {fault}"]
    assert [row.fields["text"] for row in read(file) if isinstance(row, Row)] == ["a", "c"][: 2 if after else 1]
    assert [row.raw for row in read(file) if isinstance(row, Broken)] == [line.decode(errors="replace")[:200]]


@pytest.mark.parametrize(
    "row",
    [
        {"a": 18446744073709551615, "b": -9223372036854775808},
        {"a": "99999999999999999999999999"},
        {"a": [[[[1]]]], "b": 0.1234567890123456789012345},
    ],
)
def test_what_is_within_64_bits_or_no_integer_is_read(tmp_path: Path, row: object) -> None:
    assert rows_of(write(tmp_path / "rows.jsonl", json_lines([row]))) == [row]
    assert rows_of(write(tmp_path / "rows.json", json.dumps([row]))) == [row]


@pytest.mark.parametrize("before", range(7))
def test_a_number_that_is_too_large_is_seen_wherever_it_stands(tmp_path: Path, before: int) -> None:
    (fault,) = faults(write(tmp_path / "rows.jsonl", f'{{"{"x" * before}": {2**64}}}'))
    assert fault.endswith("[number too large]")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.txt"])
def test_lines_that_end_with_a_carriage_return_alone_are_named(tmp_path: Path, name: str) -> None:
    file = write(tmp_path / name, '{"a": 1}\r{"a": 2}\r')
    with pytest.raises(
        DataError, match=f"^{file}: its lines end with a carriage return only; accepted: a line feed at"
    ):
        read(file)
    assert len(read(write(file, '{"a": 1}\r'))) == 1


@pytest.mark.parametrize("line", [b"[" * 200_000, b'{"a":' * 200_000, b'{"a": 1e999}', b'{"a": ' + b"9" * 5000 + b"}"])
def test_what_no_parser_takes_is_a_fault_too(tmp_path: Path, line: bytes) -> None:
    (fault,) = faults(write(tmp_path / "rows.jsonl", line))
    assert fault.startswith("rows.jsonl:1: not JSON: ") and fault.endswith(" [not JSON]")


def test_a_line_that_does_not_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "BLOCK_BYTES", 64)
    monkeypatch.setattr(reader, "MAX_ROW_BYTES", 2**20)
    endless = json_lines([{"text": "x" * (2**20 + 200)}])
    file = write(tmp_path / "rows.jsonl", b'{"text": "a"}\n' + endless + b'{"text": "c"}\n' + endless[:-1])
    with pytest.raises(DataError, match=r"rows.jsonl:2: a line of more than 64 MB; accepted: shorter lines; "):
        read(file)


@pytest.mark.parametrize("line", [b'["a"]', b"[", b"]", b'{"a": 1},'])
def test_of_what_may_be_an_array_the_remedy_says_how_one_is_read(tmp_path: Path, line: bytes) -> None:
    (row,) = read(write(tmp_path / "rows.jsonl", line))
    assert isinstance(row, Broken) and "if the whole file is one JSON array, name it .json" in row.problem


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.jsonl", ""),
        ("rows.json", ""),
        ("rows.jsonl", "\n \r\n\t\n"),
        ("rows.jsonl", "\ufeff"),
        ("rows.json", " \n"),
        ("rows.json", "[\n]\n"),
    ],
)
@pytest.mark.parametrize("packed", PACKED)
def test_a_file_without_a_row_is_refused(tmp_path: Path, name: str, content: str, packed: str) -> None:
    file = write(tmp_path / f"{name}{packed}", PACKED[packed](content.encode()))
    with pytest.raises(DataError, match=re.escape(f"{file}: there is no row in this file; accepted: at least one; ")):
        read(file)


@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("dumps", [json.dumps, lambda rows: json.dumps(rows, indent=1)])
def test_items_of_an_array_are_rows(tmp_path: Path, packed: str, dumps: Callable[[object], str]) -> None:
    rows = [{"a": "ü]"}, {"b": [1, {"c": -2.5}]}, {}]
    text = f" \n{dumps(rows)}\n "
    assert rows_of(write(tmp_path / f"rows.json{packed}", PACKED[packed](text.encode()))) == rows


def test_items_are_named_by_the_line_on_which_they_begin(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.json", '\n[{"a":\n1},\n\n{"a": 2}, {"a": 3}\n, {}, {}]')
    assert places(file) == [":2", ":5", ":5[2]", ":6", ":6[4]"]


def test_items_that_are_no_rows_are_named_and_the_others_are_read(tmp_path: Path) -> None:
    file = write(
        tmp_path / "rows.json", b'[3,\n{"a": NaN},\n{"a": "\xe4"},\n{"a": "\\udc00"},\n{"a":\n"\x01"}, {"a": 1}]'
    )
    assert faults(file) == [
        "rows.json:1: not an object, but the JSON 3 [not an object]",
        "rows.json:2: not JSON: unexpected character, expected a JSON value at column 7 [not JSON]",
        "rows.json:3: byte 0xe4 at column 8 is not UTF-8 [not UTF-8]",
        "rows.json:4: not JSON: invalid high surrogate in string at column 8 [not JSON]",
        "rows.json:5: not JSON: unexpected control character in string at line 2 of the item, column 2 [not JSON]",
    ]
    assert [row.fields for row in read(file) if isinstance(row, Row)] == [{"a": 1}]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('[{"a": 1},\n{"a": 2', "2: not a JSON array: the file ends inside it (item [1])"),
        ('[{"a": 1},\n{"a": "2 } ] ', """2: not a JSON array: Unterminated string starting at '"2 } ] ' (item [1])"""),
        ('[{"a": 1},\n', "2: not a JSON array: the file ends inside it (item [1])"),
        ('[{"a": 1},\n]', "2: not a JSON array: Expecting value at ']' (item [1])"),
        ('[{"a": 1}\n{"a": 2}]', """2: not a JSON array: no comma after an item at '{"a": 2}]' (item [1])"""),
        ('[{"a": 1}]\n{}', "2: not a JSON array: something after the end at '{}' (item [1])"),
        ('[{"a": 1},\n{"b":\ntru, "c": 2}]', """3: not a JSON array: Expecting value at 'tru, "c": 2}]' (item [1])"""),
        ("[" * 200_000, f"1: not a JSON array: values nested too deep at {'[' * 40!r} (item [0])"),
    ],
)
def test_an_array_whose_items_cannot_be_reported_apart_is_refused(tmp_path: Path, text: str, found: str) -> None:
    file = write(tmp_path / "rows.json", text)
    with pytest.raises(
        DataError, match=re.escape(f"{file}:{found}; accepted: objects between commas, to its end; correct it")
    ):
        read(file)


def test_an_item_that_does_not_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "BLOCK_BYTES", 64)
    monkeypatch.setattr(reader, "MAX_ROW_BYTES", 2**20)
    file = write(tmp_path / "rows.json", json.dumps([{"a": 1}, {"a": "x" * 2**22}]))
    with pytest.raises(DataError, match=r"rows.json:1: not a JSON array: an item of more than 64 MB at .*item \[1\]"):
        read(file)
