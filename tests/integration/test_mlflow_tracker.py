"""The tracker against a real SQLite database: resumes, kills, failures, parents that MLflow does not know."""

import json
import shutil
import socket
import time
from dataclasses import replace

import pytest

from lineage.errors import StoppedError
from lineage.lease import Holder
from lineage.mlflow_client import connect
from lineage.mlflow_names import HOST, PID, STARTED
from lineage.mlflow_tracker import MlflowTracker
from lineage.tracker import Execution, StageStart
from tests.written_store import WrittenStore


@pytest.fixture(scope="module")
def migrated(tmp_path_factory):
    file = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    connect(f"sqlite:///{file}")
    return file


@pytest.fixture
def uri(tmp_path, migrated):
    shutil.copy(migrated, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path / 'mlflow.db'}"


@pytest.fixture
def client(uri):
    return connect(uri)


@pytest.fixture
def store(tmp_path):
    return WrittenStore(tmp_path / "artifacts")


def execution(store, reused=()):
    return Execution(pipeline="p", store=store.root, words=["pipeline=p"], reused={each.stage: each for each in reused})


def start_of(store, manifest, parents=(), resumes=False):
    directory = store.root / manifest.stage / manifest.fingerprint[:16]
    directory.mkdir(parents=True, exist_ok=True)
    return StageStart(
        stage=manifest.stage, method=manifest.method, produces=manifest.produces, fingerprint=manifest.fingerprint,
        recipe=manifest.recipe, inputs=manifest.inputs, directory=directory,
        parents={each.stage: each for each in parents}, resumes=resumes,
    )  # fmt: skip


def report(start, *steps):
    with (start.directory / "metrics.jsonl").open("a") as file:
        for step in steps:
            metrics = {"loss": 1.0 / step, "grad_norm": 0.5}
            file.write(json.dumps({"step": step, "time": 1000.0 + step, "metrics": metrics}) + "\n")


def record(uri, store, manifest, parents=()):
    """One execution with one stage, from start to end."""
    tracker = MlflowTracker(uri)
    with tracker.execution(execution(store)):
        stage = tracker.stage(start_of(store, manifest, parents))
        ids = stage.run_ids()
        stage.finished(manifest)
    return tracker, ids


def attempt(tracker, store, start, error, *steps):
    """One execution with one stage that raises after some steps."""
    with tracker.execution(execution(store)):
        stage = tracker.stage(start)
        stage.run_ids()
        report(start, *steps)
        stage.failed(str(error), stopped=not isinstance(error, ValueError))
        raise error


def steps(client, run_id, name="loss"):
    return [each.step for each in client.get_metric_history(run_id, name)]


def runs(client, pipeline="p"):
    experiment = client.get_experiment_by_name(pipeline)
    return [client.get_run(each.info.run_id) for each in client.search_runs([experiment.experiment_id])]


def test_a_stage_is_a_run_of_its_execution_with_its_recipe_as_parameters(uri, client, store):
    manifest = store.stage("base", {}, recipe={"adapter": {"rank": 8}}, metrics={"loss": 0.1, "parameters": 7.0})
    tracker, ids = record(uri, store, manifest)
    run = client.get_run(ids.stage)
    assert ids.execution == tracker.execution_id() == run.data.tags["mlflow.parentRunId"]
    assert (run.info.status, run.info.end_time) == ("FINISHED", int(manifest.provenance.end * 1000))
    assert run.data.params == {"method": "Base", "adapter.rank": "8"}
    assert run.data.metrics == {"loss": 0.1, "parameters": 7.0}
    parent = client.get_run(ids.execution)
    assert parent.info.status == "FINISHED"
    assert parent.data.tags["posttrain.words"] == "pipeline=p"
    assert "| base | finished |" in parent.data.tags["mlflow.note.content"]


def test_reports_appear_while_the_stage_runs(uri, client, store):
    tracker = MlflowTracker(uri)
    with tracker.execution(execution(store)):
        manifest = store.stage("base", {})
        start = start_of(store, manifest)
        stage = tracker.stage(start)
        report(start, 1, 2)
        run_id = stage.run_ids().stage
        deadline = time.monotonic() + 20
        while steps(client, run_id) != [1, 2]:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert client.get_run(run_id).info.status == "RUNNING"
        report(start, 3)
        stage.finished(replace(manifest, metrics={"loss": 9.0, "train_seconds": 4.0}))
    assert steps(client, run_id) == [1, 2, 3]
    assert [each.timestamp for each in client.get_metric_history(run_id, "loss")] == [1001000, 1002000, 1003000]
    # The final mean of a metric that was followed is not mixed with its steps.
    assert client.get_run(run_id).data.metrics == {"loss": 1 / 3, "grad_norm": 0.5, "train_seconds": 4.0}


def test_a_resumed_stage_goes_on_in_its_run_and_no_step_is_there_twice(uri, client, store):
    manifest = store.stage("base", {})
    start = start_of(store, manifest)
    first, second = MlflowTracker(uri), MlflowTracker(uri)
    with pytest.raises(KeyboardInterrupt):
        attempt(first, store, start, KeyboardInterrupt(), 1, 2, 3)
    [run_id] = [run.info.run_id for run in runs(client) if run.info.run_name == "base"]
    assert client.get_run(run_id).info.status == "KILLED"
    with second.execution(execution(store)):
        stage = second.stage(replace(start, resumes=True))
        assert stage.run_ids().stage == run_id
        assert client.get_run(run_id).info.status == "RUNNING"
        report(start, 3, 4)  # from the checkpoint after step 2
        stage.finished(manifest)
    run = client.get_run(run_id)
    assert (run.info.status, run.data.tags["mlflow.parentRunId"]) == ("FINISHED", second.execution_id())
    assert steps(client, run_id) == steps(client, run_id, "grad_norm") == [1, 2, 3, 4]


def test_a_stage_that_starts_over_gets_a_new_run_and_the_old_one_is_closed(uri, client, store):
    manifest = store.stage("base", {})
    start = start_of(store, manifest)
    tracker = MlflowTracker(uri)
    with tracker.execution(execution(store)):
        old = tracker.stage(start).run_ids().stage
        stage = tracker.stage(start)
        new = stage.run_ids().stage
        assert new != old
        assert client.get_run(old).info.status == "KILLED"
        stage.finished(manifest)
    assert client.get_run(new).info.status == "FINISHED"


@pytest.mark.parametrize(("stopped", "status"), [(False, "FAILED"), (True, "KILLED")])
def test_what_fails_or_is_stopped_is_closed_with_its_cause(uri, client, store, stopped, status):
    tracker = MlflowTracker(uri)
    error = StoppedError("the run was stopped") if stopped else ValueError("no such column")
    with pytest.raises(type(error)):
        attempt(tracker, store, start_of(store, store.stage("base", {})), error)
    closed = {run.info.run_name[:4]: (run.info.status, run.data.tags["posttrain.cause"]) for run in runs(client)}
    assert closed == {"base": (status, str(error)), "p 20": (status, str(error))}


def test_only_what_a_dead_process_of_this_host_left_is_closed(uri, client, store):
    experiment = client.create_experiment("p")
    me = Holder.here()
    tags = {HOST: me.host, PID: str(me.pid), STARTED: repr(me.started)}
    others = {
        "dead": {**tags, PID: "4194304"},
        "another process with its number": {**tags, STARTED: repr(me.started - 1000)},
        "living": tags,
        "of another host": {**tags, HOST: socket.gethostname() + "-2", PID: "4194304"},
        "of somebody else": {},
    }
    left = {name: client.create_run(experiment, tags=about).info.run_id for name, about in others.items()}
    record(uri, store, store.stage("base", {}))
    status = {name: client.get_run(run_id).info.status for name, run_id in left.items()}
    assert status == {
        "dead": "KILLED", "another process with its number": "KILLED", "living": "RUNNING",
        "of another host": "RUNNING", "of somebody else": "RUNNING",
    }  # fmt: skip


def test_a_parent_that_mlflow_does_not_know_is_written_from_its_manifest(uri, client, store):
    made = store.chain()
    _, ids = record(uri, store, made["dpo"], [made["cpt"], made["pairs"]])
    run = client.get_run(ids.stage)
    [parent] = [client.get_logged_model(each.model_id) for each in run.inputs.model_inputs]
    assert (parent.name, parent.tags["posttrain.digest"]) == ("cpt", made["cpt"].output_digest)
    assert parent.source_run_id == ids.parents[0]
    # The page of a model is one click from its parent's.
    [made_of_it] = [client.get_logged_model(each.model_id) for each in run.outputs.model_outputs]
    link = f"[cpt](#/experiments/{run.info.experiment_id}/models/{parent.model_id})"
    assert link in made_of_it.tags["mlflow.note.content"] == run.data.tags["mlflow.note.content"]
    base = client.get_run(parent.source_run_id).inputs.model_inputs
    assert client.get_logged_model(base[0].model_id).name == "base"
    [pairs] = [each.dataset for each in run.inputs.dataset_inputs]
    assert json.loads(pairs.profile)["labels"] == ["cc-by-nc-4.0"]
    assert json.loads(run.data.tags["posttrain.labels"]) == ["cc-by-nc-4.0"]


def test_a_reused_stage_is_a_link_to_the_run_that_made_it(uri, client, store):
    made = store.chain()
    _, base = record(uri, store, made["base"], [made["corpus"]])
    tracker = MlflowTracker(uri)
    with tracker.execution(execution(store, [made["base"]])):
        pass
    run = client.get_run(tracker.execution_id())
    assert run.data.tags["posttrain.reused.base"] == base.stage
    assert f"| base | reused | [{base.stage[:8]}](#/experiments/" in run.data.tags["mlflow.note.content"]


def test_a_model_that_no_stage_made_is_a_logged_model_once(uri, client, store):
    source = store.source("qwen", path="owner/name", kind="checkpoint", revision="c" * 40, files={})
    manifests = [store.stage(name, {"policy": source}) for name in ("cpt", "sft")]
    ids = [record(uri, store, manifest)[1] for manifest in manifests]
    found = [client.get_run(each.stage).inputs.model_inputs for each in ids]
    assert found[0] == found[1] != []
    model = client.get_logged_model(found[0][0].model_id)
    assert (model.name, model.tags["posttrain.output"], model.source_run_id) == ("qwen", "owner/name", None)


def test_reports_read_models_and_make_none(uri, client, store):
    made = store.chain()
    _, ids = record(uri, store, made["evaluate"], [made["cpt"], made["dpo"], made["corpus"]])
    run = client.get_run(ids.stage)
    names = {client.get_logged_model(each.model_id).name for each in run.inputs.model_inputs}
    assert (names, run.outputs.model_outputs) == ({"cpt", "dpo"}, [])


def test_the_same_bytes_are_registered_once_and_others_again(uri, client, store):
    manifest = store.stage("base", {})
    for each in (manifest, manifest, replace(manifest, output_digest="f" * 64)):
        record(uri, store, each)
    found = client.search_model_versions("name='p'", order_by=["version_number ASC"])
    assert [each.tags["posttrain.digest"] for each in found] == [manifest.output_digest, "f" * 64]
    output = store.root / "base" / manifest.fingerprint[:16] / "output"
    assert found[0].source == found[0].tags["posttrain.output"] == output.as_uri()


def test_an_mlflow_that_cannot_be_written_is_told_once_and_ends_nothing(tmp_path, store, capsys):
    (tmp_path / "file").write_text("no directory")
    manifest = store.stage("base", {})
    tracker, ids = record(f"sqlite:///{tmp_path}/file/mlflow.db", store, manifest)
    assert (ids.stage, ids.execution, tracker.execution_id()) == (None, None, None)
    assert capsys.readouterr().err.count("posttrain: MLflow at sqlite:///") == 1


def test_a_stage_whose_beginning_was_lost_is_written_whole_at_its_end(uri, client, store, monkeypatch, capsys):
    from lineage.mlflow_live import LiveRecord

    def lost(self, start):
        raise ConnectionError("away for a moment")

    monkeypatch.setattr(LiveRecord, "open_stage", lost)
    manifest = store.stage("base", {})
    tracker, ids = record(uri, store, manifest)
    assert ids.stage is None
    assert "away for a moment" in capsys.readouterr().err
    [stage] = [run for run in runs(client) if run.info.run_name == "base"]
    assert (stage.info.status, stage.data.params) == ("FINISHED", {"method": "Base"})
    assert "| base | finished |" in client.get_run(tracker.execution_id()).data.tags["mlflow.note.content"]


def test_a_model_that_an_alias_named_is_the_logged_model_of_the_stage_that_made_it(uri, client, store):
    champion = store.stage("sft", {}, pipeline="other")
    output = store.root / "sft" / champion.fingerprint[:16] / "output"
    source = store.source("champion", path=str(output), kind="checkpoint", revision="alias:champion", files={})
    _, ids = record(uri, store, store.stage("dpo", {"policy": replace(source, fingerprint=champion.fingerprint)}))
    [parent] = client.get_run(ids.stage).inputs.model_inputs
    assert client.get_run(client.get_logged_model(parent.model_id).source_run_id).info.run_name == "sft"
