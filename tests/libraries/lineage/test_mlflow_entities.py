"""How a manifest reads in MLflow's words."""

import json
from dataclasses import replace

import pytest

from lineage.mlflow.entities import model_name, parameters, produces, source_data, stage_data
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
def test_a_source_without_bytes_is_told_by_its_revision(store, path, source_type):
    record = replace(store.source("corpus", path=path, revision="abc", files={}), digest=None)
    data = source_data("rows", record, None).dataset
    assert (data.source_type, data.digest) == (source_type, record.fingerprint[:36])
    assert json.loads(data.source)["revision"] == "abc"


def test_prepared_rows_are_a_data_set_with_the_labels_above_them(store, tmp_path):
    manifest = store.stage("corpus", {"rows": store.source("corpus")}, metrics={"rows": 5.0})
    data = stage_data("rows", manifest, tmp_path, ["cc-by-4.0"]).dataset
    assert data.digest == manifest.output_digest[:36]
    profile = json.loads(data.profile)
    assert (profile["num_rows"], profile["labels"]) == (5, ["cc-by-4.0"])


def test_the_kind_of_an_output_of_old_is_told_by_its_files(store):
    manifest = replace(store.stage("sft", {}), produces=None)
    assert produces(manifest) == "rows"
    weights = replace(manifest, files={"model.safetensors": "0"})
    assert produces(weights) == "checkpoint"
    assert produces(replace(weights, method="tasks.reward_model.RewardModel")) == "reward_model"


def test_a_stage_name_becomes_one_that_a_logged_model_may_have():
    assert model_name("source:a.b") == "a-b"
