"""How a plain text is split is identity where it is another way than it once was, and nowhere else."""

from pathlib import Path

import pytest

from lineage.artifact import Source
from lineage.digest import DigestCache
from lineage.errors import ConfigError
from lineage.sources import Pinned
from lineage.sources import pin as pin_with

LINES, PARAGRAPHS = "a\nb\n\n", "a\nb\n\nc\n"


def pin(path: Path | str, **fields: str) -> Pinned:
    return pin_with("rows", Source(path=str(path), **fields), DigestCache(None))  # type: ignore[arg-type]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    (tmp_path / "lines.txt").write_text(LINES)
    (tmp_path / "paragraphs.txt").write_text(PARAGRAPHS)
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n\n{"text": "b"}\n')
    return tmp_path


def test_the_fingerprint_of_texts_without_paragraphs_is_what_it_was(rows: Path) -> None:
    """As a version without ``split_by`` gave it."""
    assert pin(rows / "lines.txt").fingerprint == "227d64305e1757009548e4496c8ba57e54b6d9f202379213fd0d6cacc4aef389"
    assert pin(rows / "rows.jsonl").fingerprint == "adca97c231e2f67ba7c6d6cbcd05551e7404d823cd21ef977dfe0d404397fdbf"


def test_paragraphs_are_recorded_and_identity(rows: Path) -> None:
    found = pin(rows / "paragraphs.txt")
    assert found.record.reading == {"split_by": "paragraph"}
    assert found.fingerprint == pin(rows / "paragraphs.txt", split_by="paragraph").fingerprint
    stated = [pin(rows / "paragraphs.txt", split_by=each) for each in ("line", "document")]
    assert len({found.fingerprint, *(each.fingerprint for each in stated)}) == 3
    assert [each.record.reading for each in stated] == [{"split_by": "line"}, {"split_by": "document"}]


def test_a_directory_of_both_is_neither(rows: Path) -> None:
    (rows / "rows.jsonl").unlink()
    assert pin(rows).record.reading == {"split_by": "per file"}
    (rows / "paragraphs.txt").rename(rows / "README.txt")  # a note, which is not read
    assert pin(rows).record.reading == {}
    assert pin(rows / "README.txt").record.reading == {"split_by": "paragraph"}


@pytest.mark.parametrize("path", ["rows.jsonl", "quickstart:corpus", "python:os.listdir"])
def test_what_is_no_text_is_not_split(rows: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(rows)
    with pytest.raises(ConfigError, match=r"split_by=line: .* has no file of plain text; .txt, .text, .md are split"):
        pin(path, split_by="line")


def test_a_text_behind_a_url_is_split_as_it_would_be_here(rows: Path) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    for name in ("lines.txt", "paragraphs.txt"):
        memory.pipe(f"/{rows.name}/{name}", (rows / name).read_bytes())
    url = f"memory://{rows.name}"
    assert pin(f"{url}/lines.txt").record.reading == {}
    assert pin(f"{url}/paragraphs.txt").record.reading == {"split_by": "paragraph"}
    assert pin(url).record.reading == {"split_by": "per file"}
