"""Rows and models from where a source says; each refusal names the place."""

import re
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lineage.artifact import Source
from lineage.errors import ConfigError, DataError
from tasks.data.reading.read import read_rows
from tasks.fetch_model import fetch_model
from tests.site import site


def written(directory: Path, name: str, content: bytes | str) -> Path:
    path = directory / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def texts(path: Path | str, **fields: str) -> list[tuple[object, str]]:
    return [(row.fields["text"], row.where) for row in read_rows(Source(path=str(path), **fields))]  # type: ignore[arg-type]


def test_lines_of_json_are_rows_named_by_file_and_line(tmp_path: Path) -> None:
    file = written(tmp_path, "rows.jsonl", '\ufeff{"text": "a"}\n\n{"text": "ü"}')
    assert texts(file) == [("a", f"{file}:1"), ("ü", f"{file}:3")]


def test_a_directory_and_a_glob_are_read_in_order_of_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b.jsonl", "a.ndjson", "c.jsonlines"):
        written(tmp_path, name, f'{{"text": "{name}"}}\n')
    written(tmp_path, "notes.txt", "not read")
    assert [text for text, _ in texts(tmp_path)] == ["a.ndjson", "b.jsonl", "c.jsonlines"]
    assert [text for text, _ in texts(tmp_path / "*.jsonl*")] == ["b.jsonl", "c.jsonlines"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert [text for text, _ in texts("~/b.jsonl")] == ["b.jsonl"]


def test_parquet_is_read_through_datasets(tmp_path: Path) -> None:
    file = tmp_path / "train.parquet"
    pq.write_table(pa.table({"text": ["a", "b"]}), file)
    assert texts(file) == [("a", f"{file}[0]"), ("b", f"{file}[1]")]
    assert texts(tmp_path) == [("a", f"{tmp_path}[0]"), ("b", f"{tmp_path}[1]")]


def test_a_bucket_is_read_in_order_of_name_and_its_rows_are_named_by_url(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["c"]}), tmp_path / "c.parquet")
    files = fsspec.filesystem("memory")
    files.pipe({"/bucket/b.jsonl": b'{"text": "b"}', "/bucket/c.parquet": (tmp_path / "c.parquet").read_bytes()})
    try:
        assert texts("memory://bucket") == [
            ("b", "memory:///bucket/b.jsonl:1"), ("c", "memory:///bucket/c.parquet[0]"),
        ]  # fmt: skip
        files.pipe({"/bucket/README.md": b"x", "/bucket/.hidden": b"x"})
        assert [text for text, _ in texts("memory://bucket")] == ["b", "c"]
        with pytest.raises(DataError, match=r"memory:///bucket/README.md: rows are not read from .md"):
            texts("memory://bucket/README.md")
        files.pipe("/bucket/old.csv.gz", b"x")
        with pytest.raises(DataError, match=r"memory:///bucket/old.csv.gz: rows are not read from .gz"):
            texts("memory://bucket")
    finally:
        files.store.clear()


def test_a_web_page_is_read_with_its_query_or_without(tmp_path: Path) -> None:
    written(tmp_path, "a.jsonl", '{"text": "a"}')
    with site(tmp_path) as address:
        for url in (f"{address}/a.jsonl", f"{address}/a.jsonl?token=b/c.csv"):
            assert texts(url) == [("a", f"{url}:1")]


def test_a_saved_data_set_is_read_at_its_split(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    Dataset.from_dict({"text": ["a"]}).save_to_disk(tmp_path / "one")
    DatasetDict({"test": Dataset.from_dict({"text": ["t"]})}).save_to_disk(tmp_path / "split")
    assert texts(tmp_path / "one") == [("a", f"{tmp_path}/one[0]")]
    assert texts(tmp_path / "split", split="test") == [("t", f"{tmp_path}/split[0]")]
    with pytest.raises(DataError, match="`datasets` reads no split 'train' from it"):
        texts(tmp_path / "split")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b'{"text": "a"}\n{"text": "b"\n',
            ":2: not JSON: Expecting ',' delimiter at column 1; one JSON object per line is accepted; "
            "mend or remove the line",
        ),
        (
            b'[\n{"text": "a"}\n]\n',
            ":1: not JSON: Expecting value at column 1; one JSON object per line is accepted; "
            "for one array over the whole file, write its items as lines: `jq -c '.[]' FILE > FILE.jsonl`",
        ),
        (b'"text"\n', ":1: a JSON str; one JSON object per line is accepted; mend or remove the line"),
        (
            b'{"text": "a"}\n{"text": "\xe4"}\n',
            ":2: byte 0xe4 at column 11 is not UTF-8; UTF-8 is accepted; "
            "convert the file, such as with `iconv -f ENCODING -t UTF-8`",
        ),
        (b"\n", ': no rows; give at least one row, such as a line {"text": "..."}'),
    ],
)
def test_a_line_that_cannot_be_read_is_named_with_what_to_do(tmp_path: Path, content: bytes, message: str) -> None:
    file = written(tmp_path, "rows.jsonl", content)
    with pytest.raises(DataError) as refusal:
        texts(file)
    assert str(refusal.value) == f"{file}{message}"


def test_a_file_that_is_not_there_is_refused() -> None:
    with pytest.raises(DataError, match=re.escape("no/such/rows.jsonl: `datasets` reads no split 'train' from it")):
        texts("no/such/rows.jsonl")


def test_a_model_directory_is_used_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json in .*; save it with model\.save_pretrained"):
        fetch_model(Source(path=str(tmp_path)))
    written(tmp_path, "config.json", "{}")
    written(tmp_path, "pytorch_model.bin", "")
    with pytest.raises(ConfigError, match="no weights in safetensors"):
        fetch_model(Source(path=str(tmp_path)))
    written(tmp_path, "model.safetensors", "")
    assert fetch_model(Source(path=str(tmp_path))) == tmp_path


def test_a_model_of_the_hub_is_fetched_at_its_commit_without_pickles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, dict[str, object]]] = []

    def snapshot_download(repo_id: str, **options: object) -> str:
        calls.append((repo_id, options))
        written(tmp_path, "config.json", "{}")
        written(tmp_path, "model.safetensors", "")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert fetch_model(Source(path="owner/name", revision="abc")) == tmp_path
    (repo_id, options), patterns = calls[0], calls[0][1]["allow_patterns"]
    assert (repo_id, options["revision"]) == ("owner/name", "abc")
    assert isinstance(patterns, list)
    assert "*.safetensors" in patterns
    assert not {"*.bin", "*.pt", "*.pkl", "*"} & set(patterns)
