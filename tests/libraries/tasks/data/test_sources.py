"""Data sets of the hub and those laid out like them; the beginning of a pair, as TRL takes it."""

import json
from dataclasses import replace
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, IterableDataset, disable_progress_bars
from hypothesis import given
from hypothesis import strategies as st
from trl.data_utils import extract_prompt

from lineage.artifact import Kind, Source
from lineage.errors import ConfigError, DataError
from lineage.filesystem.digest import DigestCache, digest_file
from lineage.source.sources import Pinned, pin
from tasks.context import TrainContext
from tasks.data.formats.turns import common_beginning
from tasks.data.kinds import HELD_OUT, TRAIN
from tasks.data.reading.chunk import Row
from tasks.prepare_data import PrepareConversations
from tasks.recipe import Input
from tests.unit.tasks.data.reading.written import read, rows_of


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """A hub with a set of 3,000 numbers. Returns what it was asked for."""
    asked: list[dict[str, object]] = []
    rows = Dataset.from_dict({"number": list(range(3000))})

    def load_dataset(path: str, *, streaming: bool, **options: object) -> Dataset | IterableDataset:
        asked.append({"path": path, "streaming": streaming, **options})
        return rows.to_iterable_dataset() if streaming else rows

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    return asked


def test_a_set_of_the_hub_is_read_whole_at_its_revision(hub: list[dict[str, object]]) -> None:
    rows = read("owner/name", revision="abc", split="dev[10%:]")
    assert [row.fields["number"] for row in rows if isinstance(row, Row)] == list(range(3000))
    assert rows[1234].where == "owner/name[1234]"
    assert hub == [{"path": "owner/name", "streaming": False, "name": None, "revision": "abc", "split": "dev"}]


def test_subset_and_loader_are_passed_on(hub: list[dict[str, object]]) -> None:
    read("owner/name", revision="abc", subset="german", loader={"data_files": "a/*.parquet"})
    assert hub[0]["name"] == "german" and hub[0]["data_files"] == "a/*.parquet"


def test_a_stream_ends_with_its_slice_or_its_sample(hub: list[dict[str, object]]) -> None:
    def numbers(**fields: object) -> list[object]:
        return [row["number"] for row in rows_of("owner/name", streaming=True, **fields)]  # type: ignore[index]

    assert numbers(split="train[100:1500]") == list(range(1500))
    assert numbers(sample_count=7) == list(range(7))
    # A slice is of the rows as they stand: the sample is drawn from it later.
    assert numbers(split="train[:1500]", sample_count=7, shuffle_seed=1) == list(range(1500))
    drawn = numbers(sample_count=7, shuffle_seed=1)
    assert len(set(drawn)) == 7 and max(map(int, map(str, drawn))) > 100
    assert drawn == numbers(sample_count=7, shuffle_seed=1) != numbers(sample_count=7, shuffle_seed=2)
    assert max(map(int, map(str, numbers(sample_count=7, shuffle_seed=1, shuffle_buffer=10)))) < 20
    assert all(each["split"] == "train" and each["streaming"] for each in hub)


@pytest.mark.parametrize("split", ["train", "train[90%:]", "train[:90%]", "train[-100:]", "train[100:]"])
def test_a_stream_without_an_end_is_refused(hub: list[dict[str, object]], split: str) -> None:
    with pytest.raises(ConfigError, match=r"owner/name: streaming without an end.*set sample_count, or a slice"):
        read("owner/name", streaming=True, split=split)
    assert not hub


CARD = """---
configs:
- config_name: english
  data_files:
  - {split: train, path: english/train.jsonl}
  - {split: test, path: english/test.jsonl}
- config_name: german
  data_files: german/*.jsonl
---
"""


@pytest.fixture
def data_set(tmp_path: Path) -> Path:
    for name, words in (("english/train", "one two"), ("english/test", "three"), ("german/all", "eins zwei drei")):
        path = tmp_path / "set" / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps({"text": word}) + "\n" for word in words.split()))
    (tmp_path / "set" / "README.md").write_text(CARD)
    (tmp_path / "set" / "table.csv").write_text("text;n\nvier;4\n")
    return tmp_path / "set"


def texts(path: Path, **fields: object) -> list[object]:
    return [row["text"] for row in rows_of(str(path), **fields)]  # type: ignore[index]


def pinned(path: Path, **fields: object) -> Pinned:
    return pin("rows", replace(Source(path=str(path)), **fields), DigestCache(None))  # type: ignore[arg-type]


def test_a_subset_is_read_as_its_card_declares_it(data_set: Path) -> None:
    assert texts(data_set, subset="english") == ["one", "two"]
    assert texts(data_set, subset="english", split="test") == ["three"]
    assert texts(data_set, subset="german") == ["eins", "zwei", "drei"]


def test_loader_arguments_reach_the_builder(data_set: Path) -> None:
    assert texts(data_set, loader={"data_files": "german/*.jsonl"}) == ["eins", "zwei", "drei"]
    assert texts(data_set, loader={"data_dir": "german"}) == ["eins", "zwei", "drei"]
    assert texts(data_set, loader={"data_files": "table.csv", "sep": ";"}) == ["vier"]
    assert texts(data_set, loader={"data_files": {"dev": "english/test.jsonl"}}, split="dev") == ["three"]


def test_both_are_identity_and_recorded_and_nothing_else_moves(data_set: Path) -> None:
    plain = pinned(data_set)
    english, german = pinned(data_set, subset="english"), pinned(data_set, subset="german")
    files = pinned(data_set, loader={"data_files": "german/*.jsonl"})
    assert len({each.fingerprint for each in (plain, english, german, files)}) == 4
    assert english.record.reading == {"subset": "english"}
    assert files.record.configured()["loader"] == {"data_files": "german/*.jsonl"}
    assert pin("rows", english.source, DigestCache(None)).fingerprint == english.fingerprint
    (data_set / "README.md").write_text(CARD.replace("german/*", "german/a*"))
    assert pinned(data_set, subset="english").fingerprint != english.fingerprint


def test_a_subset_that_is_not_there_is_named(data_set: Path) -> None:
    with pytest.raises(DataError, match=r"BuilderConfig 'french' not found.*set split or subset"):
        texts(data_set, subset="french")


def test_a_set_with_several_subsets_asks_for_one(data_set: Path) -> None:
    with pytest.raises(DataError, match=r"Config name is missing.*set split or subset"):
        texts(data_set, loader={"verification_mode": "no_checks"})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loader": {"name": "german"}}, r"loader\.name: not accepted; .*use sources\.rows\.subset"),
        ({"loader": {"trust_remote_code": True}}, r"loader\.trust_remote_code: .*runs no code"),
        ({"loader": {"seperator": ";"}}, r"loader\.seperator: not accepted; accepted: .*sep.*; remove it"),
        ({"loader": {"data_files": "https://host/a.jsonl"}}, r"data_files=https://host/a.jsonl: is outside .*pinned"),
        ({"loader": {"data_files": {"train": ["../other.jsonl"]}}}, r"data_files=\.\./other\.jsonl: is outside"),
        ({"loader": {"data_dir": "/etc"}}, r"data_dir=/etc: is outside"),
        ({"subset": "english", "split_by": "line"}, r"split_by=line: .*does not read it; remove it"),
    ],
)
def test_the_plan_refuses_what_cannot_be_loaded(data_set: Path, fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pinned(data_set, **fields)


def test_a_file_has_no_subset(data_set: Path) -> None:
    with pytest.raises(ConfigError, match=r"sources.rows.subset: .*table.csv is not read by `datasets.load_dataset`"):
        pinned(data_set / "table.csv", subset="english")


@given(
    begin=st.text("ab ", max_size=4), chosen=st.text("ab ", min_size=1, max_size=4),
    rejected=st.text("ab ", min_size=1, max_size=4),
)  # fmt: skip
def test_the_beginning_is_that_of_trl(begin: str, chosen: str, rejected: str) -> None:
    pair = {"chosen": begin + chosen, "rejected": begin + rejected}
    end = common_beginning(pair["chosen"], pair["rejected"])
    if end == 0 or chosen == rejected:
        return  # refused by us; TRL counts from the end where nothing is common
    assert extract_prompt(pair) == {
        "prompt": pair["chosen"][:end], "chosen": pair["chosen"][end:], "rejected": pair["rejected"][end:]
    }  # fmt: skip


def _turns(index: int) -> list[dict[str, object]]:
    """A conversation with a call, whose arguments differ from row to row."""
    arguments = {f"key {number}": f"value {index}" for number in range(index % 3 + 1)}
    call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
    return [
        {"role": "user", "content": f'What is "{index}"?'},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": f"a number\n{index}"},
        {"role": "assistant", "content": f"It is {index}."},
    ]


SAME = [{"system": f"Be brief, {index % 2}.", "messages": _turns(index)} for index in range(12)]
AS_TEXT = [{**row, "messages": json.dumps(row["messages"])} for row in SAME]


def _by_duckdb(file: Path, text: str, messages: str) -> None:
    """Parquet by DuckDB, with columns of these types."""
    with duckdb.connect() as connection:
        types = f"{{system: '{text}', messages: '{messages}'}}"
        rows = f"read_json('{file.parent}/rows.jsonl', format='newline_delimited', columns={types})"
        connection.execute(f"COPY (SELECT * FROM {rows}) TO '{file}' (FORMAT parquet)")


CALL_OF_MAP = "STRUCT(type VARCHAR, function STRUCT(name VARCHAR, arguments MAP(VARCHAR, VARCHAR)))"
WITH_MAPS = f"STRUCT(role VARCHAR, content VARCHAR, tool_calls {CALL_OF_MAP}[])[]"


def _ways(directory: Path) -> dict[str, dict[str, object]]:
    """The same rows in all ways: name -> the source's fields."""
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SAME))
    (directory / "rows.json").write_text(json.dumps(SAME))
    pq.write_table(pa.Table.from_pylist(SAME), directory / "pyarrow.parquet")
    pq.write_table(pa.Table.from_pylist(AS_TEXT), directory / "texts.parquet")
    _by_duckdb(directory / "duckdb.parquet", "JSON", "JSON")
    _by_duckdb(directory / "maps.parquet", "VARCHAR", WITH_MAPS)
    (directory / "set").mkdir()
    (directory / "set" / "rows.jsonl").write_bytes((directory / "rows.jsonl").read_bytes())
    loaded = Dataset.from_json(str(directory / "rows.jsonl"), cache_dir=str(directory / "cache"))
    assert "json" in str(loaded.with_format("arrow")[:1].schema), "it has Arrow's type of JSON"
    loaded.to_parquet(str(directory / "datasets.parquet"))
    loaded.save_to_disk(str(directory / "saved"))
    files = ("rows.jsonl", "rows.json", "pyarrow.parquet", "texts.parquet", "duckdb.parquet", "maps.parquet")
    places = [*files, "datasets.parquet", "saved"]
    ways: dict[str, dict[str, object]] = {name: {"path": str(directory / name)} for name in places}
    return {**ways, "loader": {"path": str(directory / "set"), "loader": {"data_files": "rows.jsonl"}}}


def test_the_same_rows_have_the_same_digest_in_whatever_way_they_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hub")
    disable_progress_bars()
    found = {}
    for name, fields in _ways(tmp_path).items():
        source = Source(**fields)  # type: ignore[arg-type]
        given = Input(name="rows", kind=Kind.ROWS, fingerprint="", path=Path(source.path), source=source)
        out = tmp_path / f"of {name}"
        PrepareConversations(held_out=0.3).run({"rows": given}, TrainContext(output_dir=out, work_dir=tmp_path))
        found[name] = [digest_file(out / side) for side in (TRAIN, HELD_OUT)]
    rows = pq.read_table(tmp_path / "of rows.jsonl" / TRAIN).to_pylist()
    assert rows[0]["messages"][0]["role"] == "system"
    assert {name: digests for name, digests in found.items() if digests != found["rows.jsonl"]} == {}
