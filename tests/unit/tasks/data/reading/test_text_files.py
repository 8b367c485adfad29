"""Plain text: a document per line; Markdown: a document per file."""

from pathlib import Path

import pytest

from lineage.errors import DataError
from tasks.data.reading import text_files
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
    problem = (
        "byte 0xe4 at column 3 is not UTF-8; UTF-8 is accepted; convert the file: "
        "`iconv -f ENCODING -t UTF-8 FILE > NEW`, or mend the line [not UTF-8]"
    )
    assert faults(write(tmp_path / "rows.txt", b"a\nbc\xe4\nd\n")) == [f"rows.txt:2: {problem}"]
    assert faults(write(tmp_path / "doc.md", b"bc\xe4")) == [f"doc.md: {problem}"]


def test_a_document_that_is_blank_or_too_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "MAX_ROW_BYTES", 2**20)
    for content, message in (
        (" \n", ": blank lines alone; at least one row is accepted; write it again or leave it out"),
        ("x" * (2**20 + 1), ": a document of more than 1 MB; a Markdown file is read as one row; "
                            "split it, or name it .txt for one row per line"),
    ):  # fmt: skip
        file = write(tmp_path / "doc.md", content)
        with pytest.raises(DataError) as refusal:
            read(file)
        assert str(refusal.value) == f"{file}{message}"
