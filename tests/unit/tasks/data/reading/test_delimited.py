"""CSV and TSV: cells by the names of the header, and each fault as what it is."""

import re
from pathlib import Path

import pytest

from lineage.artifact import Source
from lineage.errors import DataError
from lineage.filesystem.digest import DigestCache
from lineage.source.sources import pin
from tasks.data.reading import delimited
from tasks.data.reading.chunk import Row
from tasks.data.reading.read import read_chunks
from tests.unit.tasks.data.reading.written import PACKED, faults, read, rows_of, write


@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize(("suffix", "separator"), [(".csv", ","), (".tsv", "\t")])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_cells_are_strings_named_by_the_header(
    tmp_path: Path, packed: str, suffix: str, separator: str, end: str
) -> None:
    lines = ["\ufeffq,a", '"two,\nlines","say ""ü"""', "", ",1", "2,", "a ' b,c\" d", "last,one"]
    text = end.join(lines).replace(",", separator)
    file = write(tmp_path / f"rows{suffix}{packed}", PACKED[packed](text.encode()))
    assert rows_of(file) == [
        {"q": f"two{separator}\nlines", "a": 'say "ü"'}, {"q": "", "a": "1"}, {"q": "2", "a": ""},
        {"q": "a ' b", "a": 'c" d'}, {"q": "last", "a": "one"},
    ]  # fmt: skip
    assert [row.where.removeprefix(f"{file}:") for row in read(file)] == ["2", "5", "6", "7", "8"]


@pytest.mark.parametrize(
    "text",
    ["Roses are red,\nviolets are blue,\nso, yes", "Dear, all,\nwe, sold, 1\nof, them", "a\nb,c", "word " * 100_000],
)
def test_long_text_and_text_of_several_lines_is_a_cell_like_any_other(tmp_path, text):
    assert rows_of(write(tmp_path / "rows.csv", f'q,a\n1,"{text}"\n')) == [{"q": "1", "a": text}]
    assert rows_of(write(tmp_path / "rows.csv", f'text\n"{text}"\n')) == [{"text": text}]


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ("1", "1 cells, and the header has 2 [number of cells]"),
        ("1,2,3", "3 cells, and the header has 2 [number of cells]"),
        ('"1"2,3',
         "the quotes of a cell do not fit (',' expected after '\"') [quotes]"),
        (b"\xe4,1",
         "byte 0xe4 is not UTF-8 [not UTF-8]"),
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_read_is_named_and_the_others_are_read(
    tmp_path: Path, row: str | bytes, fault: str
) -> None:
    raw = row if isinstance(row, bytes) else row.encode()
    file = write(tmp_path / "rows.csv", b"q,a\n1,2\n" + raw + b"\n3,4\n")
    assert faults(file) == [f"rows.csv:3: {fault}"]
    assert [each.fields for each in read(file) if isinstance(each, Row)] == [{"q": "1", "a": "2"}, {"q": "3", "a": "4"}]


def _refusal(file: Path) -> str:
    with pytest.raises(DataError) as refusal:
        read(file)
    return str(refusal.value).removeprefix(f"{file.parent}/")


@pytest.mark.parametrize(
    ("rows", "fault"),
    [
        ('3,"4\n5,6\n7,8\n', "the quotes of a cell do not fit (unexpected end of data): lines 3 to 5"),
        ('3,"4\n5,6\n7,8", 9\n', "3 cells, and the header has 2: lines 3 to 5"),
        ('3,"4\n5,6\n7,"8"\n9,0\n', "the quotes of a cell do not fit (',' expected after '\"'): lines 3 to 5"),
    ],
)
def test_a_quote_that_swallows_lines_is_refused_with_the_first_and_the_last(
    tmp_path: Path, rows: str, fault: str
) -> None:
    refusal = _refusal(write(tmp_path / "rows.csv", f"q,a\n1,2\n{rows}"))
    assert refusal.startswith(f"rows.csv:3: {fault} would be one row; accepted: one cell in UTF-8 per column; ")
    assert refusal.endswith("; close the quote that opens on line 3, or double it")


def test_a_quote_that_is_never_closed_on_the_last_line_is_a_bad_row(tmp_path: Path) -> None:
    assert faults(write(tmp_path / "rows.csv", 'q,a\n1,2\n3,"4\n')) == [
        "rows.csv:3: the quotes of a cell do not fit (unexpected end of data) [quotes]"
    ]


def test_a_cell_that_does_not_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delimited, "MAX_ROW_BYTES", 2**20)
    file = write(tmp_path / "rows.csv", 'q,a\n1,"2\n' + "3,4\n" * 2**18 + "5,6\n")
    assert _refusal(file).startswith("rows.csv:2: the quotes of a cell do not fit (field larger than ")


@pytest.mark.parametrize(
    ("swallowed", "first", "last"),
    [('3,"4\n5,6\n7,8\n9,0"', 3, 6), ('"3,4\n5,6\n7",8', 3, 5), ('"3\n4","5\n6,7\n8,9"', 4, 6)],
)
@pytest.mark.parametrize("separator", [",", "\t"])
def test_a_cell_in_which_rows_are_swallowed_is_named_with_its_lines(
    tmp_path: Path, swallowed: str, first: int, last: int, separator: str
) -> None:
    text = f"q,a\n1,2\n{swallowed}\nb,c\n".replace(",", separator)
    file = write(tmp_path / ("rows.csv" if separator == "," else "rows.tsv"), text)
    assert faults(file) == [
        f"{file.name}:3: a cell holds line breaks and separators as if rows were in it: lines {first} to {last} "
        "[rows in a cell]"
    ]
    assert [row.fields["a"] for row in read(file) if isinstance(row, Row)] == ["2", "c"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        *(("rows.csv", text, ": there is no row in this file; accepted: at least one; ")
          for text in ("q,a\n", "", "\n\r\n")),
        ("rows.csv", "q,a,q\n1,2,3\n", ":1: two columns are named 'q'; accepted: a header of column names in UTF-8, "),
        ("rows.csv", "q;a\n1;2\n", ":1: its header, 'q;a', is separated by semicolons; accepted: a header of "),
        ("rows.csv", "q|a\n1|2\n", ":1: its header, 'q|a', is separated by bars; accepted: a header of "),
        ("rows.tsv", "q,a\n1,2\n", ":1: its header, 'q,a', is separated by commas; accepted: a header of column "),
        ("rows.csv", '"q\n', ":1: the quotes of a cell do not fit (unexpected end of data); accepted: a header of "),
        ("rows.csv", b"a,\xff\n1,2\n", ":1: the name of a column is not UTF-8; accepted: a header of column names "),
    ],
)  # fmt: skip
def test_a_table_without_a_header_or_a_row_is_refused(
    tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    file = write(tmp_path / name, content)
    with pytest.raises(DataError, match=re.escape(f"{file}{message}")):
        read(file)


@pytest.mark.parametrize(
    ("name", "loader", "text"),
    [
        ("rows.csv", {"sep": ";"}, "q;a\n1;2,5\n"),
        ("rows.csv", {"delimiter": "|"}, "q|a\n1|2,5\n"),
        ("rows.csv", {"sep": "\t"}, "q\ta\n1\t2,5\n"),
        ("rows.csv", {"sep": r"\t"}, "q\ta\n1\t2,5\n"),
        ("rows.tsv", {"sep": ";"}, "q;a\n1;2,5\n"),
    ],
)
def test_a_file_has_the_separator_that_its_source_sets(
    tmp_path: Path, name: str, loader: dict[str, str], text: str
) -> None:
    file = write(tmp_path / name, text)
    for path in (file, tmp_path / f"*{file.suffix}"):
        source = Source(path=str(path), loader=loader)
        pinned = pin("rows", source, DigestCache(None))
        assert pinned.record.reading == {"loader": loader}
        rows = [row for chunk in read_chunks(pinned.source) for row in chunk.rows()]
        assert [row.fields for row in rows if isinstance(row, Row)] == [{"q": "1", "a": "2,5"}]


def test_the_refusal_of_another_separator_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"or set loader.sep=';' on the source"):
        read(write(tmp_path / "rows.csv", "q;a\n1;2\n"))
