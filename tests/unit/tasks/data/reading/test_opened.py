"""Files that are not what their names say, or are damaged, are refused as what they are."""

import gzip
from pathlib import Path

import pytest

from lineage.errors import DataError
from tests.unit.tasks.data.reading.written import PACKED, json_lines, read, write

_ROWS = json_lines([{"text": f"row {number}"} for number in range(2000)])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"a": 1}'.encode("utf-16"),
         " is UTF-16 (by its byte order mark); UTF-8 is accepted; convert it: `iconv -f UTF-16 -t UTF-8 FILE > NEW`"),
        ('{"a": 1}'.encode("utf-32"),
         " is UTF-32 (by its byte order mark); UTF-8 is accepted; convert it: `iconv -f UTF-32 -t UTF-8 FILE > NEW`"),
        (b"\xfe\xff\0{",
         " is UTF-16 (by its byte order mark); UTF-8 is accepted; convert it: `iconv -f UTF-16 -t UTF-8 FILE > NEW`"),
        *((f'{letter}", "q": 1'.encode(f"utf-16-{order}"),
           f" is UTF-16 (every second byte is 0); UTF-8 is accepted; convert it: `iconv -f UTF-16{order.upper()} -t "
           "UTF-8 FILE > NEW`") for order in ("le", "be") for letter in "{q"),
        (PACKED[".gz"](_ROWS), " is gzip; text is accepted; if it is packed text, add .gz to its name"),
        (PACKED[".zst"](_ROWS), " is Zstandard; text is accepted; if it is packed text, add .zst to its name"),
        (PACKED[".bz2"](_ROWS), " is bzip2; text is accepted; if it is packed text, add .bz2 to its name"),
        (b"PK\x03\x04...", " is a zip archive, or a workbook of Excel; text is accepted; unpack it, or save it as CSV"),
        (b"PAR1...", " is Parquet; text is accepted; name it .parquet"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
         " is a pointer of Git LFS, not the data; the data is accepted; run `git lfs pull`"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv", "rows.txt", "rows.md"])
def test_what_is_no_text_is_named_as_what_it_is(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    file = write(tmp_path / name, content)
    with pytest.raises(DataError) as refusal:
        read(file)
    assert str(refusal.value) == f"{file}{message}"


@pytest.mark.parametrize(("suffix", "kind"), [(".gz", "gzip"), (".zst", "zstd"), (".bz2", "bz2")])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv", "rows.txt", "rows.parquet"])
def test_a_packed_file_that_was_cut_or_damaged_is_refused(tmp_path: Path, name: str, suffix: str, kind: str) -> None:
    whole = PACKED[suffix](_ROWS)
    for content in (whole[:-5], b"none of it", whole + b"more"):
        file = write(tmp_path / f"{name}{suffix}", content)
        with pytest.raises(DataError) as refusal:
            read(file)
        assert str(refusal.value).startswith(f"{file}: cannot be unpacked (")
        assert str(refusal.value).endswith(
            f"; {kind} is accepted, to its end; it was cut or damaged: write or download it again"
        )


def test_suffixes_are_read_in_any_case(tmp_path: Path) -> None:
    assert len(read(write(tmp_path / "rows.JSONL.GZ", gzip.compress(_ROWS)))) == 2000


def test_parts_packed_one_after_the_other_are_one_file(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl.gz", gzip.compress(_ROWS) + gzip.compress(_ROWS))
    assert len(read(file)) == 4000


def test_a_file_that_may_not_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "rows.jsonl", _ROWS)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError) as refusal:
        read(file)
    assert str(refusal.value) == (
        f"{file}: cannot be read ([Errno 13] Permission denied); a file that you may read is accepted; "
        "check its permissions"
    )


@pytest.mark.parametrize("name", ["rows.xlsx", "rows.jsonl.xz", "rows", "rows.zip"])
def test_a_file_that_nothing_reads_is_refused(tmp_path: Path, name: str) -> None:
    file = write(tmp_path / name, "x")
    with pytest.raises(DataError) as refusal:
        read(file)
    assert str(refusal.value) == (
        f"{file}: rows are not read from {file.suffix or 'a file without a suffix'}; accepted: .jsonl, .ndjson, "
        ".jsonlines, .json, .parquet, .arrow, .feather, .csv, .tsv, .txt, .text, .md, each also with .gz, .zst or "
        ".bz2; convert or unpack it"
    )
