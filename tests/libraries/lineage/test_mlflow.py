"""How a manifest and ``metrics.jsonl`` read in MLflow's words."""

import json
from dataclasses import replace

import pytest

from lineage.mlflow.entities import Reports, model_name, parameters, produces, source_data, stage_data
from tests.written_store import WrittenStore


@pytest.fixture
def store(tmp_path):
    return WrittenStore(tmp_path)


def test_parameters_are_the_recipe_flat():
    recipe = {"method": "DPO", "beta": 0.1, "adapter": {"rank": 16, "dropout": 0.0}, "stops": ["a", "b"]}
    assert dict(parameters(recipe)) == {
        "method": "DPO", "beta": "0.1", "adapter.rank": "16", "adapter.dropout": "0.0", "stops": '["a", "b"]',
    }  # fmt: skip


def test_a_source_keeps_its_whole_digest_where_mlflow_cuts_it(store):
    record = store.source("corpus", labels=["cc-by-4.0"])
    data = source_data("rows", record, 7.0).dataset
    assert (data.name, data.digest, data.source_type) == ("corpus", record.digest[:36], "local")
    assert json.loads(data.source) == {"uri": "/data/corpus.jsonl"}
    profile = json.loads(data.profile)
    assert (profile["num_rows"], profile["digest"], profile["labels"]) == (7, record.digest, ["cc-by-4.0"])


@pytest.mark.parametrize(
    ("path", "source_type"),
    [("owner/name", "hugging_face"), ("quickstart:text", "quickstart"), ("wheel:a==1", "wheel")],
)
def test_a_source_without_bytes_is_reported_by_its_revision(store, path, source_type):
    record = replace(store.source("corpus", path=path, revision="abc", files={}), digest=None)
    data = source_data("rows", record, None).dataset
    assert (data.source_type, data.digest) == (source_type, record.fingerprint[:36])
    assert json.loads(data.source)["revision"] == "abc"


def test_the_kind_of_an_output_of_old_is_reported_by_its_files(store):
    manifest = replace(store.stage("sft", {}), produces=None)
    assert produces(manifest) == "rows"
    weights = replace(manifest, files={"model.safetensors": "0"})
    assert produces(weights) == "checkpoint"
    assert produces(replace(weights, method="tasks.reward_model.RewardModel")) == "reward_model"


@pytest.fixture
def file(tmp_path):
    return tmp_path / "metrics.jsonl"


def append(file, *steps, **metrics):
    with file.open("a") as stream:
        for step in steps:
            stream.write(json.dumps({"step": step, "time": float(step), "metrics": metrics or {"loss": 1.0}}) + "\n")


def new(reports):
    return [(each.key, each.step, each.value, each.timestamp) for each in reports.new()]


def test_what_is_appended_is_read_once_with_its_own_time(file):
    reports = Reports(file)
    assert new(reports) == []
    append(file, 1, loss=2.0)
    assert new(reports) == [("loss", 1, 2.0, 1000)]
    append(file, 2, loss=1.0)
    assert new(reports) == [("loss", 2, 1.0, 2000)]
    assert new(reports) == []
    assert reports.last_step == 2


def test_a_line_still_being_written_waits_and_one_that_a_kill_cut_is_skipped(file):
    file.write_text('{"step": 1, "ti\n{"step": 2, "time": 2.0, "metr')
    reports = Reports(file)
    assert new(reports) == []
    with file.open("a") as stream:
        stream.write('ics": {"loss": 3.0}}\n')
    assert new(reports) == [("loss", 2, 3.0, 2000)]


def test_steps_that_are_recorded_or_come_again_are_left_out(file):
    append(file, 1, 2, 3, 2, 3, 4, loss=1.0, speed=5.0)  # a worker that was started again from step 1
    found = new(Reports(file, {"loss": 2}))
    assert [step for name, step, *_ in found if name == "loss"] == [3, 4]
    assert [step for name, step, *_ in found if name == "speed"] == [1, 2, 3, 4]


def test_a_name_that_mlflow_refuses_is_mended(file):
    append(file, 1, **{"accuracy@1 (mean)": 1.0, "rewards/margins": 2.0})
    assert [name for name, *_ in new(Reports(file))] == ["accuracy_1 _mean_", "rewards/margins"]


@pytest.mark.parametrize("in_place", [False, True], ids=["a new file", "a deleted one's number"])
def test_a_file_that_was_cut_to_a_checkpoint_is_read_again_and_no_step_twice(file, in_place):
    reports = Reports(file)
    append(file, *range(1, 8))
    assert [step for _, step, *_ in new(reports)] == list(range(1, 8))
    kept = "".join(file.read_text().splitlines(keepends=True)[:5])
    if in_place:
        file.write_text(kept)
    else:
        draft = file.with_suffix(".tmp")
        draft.write_text(kept)
        draft.replace(file)
    append(file, 6)
    assert new(reports) == []
    append(file, *range(7, 10))
    assert [step for _, step, *_ in new(reports)] == [8, 9]


def test_prepared_rows_are_a_data_set_with_the_labels_above_them(store, tmp_path):
    manifest = store.stage("corpus", {"rows": store.source("corpus")}, metrics={"rows": 5.0})
    data = stage_data("rows", manifest, tmp_path, ["cc-by-4.0"]).dataset
    assert data.digest == manifest.output_digest[:36]
    profile = json.loads(data.profile)
    assert (profile["num_rows"], profile["labels"]) == (5, ["cc-by-4.0"])


def test_a_stage_name_becomes_one_that_a_logged_model_may_have():
    assert model_name("source:a.b") == "a-b"
