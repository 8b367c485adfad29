"""Plain text: a document per line; Markdown: a document per file."""

from pathlib import Path

import pytest

from lineage.errors import DataError
from tasks.data.reading import lines
from tasks.data.reading.chunk import Row
from tests.unit.tasks.data.reading.written import PACKED, faults, read, rows_of, write


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
    monkeypatch.setattr(lines, "MAX_ROW_BYTES", 2**20)
    for content, message in (
        (" \n", ": blank lines alone; at least one row is accepted; write it again or leave it out"),
        ("x" * (2**20 + 1), ": a document of more than 1 MB; the file is read as one row; "
                            "split it, or state split_by=paragraph or split_by=line"),
    ):  # fmt: skip
        file = write(tmp_path / "doc.md", content)
        with pytest.raises(DataError) as refusal:
            read(file)
        assert str(refusal.value) == f"{file}{message}"


TWO = "the first\nof two lines\n \t\r\n\n\nthe second\r\nof\r\ntwo\r\n"  # paragraphs


@pytest.mark.parametrize("packed", PACKED)
def test_blank_lines_part_paragraphs(tmp_path: Path, packed: str) -> None:
    file = write(tmp_path / f"rows.txt{packed}", PACKED[packed](TWO.encode()))
    assert rows_of(file) == [{"text": "the first\nof two lines"}, {"text": "the second\nof\ntwo"}]
    assert [row.where for row in read(file)] == [f"{file}:1", f"{file}:6"]
    assert rows_of(file, split_by="paragraph") == rows_of(file)


def test_each_way_to_split_a_text_makes_other_rows(tmp_path: Path) -> None:
    text, markdown = write(tmp_path / "rows.txt", TWO), write(tmp_path / "rows.md", TWO)
    paragraphs = [{"text": "the first\nof two lines"}, {"text": "the second\nof\ntwo"}]
    lines = [{"text": each} for each in ("the first", "of two lines", "the second", "of", "two")]
    document = [{"text": TWO.replace("\r\n", "\n")}]
    for split_by, rows in (("line", lines), ("paragraph", paragraphs), ("document", document)):
        assert rows_of(text, split_by=split_by) == rows_of(markdown, split_by=split_by) == rows
    assert (rows_of(text), rows_of(markdown)) == (paragraphs, document)
    assert [row.where for row in read(text, split_by="document")] == [str(text)]


def test_blank_lines_before_and_after_all_others_part_nothing(tmp_path: Path) -> None:
    assert rows_of(write(tmp_path / "rows.txt", "\n\na\nb\n \n\n")) == [{"text": "a"}, {"text": "b"}]


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
    monkeypatch.setattr(lines, "BLOCK_BYTES", size)
    assert read(file) == whole
    assert [row.fields["text"] for row in whole if isinstance(row, Row)] == paragraphs


def test_a_paragraph_that_is_no_text_or_does_not_end_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (fault,) = faults(write(tmp_path / "rows.txt", b"a\nb\n\nc\n\xe4\n\nd\n"))
    assert fault.startswith("rows.txt:4: byte 0xe4 at column 3 is not UTF-8 [")
    with pytest.raises(DataError, match="blank lines alone"):
        read(write(tmp_path / "blank.txt", "\n\n"), split_by="paragraph")
    monkeypatch.setattr(lines, "MAX_ROW_BYTES", 2**10)
    monkeypatch.setattr(lines, "BLOCK_BYTES", 2**9)
    with pytest.raises(DataError, match=r"rows.txt:3: a paragraph of more than 0 MB; .* state split_by=line"):
        read(write(tmp_path / "rows.txt", "a\n\n" + "line\n" * 1000))
