"""MLflow refilled from a store's manifests."""

import json
import shutil
import sys
from dataclasses import replace

import pytest

from lineage.errors import ArtifactError
from lineage.mlflow.address import connect
from lineage.mlflow.entities import Key
from lineage.mlflow.registry import aliases, links, refill, set_alias
from lineage.promotions import Event, append
from tests.written_store import WrittenStore


@pytest.fixture
def store(tmp_path):
    return WrittenStore(tmp_path / "artifacts")


def promotion(manifest, alias="champion", action="promote"):
    return Event(
        action=action, fingerprint=manifest.fingerprint, digest=manifest.output_digest, stage=manifest.stage,
        who="me", why="good", alias=alias,
    )  # fmt: skip


def test_every_artifact_gets_its_run_model_and_version_once(uri, store):
    made = store.chain(execution_run_id="e" * 32)
    models = {"base", "cpt", "dpo"}
    # Of `chain`, only dpo was made in an execution that is known by name.
    assert refill(uri, store.root).added == {"executions": 2, "runs": 6, "models": 3, "versions": 3, "aliases": 0}
    again = refill(uri, store.root)
    assert (set(again.added.values()), again.present) == ({0}, 6)
    found = links(uri, ["p"])
    assert set(found.runs) == {Key.of(each) for each in made.values()}
    assert set(found.models) == set(found.versions) == {Key.of(made[name]) for name in models}


def test_an_execution_holds_its_stages_and_links_to_what_it_reused(uri, store):
    made = store.chain(execution_run_id="e" * 32)
    refill(uri, store.root)
    client = connect(uri)
    experiment = client.get_experiment_by_name("p").experiment_id
    [execution] = client.search_runs([experiment], f"tags.`posttrain.recorded_run_id` = '{'e' * 32}'")
    [child] = client.search_runs([experiment], f"tags.`mlflow.parentRunId` = '{execution.info.run_id}'")
    assert child.info.run_name == "dpo"
    [cpt] = client.search_runs([experiment], f"tags.`posttrain.fingerprint` = '{made['cpt'].fingerprint}'")
    assert execution.data.tags["posttrain.reused.cpt"] == cpt.info.run_id
    assert execution.info.start_time == int(made["dpo"].provenance.start * 1000)
    assert (execution.info.status, execution.info.end_time) == ("FINISHED", int(made["dpo"].provenance.end * 1000))


def test_metrics_come_back_with_their_steps_and_times(uri, store):
    manifest = store.stage("base", {}, metrics={"loss": 1.0, "train_seconds": 3.0})
    lines = [{"step": step, "time": 10.0 + step, "metrics": {"loss": 1 / step}} for step in (1, 2)]
    path = store.root / "base" / manifest.fingerprint[:16] / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    refill(uri, store.root)
    [recorded] = links(uri, ["p"]).runs.values()
    history = connect(uri).get_metric_history(recorded.run_id, "loss")
    assert [(each.step, each.value, each.timestamp) for each in history] == [(1, 1.0, 11000), (2, 0.5, 12000)]
    assert connect(uri).get_run(recorded.run_id).data.metrics["train_seconds"] == 3.0


def test_aliases_come_back_to_their_present_holders(uri, store):
    made = store.chain()
    for event in (promotion(made["cpt"]), promotion(made["dpo"]), promotion(made["base"], alias="baseline")):
        append(store.root, event)
    assert refill(uri, store.root).added["aliases"] == 2
    assert links(uri, ["p"]).aliases["p"] == {"champion": Key.of(made["dpo"]), "baseline": Key.of(made["base"])}
    append(store.root, promotion(made["cpt"], action="rollback"))
    assert refill(uri, store.root).added == {"executions": 0, "runs": 0, "models": 0, "versions": 0, "aliases": 1}
    assert links(uri, ["p"]).aliases["p"]["champion"] == Key.of(made["cpt"])


def test_an_alias_moves_and_goes(uri, store):
    made = store.chain()
    refill(uri, store.root)
    set_alias(uri, "p", "champion", made["cpt"].fingerprint)
    set_alias(uri, "p", "champion", made["dpo"].fingerprint)
    assert links(uri, ["p"]).aliases["p"] == {"champion": Key.of(made["dpo"])}
    set_alias(uri, "p", "champion", None)
    set_alias(uri, "p", "champion", None)  # gone already
    assert links(uri, ["p"]).aliases["p"] == {}


def test_an_alias_of_what_is_not_registered_is_refused(uri, store):
    refill(uri, store.root)
    with pytest.raises(ArtifactError, match=r"has no version of a model@0000000000000000; `posttrain rebuild` adds"):
        set_alias(uri, "p", "champion", "0" * 64)


def test_two_stages_of_one_fingerprint_stay_two(uri, store):
    left = store.stage("left", {})
    shutil.copytree(store.root / "left" / left.fingerprint[:16], store.root / "right" / left.fingerprint[:16])
    path = store.root / "right" / left.fingerprint[:16] / "manifest.json"
    path.write_text(replace(left, stage="right").to_json())
    assert refill(uri, store.root).added["versions"] == 2
    set_alias(uri, "p", "champion", left.fingerprint, "left")
    assert links(uri, ["p"]).aliases["p"]["champion"] == Key.of(left)


def test_a_manifest_of_old_and_a_damaged_one_do_not_end_it(uri, store):
    old = store.stage("sft", {})
    fields = json.loads(old.to_json())
    for name in ("produces", "schema_version"):
        del fields[name]
    (store.root / "sft" / old.fingerprint[:16] / "manifest.json").write_text(json.dumps(fields))
    broken = store.stage("cpt", {})
    (store.root / "cpt" / broken.fingerprint[:16] / "manifest.json").write_text("{")
    assert refill(uri, store.root).added["runs"] == 1


def test_pipelines_are_experiments_and_registered_models_of_their_own(uri, store):
    base = store.stage("base", {}, pipeline="first")
    store.stage("sft", {"policy": base}, pipeline="second")
    refill(uri, store.root)
    client = connect(uri)
    assert {each.name for each in client.search_registered_models()} == {"first", "second"}
    [recorded] = links(uri, ["second"]).runs.values()
    [parent] = client.get_run(recorded.run_id).inputs.model_inputs
    assert client.get_logged_model(parent.model_id).name == "base"


def test_a_database_whose_driver_is_not_installed_is_an_error_that_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg2", None)
    with pytest.raises(ArtifactError, match=r"postgresql://127.0.0.1:1/x cannot be opened: .*install the driver"):
        aliases("postgresql://me:secret@127.0.0.1:1/x", ["p"])
