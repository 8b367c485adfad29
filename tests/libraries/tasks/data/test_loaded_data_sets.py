"""``subset`` and ``loader``: a directory laid out like a data set of the hub, as ``datasets.load_dataset`` reads it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lineage.artifact import Source
from lineage.digest import DigestCache
from lineage.errors import ConfigError, DataError
from lineage.sources import Pinned, pin
from tests.unit.tasks.data.reading.written import rows_of

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
    assert files.record.stated()["loader"] == {"data_files": "german/*.jsonl"}
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
