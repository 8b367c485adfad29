"""Why a stage is stale, where what changed is how a source is read."""

import pytest

from lineage.manifest import Manifest
from tests.finished import finish


@pytest.mark.parametrize(
    ("overrides", "change"),
    [
        (["sources.rows.format=messages"], 'format: (none) -> "messages"'),
        (["sources.rows.columns={question: prompt}"], 'columns: (none) -> {"question": "prompt"}'),
        (["sources.rows.sample_count=5"], "sample_count: (none) -> 5"),
        (["sources.rows.split='train[:5]'"], 'split: "train" -> "train[:5]"'),
        (["sources.rows.shuffle_seed=1", "sources.rows.shuffle_buffer=9"],
         "shuffle_buffer: (none) -> 9; shuffle_seed: (none) -> 1"),
    ],
)  # fmt: skip
def test_the_reason_names_what_is_read_otherwise(toy, overrides, change):
    finish(toy())
    reason = toy(*overrides).stage("data").reason
    assert reason.startswith("input rows: source:rows@") and reason.endswith(f" ({change})")


def test_changed_bytes_are_no_other_reading(toy, tmp_path):
    finish(toy("sources.rows.format=text"))
    (tmp_path / "rows.txt").write_text("other rows")
    assert "(" not in toy("sources.rows.format=text").stage("data").reason


def test_a_manifest_that_says_nothing_of_the_reading_is_read(toy):
    plan = toy()
    finish(plan)
    file = plan.entry(plan.stage("data")).path / "manifest.json"
    file.write_text(file.read_text().replace(',\n        "reading": {}', ""))
    assert '"reading"' not in file.read_text()
    assert Manifest.from_json(file.read_text()).inputs["rows"].source.reading == {}
    assert {planned.state for planned in toy().stages} == {"reuse"}
    assert toy("sources.rows.sample_count=5").stage("data").reason.endswith("(sample_count: (none) -> 5)")


def test_credentials_are_not_identity_and_are_not_recorded(toy, monkeypatch):
    monkeypatch.setenv("ROWS_USER", "hunter2hunter2")
    import fsspec

    files = fsspec.filesystem("memory")
    monkeypatch.setattr("lineage.remote_files._require_options", lambda kind, credentials: None)
    files.pipe("/staleness/rows.jsonl", b"{}\n")
    path = "sources.rows.path=memory://staleness/rows.jsonl"
    plan = toy(path, "sources.rows.credentials={username: ROWS_USER}")
    finish(plan)
    assert {planned.state for planned in toy(path).stages} == {"reuse"}
    said = (plan.entry(plan.stage("data")).path / "manifest.json").read_text()
    assert "hunter2" not in said and "ROWS_USER" not in said
