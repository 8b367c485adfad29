"""Plain text and Markdown; files that are not what their names say are refused as what they are."""

import gzip
import re
from pathlib import Path

import pytest

from lineage.errors import DataError
from tasks.data.reading import read as reader
from tasks.data.reading.chunk import Row
from tests.unit.tasks.data.reading.written import PACKED, faults, json_lines, read, rows_of, write

_ROWS = json_lines([{"text": f"row {number}"} for number in range(2000)])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"a": 1}'.encode("utf-16"),
         "UTF-16"),
        *((f'{letter}", "q": 1'.encode(f"utf-16-{order}"), f"UTF-16{order.upper()}")
          for order in ("le", "be") for letter in "{q"),
        (PACKED[".gz"](_ROWS), "gzip"), (b"PK\x03\x04...", "a zip archive or workbook"), (b"PAR1...", "Parquet"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
         "a pointer of Git LFS (`git lfs pull` gets the data)"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv", "rows.txt", "rows.md"])
def test_what_is_no_text_is_named_as_what_it_is(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    file = write(tmp_path / name, content)
    with pytest.raises(DataError) as refusal:
        read(file)
    assert str(refusal.value).startswith(f"{file}: the file is {message}; accepted: text in UTF-8; convert it (`iconv")


@pytest.mark.parametrize(("suffix", "kind"), [(".gz", "gzip"), (".zst", "zstd"), (".bz2", "bz2")])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv", "rows.txt", "rows.parquet"])
def test_a_packed_file_that_was_cut_or_damaged_is_refused(tmp_path: Path, name: str, suffix: str, kind: str) -> None:
    whole = PACKED[suffix](_ROWS)
    for content in (whole[:-5], b"none of it", whole + b"more"):
        file = write(tmp_path / f"{name}{suffix}", content)
        with pytest.raises(DataError) as refusal:
            read(file)
        assert str(refusal.value).startswith(f"{file}: cannot be read (")
        assert str(refusal.value).endswith(
            f"; accepted: {kind}, to its end; it was cut or damaged: write or download it again"
        )


def test_suffixes_are_read_in_any_case_and_parts_packed_one_after_the_other_are_one_file(tmp_path):
    assert len(read(write(tmp_path / "rows.JSONL.GZ", gzip.compress(_ROWS) + gzip.compress(_ROWS)))) == 4000


def test_a_file_that_may_not_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "rows.jsonl", _ROWS)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match=rf"^{file}: cannot be read \(\[Errno 13\] Permission denied\); accepted: a"):
        read(file)


@pytest.mark.parametrize("name", ["rows.xlsx", "rows.jsonl.xz", "rows", "rows.tar"])
def test_a_file_that_nothing_reads_is_refused(tmp_path: Path, name: str) -> None:
    file = write(tmp_path / name, "x")
    found = f"{file}: rows are not read from {file.suffix or 'a file without a suffix'}; accepted: .jsonl, .ndjson, "
    with pytest.raises(DataError, match=re.escape(found)):
        read(file)


@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("suffix", [".txt", ".text"])
def test_each_line_is_a_document(tmp_path: Path, suffix: str, packed: str) -> None:
    text = "\ufeff ü \r\n\n\t\n[b]\x0bc\u2028d"
    file = write(tmp_path / f"rows{suffix}{packed}", PACKED[packed](text.encode()))
    assert rows_of(file) == [{"text": " ü "}, {"text": "[b]\x0bc\u2028d"}]
    assert [row.where for row in read(file)] == [f"{file}:1", f"{file}:4"]


@pytest.mark.parametrize("packed", PACKED)
def test_a_markdown_file_is_a_document(tmp_path: Path, packed: str) -> None:
    file = write(tmp_path / f"doc.md{packed}", PACKED[packed]("# ü\n\nb\n".encode()))
    assert rows_of(file) == [{"text": "# ü\n\nb\n"}]
    assert [row.where for row in read(file)] == [str(file)]
    assert rows_of(write(file, PACKED[packed](b"a\r\n\r\nb\r\n"))) == [{"text": "a\n\nb\n"}]


def test_what_is_not_utf8_is_named(tmp_path: Path) -> None:
    problem = "byte 0xe4 at column 3 is not UTF-8 [not UTF-8]"
    assert faults(write(tmp_path / "rows.txt", b"a\nbc\xe4\nd\n")) == [f"rows.txt:2: {problem}"]
    assert faults(write(tmp_path / "doc.md", b"bc\xe4")) == [f"doc.md: {problem}"]


def test_a_document_that_is_blank_or_too_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_ROW_BYTES", 2**20)
    for content, message in (
        (" \n", ": there is no row in this file; accepted: at least one; write it again or leave it out"),
        ("x" * (2**20 + 1), ": the file is one row of more than 64 MB; accepted: a shorter one; "
                            "split it, or set split_by=paragraph or split_by=line"),
    ):  # fmt: skip
        file = write(tmp_path / "doc.md", content)
        with pytest.raises(DataError) as refusal:
            read(file)
        assert str(refusal.value) == f"{file}{message}"


TWO = "the first\nof two lines\n \t\r\n\n\nthe second\r\nof\r\ntwo\r\n"  # paragraphs


@pytest.mark.parametrize("packed", PACKED)
def test_blank_lines_part_paragraphs_but_not_before_and_after_all_others(tmp_path, packed):
    file = write(tmp_path / f"rows.txt{packed}", PACKED[packed](TWO.encode()))
    assert rows_of(file) == [{"text": "the first\nof two lines"}, {"text": "the second\nof\ntwo"}]
    assert [row.where for row in read(file)] == [f"{file}:1", f"{file}:6"]
    assert rows_of(file, split_by="paragraph") == rows_of(file)
    assert rows_of(write(file, PACKED[packed](b"\n\na\nb\n \n\n"))) == [{"text": "a"}, {"text": "b"}]


def test_each_way_to_split_a_text_makes_other_rows(tmp_path: Path) -> None:
    text, markdown = write(tmp_path / "rows.txt", TWO), write(tmp_path / "rows.md", TWO)
    paragraphs = [{"text": "the first\nof two lines"}, {"text": "the second\nof\ntwo"}]
    lines = [{"text": each} for each in ("the first", "of two lines", "the second", "of", "two")]
    document = [{"text": TWO.replace("\r\n", "\n")}]
    for split_by, rows in (("line", lines), ("paragraph", paragraphs), ("document", document)):
        assert rows_of(text, split_by=split_by) == rows_of(markdown, split_by=split_by) == rows
    assert (rows_of(text), rows_of(markdown)) == (paragraphs, document)
    assert [row.where for row in read(text, split_by="document")] == [str(text)]


def test_every_file_of_a_directory_is_split_as_its_own_lines_say(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "a\nb\n")
    write(tmp_path / "b.txt", "a\nb\n\nc\n")
    write(tmp_path / "README.txt", "a note\n\non the data\n")
    assert rows_of(tmp_path) == [{"text": "a"}, {"text": "b"}, {"text": "a\nb"}, {"text": "c"}]


@pytest.mark.parametrize("size", [3, 7, 64])
def test_paragraphs_are_the_same_whatever_is_read_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    paragraphs = [f"paragraph {place}\n" + "more\n" * (place % 4) + "end" for place in range(50)]
    file = write(tmp_path / "rows.txt", "\n \n".join(paragraphs))
    whole = read(file)
    monkeypatch.setattr(reader, "BLOCK_BYTES", size)
    assert read(file) == whole
    assert [row.fields["text"] for row in whole if isinstance(row, Row)] == paragraphs


def test_a_paragraph_that_is_no_text_or_does_not_end_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (fault,) = faults(write(tmp_path / "rows.txt", b"a\nb\n\nc\n\xe4\n\nd\n"))
    assert fault.startswith("rows.txt:4: byte 0xe4 at column 3 is not UTF-8 [")
    with pytest.raises(DataError, match="there is no row in this file"):
        read(write(tmp_path / "blank.txt", "\n\n"), split_by="paragraph")
    monkeypatch.setattr(reader, "MAX_ROW_BYTES", 2**10)
    monkeypatch.setattr(reader, "BLOCK_BYTES", 2**9)
    with pytest.raises(DataError, match=r"rows.txt:3: a paragraph of more than 64 MB; accepted: .* set split_by=line"):
        read(write(tmp_path / "rows.txt", "a\n\n" + "line\n" * 1000))
