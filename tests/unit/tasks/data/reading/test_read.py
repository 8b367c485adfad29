"""Rows from where a source says; each refusal names the place."""

import logging
import pickle
import re
import shutil
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict, ReadInstruction
from safetensors.numpy import save

from lineage.artifact import Source
from lineage.errors import ConfigError, DataError
from tasks.data.reading.chunk import Broken, Row, parse_split
from tasks.data.reading.python_rows import read_function
from tasks.model.fetch_model import fetch_model
from tests.unit.tasks.data.reading.written import PACKED, json_lines, read, rows_of, write
from tests.web_server import site


def texts(path: Path | str, **fields: object) -> list[tuple[object, str]]:
    rows = read(path, **fields)
    assert all(isinstance(row, Row) for row in rows), rows
    return [(row.fields["text"], row.where) for row in rows if isinstance(row, Row)]


def row(text: str) -> bytes:
    return json_lines([{"text": text}])


def test_a_directory_and_a_glob_are_read_in_order_of_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b.jsonl", "a.ndjson", "sub/d.jsonlines", "c.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name, row(name))
    write(tmp_path / "e.csv", "text\ne.csv\n")
    for name in ("README.md", "readme_zh.md", "LICENSE", "LICENSE.txt", ".gitattributes", "_SUCCESS", ".a.jsonl",
                 "dataset_infos.json"):  # fmt: skip
        write(tmp_path / name, "not read")
    assert [text for text, _ in texts(tmp_path)] == ["a.ndjson", "b.jsonl", "c.json", "e.csv", "sub/d.jsonlines"]
    assert [text for text, _ in texts(tmp_path / "[a-c].json*")] == ["b.jsonl", "c.json"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert texts("~/b.jsonl") == [("b.jsonl", f"{tmp_path}/b.jsonl:1")]


@pytest.mark.parametrize(
    "name",
    ["dev-team-chats.jsonl", "notices.jsonl", "license_questions.jsonl", "_part2.jsonl", "README.jsonl",
     "rows_test.jsonl", "latest/test_of_time.jsonl", "_new/a.jsonl", "testing-grounds/a.jsonl",
     "part-00000-of-00002.jsonl"],
)  # fmt: skip
def test_data_is_read_whatever_its_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    write(tmp_path / name, row("a"))
    assert texts(tmp_path) == [("a", f"{tmp_path}/{name}:1")]


@pytest.mark.parametrize(("target", "found"), [("elsewhere", "a directory"), ("nowhere", "nothing")])
def test_a_link_that_is_not_followed_is_named(tmp_path: Path, target: str, found: str) -> None:
    for directory in ("rows", "elsewhere"):
        (tmp_path / directory).mkdir()
        write(tmp_path / directory / "a.jsonl", row(directory))
    (tmp_path / "rows" / "b.jsonl").symlink_to(tmp_path / "elsewhere" / "a.jsonl")
    (tmp_path / "link").symlink_to(tmp_path / "rows")
    assert [text for text, _ in texts(tmp_path / "link")] == ["rows", "elsewhere"]
    (tmp_path / "rows" / "more").symlink_to(tmp_path / target)
    with pytest.raises(DataError, match=f"^{tmp_path}/rows: more is a link to {found}, which is not followed; "):
        read(tmp_path / "rows")


def test_what_nothing_reads_in_a_directory_is_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", row("a"))
    write(tmp_path / "b.xlsx", "")
    with pytest.raises(DataError, match=f"^{tmp_path}: rows of b.xlsx are not read; accepted: .jsonl, "):
        read(tmp_path)


def test_a_directory_without_data_is_refused(tmp_path: Path) -> None:
    for beside in ("", r" \(README.md and the like are not data\)"):
        with pytest.raises(DataError, match=f"^{tmp_path}: no data in this directory{beside}; accepted: .jsonl, "):
            read(tmp_path)
        write(tmp_path / "README.md", "x")


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("train-00000-of-00001.jsonl", "test-00000-of-00001.jsonl"),
        ("train/a.jsonl", "test/a.jsonl"),
        ("rows.jsonl", "Eval.jsonl"),
        ("latest.jsonl", "test_2.jsonl.gz"),
        ("data/train_sft-00000-of-00001-ab12.jsonl", "data/test_sft-00000-of-00001-ab12.jsonl"),
    ],
)
def test_the_splits_of_a_directory_are_reported_by_names_and_never_mixed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, train: str, test: str
) -> None:
    for name, text in ((train, "a"), (test, "b")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name, PACKED[".gz"](row(text)) if name.endswith(".gz") else row(text))
    with caplog.at_level(logging.WARNING):
        assert texts(tmp_path) == [("a", f"{tmp_path}/{train}:1")]
    reported = f"{tmp_path}: split=train is read; not read, because their names are of other splits: {test}"
    assert [record.getMessage() for record in caplog.records] == [reported]
    assert texts(tmp_path, split="test[:100]") == [("b", f"{tmp_path}/{test}:1")]
    with pytest.raises(
        ConfigError, match=r"no split 'validation' in it; accepted: (train, test|test, train); set split"
    ):
        read(tmp_path, split="validation")


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
        files.pipe("/bucket/old.csv.xz", b"x")
        with pytest.raises(DataError, match=r"memory://bucket: rows of old.csv.xz are not read"):
            texts("memory://bucket")
    finally:
        files.store.clear()


def test_columns_that_names_of_directories_hold_are_those_of_the_rows(tmp_path: Path) -> None:
    names = ("label=1/a", "label=0/lang=d%C3%A9/b", "label=__HIVE_DEFAULT_PARTITION__/c", "split=test/d", "x=1.jsonl/e")
    for name in names:
        place = tmp_path / "t=1" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        own = {"lang": "en"} if place.name == "b" else {}
        write(place.with_suffix(".jsonl"), json_lines([{"text": place.name, **own}]))
        with fsspec.open(f"memory://parts/{name}.jsonl", "wb") as file:
            file.write(place.with_suffix(".jsonl").read_bytes())
    of = {"a": {"label": "1"}, "b": {"label": "0", "lang": "en"}, "c": {"label": None}, "e": {"x": "1.jsonl"}}
    expected = sorted(({"text": text, **columns} for text, columns in of.items()), key=lambda row: row["text"])
    for path in (tmp_path / "t=1", "memory://parts"):
        assert sorted(rows_of(path), key=lambda row: row["text"]) == expected
    assert rows_of(tmp_path / "t=1/*=?/a.jsonl") == [{"text": "a", "label": "1"}]
    assert rows_of(tmp_path / "t=1/label=1/a.jsonl") == [{"text": "a"}]
    assert rows_of(tmp_path / "t=1", split="test") == [{"text": "d", "split": "test"}]


def test_a_web_page_is_read_with_its_query_or_without(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", row("a"))
    with site(tmp_path) as address:
        for url in (f"{address}/a.jsonl", f"{address}/a.jsonl?page=b/c.csv"):
            assert texts(url) == [("a", f"{url}:1")]


def test_a_saved_data_set_is_read_at_its_split(tmp_path: Path) -> None:
    Dataset.from_dict({"text": ["a"]}).save_to_disk(tmp_path / "one")
    DatasetDict({"test": Dataset.from_dict({"text": ["t", "u"]})}).save_to_disk(tmp_path / "split")
    assert texts(tmp_path / "one") == [("a", f"{tmp_path}/one[0]")]
    where = f"{tmp_path}/split"
    assert texts(tmp_path / "split", split="test") == [("t", f"{where}[0]"), ("u", f"{where}[1]")]
    for place, split, there in (("split", "train", "test"), ("one", "test", "train")):
        with pytest.raises(ConfigError, match=f"/{place}: no split {split!r} in it; accepted: {there}; set split to"):
            read(tmp_path / place, split=split)


def test_a_data_set_that_is_not_there_is_refused() -> None:
    with pytest.raises(DataError, match=re.escape("no/such/rows.jsonl: `datasets` reads no split 'train' from it")):
        read("no/such/rows.jsonl")


def test_a_file_has_no_splits_but_slices_that_the_counting_stage_cuts(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", row("a") + row("b"))
    assert len(read(file, split="train[:1]")) == 2
    for path in (file, "quickstart:preferences", "python:json.loads"):
        with pytest.raises(
            ConfigError, match=f"^{path}: split='test' of a source without splits; a slice of all rows is"
        ):
            read(path, split="test")


def test_a_model_of_the_hub_is_fetched_at_its_commit_without_pickles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, dict[str, object]]] = []

    def snapshot_download(repo_id: str, **options: object) -> str:
        calls.append((repo_id, options))
        write(tmp_path / "config.json", "{}")
        (tmp_path / "model.safetensors").write_bytes(save({}))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert fetch_model(Source(path="owner/name", revision="abc"), tmp_path) == tmp_path
    (repo_id, options), patterns = calls[0], calls[0][1]["allow_patterns"]
    assert (repo_id, options["revision"]) == ("owner/name", "abc")
    assert isinstance(patterns, list)
    assert "*.safetensors" in patterns
    assert not {"*.bin", "*.pt", "*.pkl", "*"} & set(patterns)


@pytest.mark.parametrize("count", [100, 333, 2001])
@pytest.mark.parametrize(
    "bounds", ["90%:", ":10%", "10%:20%", ":100", "50:100", "-100:", "-50:-10", ":-1%", "-33%:", "7:", ":", "33%:66%"]
)
def test_a_slice_is_what_datasets_takes_it_for(bounds: str, count: int) -> None:
    name, part = parse_split(f"dev[{bounds}]")
    assert part
    expected = ReadInstruction.from_spec(f"dev[{bounds}]").to_absolute({"dev": count})[0]
    assert (name, *part.bounds(count)) == ("dev", expected.from_ or 0, count if expected.to is None else expected.to)


@pytest.mark.parametrize("bounds", ["300:", "5:5", "20:10", ":0", "90%:80%"])
def test_a_slice_of_no_row_is_refused(bounds: str) -> None:
    _, part = parse_split(f"train[{bounds}]")
    with pytest.raises(DataError, match="of 300 rows has no row; set a part that has at least one row"):
        assert part and part.bounds(300)


def test_a_name_alone_is_the_whole_split_and_a_slice_ends_with_the_last_row():
    for text in ("train", "validation", "test_2.a-b"):
        assert parse_split(text) == (text, None)
    ends = {"[:1000]": 1000, "[10:20]": 20, "[10:]": None, "[:10%]": None, "[-10:]": None, "[:-10]": None}
    assert {text: parse_split(f"train{text}")[1].last for text in ends} == ends  # where no count is needed
    assert parse_split("train[:1000]")[1].bounds(300) == (0, 300)


@pytest.mark.parametrize(
    "text", ["", "train[", "train[5]", "train[a:]", "train[1.5%:]", "train[:101%]", "train+test", "train[::2]", "[:5]"]
)
def test_what_is_no_split_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"split={text!r}: a split, or a part of one in rows or percent")):
        parse_split(text)


@pytest.fixture
def function_rows(tmp_path):
    """Reads the rows of a function of this code."""
    file = tmp_path / "mine.py"

    def rows(code: str, name: str = "rows") -> list[Row | Broken]:
        # Python runs the bytecode of a file whose size and second of change are those of its last import.
        shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
        file.write_text(code)
        chunks = list(read_function(Source(path=f"python:{file}:{name}", allow_code=True)))
        return [row for chunk in chunks for row in pickle.loads(pickle.dumps(chunk)).rows()]

    return rows


def test_what_a_function_yields_are_rows_with_their_index(function_rows, tmp_path):
    rows = function_rows("def rows():\n    for i in range(2500): yield {'text': str(i), 'n': [i, None]}\n")
    assert [row.fields for row in rows] == [{"text": str(i), "n": [i, None]} for i in range(2500)]
    assert rows[1000].where == f"python:{tmp_path}/mine.py:rows[1000]"


def test_a_function_of_a_module_is_read_as_rows_are_needed_and_what_it_prints_stays_apart(
    function_rows, tmp_path, monkeypatch, capsys
):
    code = (
        "def rows(count=2):\n    return [{'text': 'a'}] * count\ndef endless():\n    while True: yield {'text': 'a'}\n"
    )
    (tmp_path / "rows_of_mine.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    (chunk,) = read_function(Source(path="python:rows_of_mine.rows"))
    assert [row.fields for row in chunk.rows()] == [{"text": "a"}] * 2
    chunks = read_function(Source(path=f"python:{tmp_path}/rows_of_mine.py:endless", allow_code=True))
    assert len(list(next(chunks).rows())) == 1000
    arrays = "import numpy as np\ndef rows(): yield {'a': None, 'b': np.array([1.5]), 'c': np.float32(2)}"
    assert [row.fields for row in function_rows(arrays)] == [{"a": None, "b": [1.5], "c": 2.0}]
    function_rows("print('loaded')\ndef rows():\n    print('called')\n    yield {'text': 'a'}\n    print('done')\n")
    assert capsys.readouterr() == ("", "loaded\ncalled\ndone\n")


_ODD = """
class Hostile:
    def __repr__(self):
        raise ValueError("no")

def hostile():
    return Hostile()

def deep():
    value = []
    for _ in range(5000):
        value = [value]
    return {'text': value}

"""


@pytest.mark.parametrize(
    ("item", "problem", "reason"),
    [
        ("['a']", "the function yielded list; accepted: a function that takes no", "not a mapping"),
        ("{'text': object()}", "not JSON: Type is not JSON serializable: object", "not JSON"),
        (
            "{'text': float('nan'), 'none': None}",
            "not JSON: Out of range float values are not JSON compliant",
            "not JSON",
        ),
        ("deep()", "not JSON: Recursion limit reached", "not JSON"),
        ("hostile()", "the function yielded Hostile", "not a mapping"),
        ("{'text': hostile()}", "not JSON: Type is not JSON serializable: Hostile", "not JSON"),
        ("{'text': '\\ud800'}", "not JSON: str is not valid UTF-8: surrogates not allowed", "not JSON"),
    ],
)
def test_an_item_that_is_no_row_is_reported_with_its_index(item, problem, reason, function_rows, tmp_path):
    good, bad, last = function_rows(
        _ODD + f"def rows():\n    yield {{'text': 'a'}}\n    yield {item}\n    yield {{'text': 'b'}}\n"
    )
    assert isinstance(good, Row) and isinstance(bad, Broken) and isinstance(last, Row)
    assert bad.problem.startswith(problem) and bad.reason == reason
    assert bad.where == f"python:{tmp_path}/mine.py:rows[1]" and last.where.endswith("[2]")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("rows = 5", r"mine.py:rows: it is int; accepted: a function that takes no argument"),
        ("", r"mine.py:rows: it is nothing"),
        ("def rows(path): ...", r"mine.py:rows: missing a required argument: 'path' in \(path\); accepted: "),
        ("def rows(): return 5", r"mine.py:rows: it returned int; .*; yield the rows"),
        ("def rows():\n    yield {}\n    int('a')", r"mine.py:3: ValueError: invalid literal .*; correct the function"),
        ("import sys\ndef rows():\n    yield {}\n    sys.exit()", r"mine.py:4: SystemExit: .*; correct the function"),
        ("import nowhere", r"mine.py:1: ModuleNotFoundError: No module named 'nowhere'; correct the function"),
        ("def rows(:", r"mine.py:rows: SyntaxError: "),
    ],
)
def test_a_function_that_cannot_be_read_is_named(code, message, function_rows):
    with pytest.raises(DataError, match=message):
        function_rows(code)


def test_a_bucket_has_splits_as_a_directory_has(caplog: pytest.LogCaptureFixture) -> None:
    files = fsspec.filesystem("memory")
    files.pipe({f"/test/rows/{name}": row(name) for name in ("train.jsonl", "test.jsonl", "dev/a.jsonl")})
    try:
        for path in ("memory://test/rows", "memory://test/rows/"):
            assert [text for text, _ in texts(path)] == ["train.jsonl"]
        assert caplog.messages[0] == (
            "memory://test/rows: split=train is read; not read, because their names are of other splits: "
            "test.jsonl, dev/a.jsonl"
        )
        assert [text for text, _ in texts("memory://test/rows", split="test")] == ["test.jsonl"]
        assert [text for text, _ in texts("memory://test/rows/*.jsonl")] == ["test.jsonl", "train.jsonl"]
        assert [text for text, _ in texts("memory://test/rows/test.jsonl")] == ["test.jsonl"]
        for path in ("memory://test/rows/test.jsonl", "memory://test/rows/*.jsonl"):
            with pytest.raises(ConfigError, match="split='test' of a source without splits"):
                read(path, split="test")
    finally:
        files.store.clear()
