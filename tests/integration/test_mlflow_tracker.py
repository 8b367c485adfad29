"""The tracker against a real SQLite database: resumes, kills, failures, parents that MLflow does not know."""

import socket
import sys
import time
from dataclasses import replace

import pytest

from lineage.errors import ArtifactError, StoppedError, TakenOverError
from lineage.lease import Holder
from lineage.mlflow.client import connect
from lineage.mlflow.names import HOST, PID, STARTED
from lineage.mlflow.registry import aliases, refill
from lineage.mlflow.runs import Runs
from lineage.mlflow.tracker import MlflowTracker
from lineage.run_file import RunFile
from tests.tracked_stage import attempt, execution, record, report, start_of
from tests.written_store import WrittenStore


@pytest.fixture
def client(uri):
    return connect(uri)


@pytest.fixture
def store(tmp_path):
    return WrittenStore(tmp_path / "artifacts")


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


@pytest.mark.parametrize("window", ["before its inputs", "before its id is written down"])
def test_a_run_whose_driver_was_killed_while_it_was_opened_is_resumed(uri, client, store, monkeypatch, window):
    base = store.stage("base", {})
    record(uri, store, base)
    manifest = store.stage("cpt", {"policy": base}, recipe={"beta": 0.1})
    start = start_of(store, manifest, [base])
    tracker = MlflowTracker(uri)
    with monkeypatch.context() as patch, tracker.execution(execution(store)):
        patch.setattr(*{"before its inputs": (Runs, "log_inputs")}.get(window, (RunFile, "write")), _killed)
        assert tracker.stage(start).run_ids().stage is None
    [opened] = [run for run in runs(client) if run.info.run_name == "cpt"]
    assert opened.info.status == "RUNNING" and RunFile.read(start.directory) is None

    again = MlflowTracker(uri)
    with again.execution(execution(store)):
        stage = again.stage(replace(start, resumes=True))
        assert stage.run_ids().stage == opened.info.run_id
        stage.finished(manifest)
    [run] = [run for run in runs(client) if run.info.run_name == "cpt"]
    assert (run.info.status, run.data.params["beta"], len(run.inputs.model_inputs)) == ("FINISHED", "0.1", 1)


def _killed(*args, **kwargs):
    raise ConnectionError("the driver was killed here")


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


def test_who_lost_a_stage_to_another_run_leaves_its_record_to_it(uri, client, store):
    manifest = store.stage("base", {})
    start = start_of(store, manifest)
    lost, winner = MlflowTracker(uri), MlflowTracker(uri)
    with lost.execution(execution(store)):
        stage = lost.stage(start)
        run_id = stage.run_ids().stage
        with winner.execution(execution(store)):
            going_on = winner.stage(replace(start, resumes=True))
            assert going_on.run_ids().stage == run_id
            report(start, 1, 2)
            going_on.finished(manifest)
        report(start, 3)
        stage.failed(TakenOverError("was lost to process 7"))
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED"
    assert "posttrain.cause" not in run.data.tags
    assert steps(client, run_id) == [1, 2]


@pytest.mark.parametrize(("heir", "status"), [(None, "KILLED"), ("7", "RUNNING")])
def test_a_run_that_no_heir_goes_on_with_is_ended_by_who_lost_it(uri, client, store, heir, status):
    start, lost = start_of(store, store.stage("base", {})), MlflowTracker(uri)
    with lost.execution(execution(store)):
        stage = lost.stage(start)
        run_id = stage.run_ids().stage
        if heir:
            client.set_tag(run_id, PID, heir)
        stage.failed(TakenOverError("was lost to process 7"))
    run = client.get_run(run_id)
    cause = None if heir else "was lost to process 7"
    assert (run.info.status, run.data.tags.get("posttrain.cause")) == (status, cause)


@pytest.mark.parametrize("fields", [{"version": None, "registries": ["http://other"]}, {"version": 3}])
def test_a_stage_that_begins_again_stays_registered_where_it_was(uri, store, fields):
    start, tracker = start_of(store, store.stage("base", {})), MlflowTracker(uri)
    RunFile(uri="http://other", run_id="1", execution_id="2", words=[], **fields).write(start.directory)
    with tracker.execution(execution(store)):
        run_id = tracker.stage(start).run_ids().stage
    note = RunFile.read(start.directory)
    assert note and (note.run_id, note.registered_in) == (run_id, ["http://other"])


def test_a_database_whose_driver_is_not_installed_is_an_error_that_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg2", None)
    with pytest.raises(ArtifactError, match=r"postgresql://127.0.0.1:1/x cannot be opened: .*install the driver"):
        aliases("postgresql://me:secret@127.0.0.1:1/x", ["p"])


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


def test_an_mlflow_that_cannot_be_written_is_told_once_and_ends_nothing(tmp_path, store, capsys):
    (tmp_path / "file").write_text("no directory")
    manifest = store.stage("base", {})
    tracker, ids = record(f"sqlite:///{tmp_path}/file/mlflow.db", store, manifest)
    assert (ids.stage, ids.execution, tracker.execution_id()) == (None, None, None)
    assert capsys.readouterr().err.count("posttrain: MLflow at sqlite:///") == 1


def test_a_stage_whose_beginning_was_lost_is_written_whole_at_its_end(uri, client, store, monkeypatch, capsys):
    from lineage.mlflow.live import LiveRecord

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


def test_a_stage_that_was_committed_before_anybody_was_told_ends_its_own_run(uri, client, store):
    manifest = store.stage("base", {}, metrics={"loss": 0.1, "parameters": 7.0})
    start = start_of(store, manifest)
    tracker = MlflowTracker(uri)
    with pytest.raises(KeyboardInterrupt):  # as the next command ends what a killed one left
        attempt(tracker, store, start, KeyboardInterrupt(), 1, 2)
    [run_id] = [run.info.run_id for run in runs(client) if run.info.run_name == "base"]
    report(start, 3)
    path = start.directory / "manifest.json"
    path.write_text(replace(manifest, mlflow_run_id=run_id, execution_run_id=tracker.execution_id()).to_json())
    refill(uri, store.root)
    [run] = [run for run in runs(client) if run.info.run_name == "base"]
    assert (run.info.run_id, run.info.status) == (run_id, "FINISHED")
    assert "posttrain.cause" not in run.data.tags
    assert steps(client, run_id) == [1, 2, 3]
    assert run.data.metrics["parameters"] == 7.0
    assert refill(uri, store.root).added["runs"] == 0


def test_a_run_that_was_killed_before_it_was_told_anything_is_completed(uri, client, store):
    base = store.stage("base", {})
    manifest = store.stage("cpt", {"policy": base}, recipe={"beta": 0.1})
    record(uri, store, base)
    start = start_of(store, manifest, [base])
    tags = {"posttrain.stage": "cpt", "posttrain.fingerprint": manifest.fingerprint}
    experiment = client.get_experiment_by_name("p").experiment_id
    run_id = client.create_run(experiment, tags=tags, run_name="cpt").info.run_id
    client.set_terminated(run_id, "KILLED")
    path = start.directory / "manifest.json"
    path.write_text(replace(manifest, mlflow_run_id=run_id).to_json())
    refill(uri, store.root)
    [run] = [run for run in runs(client) if run.info.run_name == "cpt"]
    assert (run.info.run_id, run.info.status) == (run_id, "FINISHED")
    assert run.data.params["beta"] == "0.1"
    assert len(run.inputs.model_inputs) == 1


def test_a_database_that_was_lost_is_begun_anew(uri, client, store):
    manifest = store.stage("base", {})
    start = start_of(store, manifest)
    RunFile(uri=uri, run_id="0" * 32, execution_id="", words=[]).write(start.directory)
    tracker = MlflowTracker(uri)
    with tracker.execution(execution(store)):
        stage = tracker.stage(replace(start, resumes=True))
        assert stage.run_ids().stage is not None
        stage.finished(manifest)


def test_a_database_whose_migration_was_cut_short_is_made_anew(tmp_path, monkeypatch):
    from lineage.mlflow import client as module

    def killed(*_, **__):
        raise KeyboardInterrupt

    address = f"sqlite:///{tmp_path / 'fresh.db'}"
    with monkeypatch.context() as patch:
        patch.setattr(module.PatientClient, "search_registered_models", killed)
        with pytest.raises(KeyboardInterrupt):
            connect(address)
    assert not (tmp_path / "fresh.db").exists()
    assert connect(address).search_registered_models() == []
    assert sorted(path.name for path in tmp_path.glob("fresh*")) == ["fresh.db", "fresh.db.lock"]
