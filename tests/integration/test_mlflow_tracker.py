"""The tracker against a real SQLite database: live, resumed, killed and failed stages, and an MLflow that is away."""

import json
import shutil
import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from lineage.errors import PrunedError, StoppedError, TakenOverError
from lineage.filesystem.owner import Owner
from lineage.mlflow import address
from lineage.mlflow.address import connect
from lineage.mlflow.entities import Tag
from lineage.mlflow.executions import Executions
from lineage.mlflow.registry import refill
from lineage.mlflow.sync import Mirror
from lineage.mlflow.tracker import MlflowTracker
from lineage.record.run_file import RunFile
from lineage.record.tracker import Event, end_event
from lineage.store import Entry
from tests.command import wait_until
from tests.tracked_stage import Tracked, attempt, commit, execution, record, report, start_of

DEAD = replace(Owner.here(), pid=4194304)


def steps(client, run_id, name="loss"):
    return [each.step for each in client.get_metric_history(run_id, name)]


def runs(client, name="", pipeline="p"):
    experiment = client.get_experiment_by_name(pipeline)
    found = [client.get_run(each.info.run_id) for each in client.search_runs([experiment.experiment_id])]
    return [run for run in found if run.info.run_name.startswith(name)]


def statuses(client, name):
    return [run.info.status for run in runs(client, name)]


def killed(start):
    """Leaves the start record of a process that is gone."""
    note = RunFile.read(start.directory)
    writer = replace(DEAD, token=note.writer.token)
    replace(note, writer=writer, status="RUNNING", cause="").write(start.directory)


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
    assert parent.info.start_time <= run.info.start_time
    assert parent.data.tags["posttrain.words"] == "pipeline=p"
    assert "| base | finished |" in parent.data.tags["mlflow.note.content"]


def test_reports_appear_while_the_stage_runs(uri, client, store):
    tracker = MlflowTracker(uri)
    with tracker.execution(execution(store)):
        manifest = store.stage("base", {}, metrics={"loss": 9.0, "train_seconds": 4.0})
        start = start_of(store, manifest)
        stage = Tracked(tracker, start)
        report(start, 1, 2)
        run_id = stage.run_ids().stage
        wait_until(lambda: steps(client, run_id) == [1, 2], "the reports are recorded")
        assert client.get_run(run_id).info.status == "RUNNING"
        report(start, 3)
        stage.finish(manifest)
    assert steps(client, run_id) == [1, 2, 3]
    assert [each.timestamp for each in client.get_metric_history(run_id, "loss")] == [1001000, 1002000, 1003000]
    # The final mean of a metric that was reported is not mixed with its steps.
    run = client.get_run(run_id)  # the manifest's loss is beside its curve
    assert run.data.metrics == {"loss": 1 / 3, "grad_norm": 0.5, "train_seconds": 4.0, "final/loss": 9.0}
    assert client.search_runs([run.info.experiment_id], 'metrics."final/loss" > 8')[0].info.run_id == run_id


def test_a_resumed_stage_continues_its_run_and_no_step_is_there_twice(uri, client, store):
    manifest = store.stage("base", {})
    start = start_of(store, manifest)
    attempt(uri, store, start, KeyboardInterrupt(), 1, 2, 3)
    [run] = runs(client, "base")
    assert run.info.status == "KILLED"
    second = MlflowTracker(uri)
    with second.execution(execution(store)):
        stage = Tracked(second, replace(start, resumes=True))
        assert stage.run_ids().stage == run.info.run_id
        assert client.get_run(run.info.run_id).info.status == "RUNNING"
        report(start, 3, 4)  # from the checkpoint after step 2
        stage.finish(manifest)
    [run] = runs(client, "base")
    assert (run.info.status, run.data.tags["mlflow.parentRunId"]) == ("FINISHED", second.execution_id())
    assert "posttrain.cause" not in run.data.tags
    assert steps(client, run.info.run_id) == steps(client, run.info.run_id, "grad_norm") == [1, 2, 3, 4]


def test_a_stage_that_restarts_gets_a_new_run_and_the_old_one_is_closed(uri, client, store):
    manifest = store.stage("base", {})
    start = start_of(store, manifest)
    attempt(uri, store, start, ValueError("full"), 1)
    [old] = runs(client, "base")
    client.update_run(old.info.run_id, status="RUNNING")  # as a kill leaves it
    _, ids = record(uri, store, manifest)
    assert {run.info.run_id: run.info.status for run in runs(client, "base")} == {
        old.info.run_id: "KILLED", ids.stage: "FINISHED"
    }  # fmt: skip


@pytest.mark.parametrize(("stopped", "status"), [(False, "FAILED"), (True, "KILLED")])
def test_what_fails_or_is_stopped_is_closed_with_its_cause(uri, client, store, stopped, status):
    error = StoppedError("the run was stopped") if stopped else ValueError("no such column")
    attempt(uri, store, start_of(store, store.stage("base", {})), error)
    closed = {run.info.run_name[:4]: (run.info.status, run.data.tags["posttrain.cause"]) for run in runs(client)}
    assert closed == {"base": (status, str(error)), "p 20": (status, str(error))}


@pytest.mark.parametrize("window", ["create_run", "log_inputs", "set_terminated", "create_model_version"])
def test_a_call_that_fails_is_made_good_by_the_next_sync(uri, client, store, monkeypatch, window):
    base = store.stage("base", {})
    record(uri, store, base)
    manifest = store.stage("cpt", {"policy": base}, recipe={"beta": 0.1}, metrics={"loss": 1.0})
    start, patient = start_of(store, manifest, [base]), address._patient_client()
    original, calls = getattr(patient, window), []

    def fails_after_the_call(*args, **kwargs):
        result = original(*args, **kwargs)
        calls.append(args)
        if len(calls) == (2 if window == "create_run" else 1):  # the first run is the execution's
            raise ConnectionError("away")
        return result

    def fails_instead(*args, **kwargs):
        calls.append(args)
        if len(calls) == 1:
            raise ConnectionError("away")
        return original(*args, **kwargs)

    tracker = MlflowTracker(uri)
    with monkeypatch.context() as patch, tracker.execution(execution(store)):
        patch.setattr(patient, window, fails_instead if window == "create_model_version" else fails_after_the_call)
        stage = Tracked(tracker, start)
        report(start, 1, 2)
        stage.finish(manifest)
    [run] = runs(client, "cpt")
    assert (run.info.status, run.data.params["beta"], len(run.inputs.model_inputs)) == ("FINISHED", "0.1", 1)
    assert len(run.outputs.model_outputs) == 1
    assert steps(client, run.info.run_id) == [1, 2]
    assert set(refill(uri, store.root).added.values()) == {0}


def test_a_stage_that_ends_while_it_is_written_is_closed_too(uri, client, store, monkeypatch):
    original, tracker = Mirror.sync, MlflowTracker(uri)

    def ends_behind(self, entry):
        recorded = original(self, entry)
        tracker.on(end_event("base", PrunedError("worse than others")))
        return recorded

    monkeypatch.setattr(Mirror, "sync", ends_behind)
    with tracker.execution(execution(store)):
        Tracked(tracker, start_of(store, store.stage("base", {}))).run_ids()
    [run] = runs(client, "base")
    assert run.info.status == "KILLED"


def test_a_stage_that_ends_while_its_run_is_made_is_closed_too(uri, client, store, monkeypatch):
    original, tracker, start = Executions.create, MlflowTracker(uri), start_of(store, store.stage("base", {}))

    def ends_behind(self, pipeline, title, *args):
        run = original(self, pipeline, title, *args)
        if title == "base":
            tracker.on(end_event("base", PrunedError("worse than others")))
        return run

    monkeypatch.setattr(Executions, "create", ends_behind)
    with tracker.execution(execution(store)):
        Tracked(tracker, start).run_ids()
    note, [run] = RunFile.read(start.directory), runs(client, "base")
    assert (run.info.status, note and note.status) == ("KILLED", "KILLED")


def test_a_stop_that_comes_after_the_end_of_a_stage_leaves_it_finished(uri, client, store):
    manifest, tracker = store.stage("base", {}), MlflowTracker(uri)
    with tracker.execution(execution(store)):
        stage = Tracked(tracker, start_of(store, manifest))
        stage.finish(manifest)
        stage.failed(KeyboardInterrupt())
    assert [run.info.status for run in runs(client)] == ["FINISHED", "FINISHED"]


def test_syncing_again_changes_nothing(uri, client, store):
    made = store.chain()
    for name in made:
        mirror = Mirror(Executions(client, store.root))
        mirror.sync(mirror.store.entry(name, made[name].fingerprint))
    before = [run.to_dictionary() for run in runs(client)]
    for name in made:
        mirror = Mirror(Executions(client, store.root))
        mirror.sync(mirror.store.entry(name, made[name].fingerprint))
    assert [run.to_dictionary() for run in runs(client)] == before


def test_who_lost_a_stage_to_another_run_leaves_its_record_to_it(uri, client, store):
    manifest = store.stage("base", {})
    start = start_of(store, manifest)
    loser, winner = MlflowTracker(uri), MlflowTracker(uri)
    with loser.execution(execution(store)):
        stage = Tracked(loser, start)
        run_id = stage.run_ids().stage
        with winner.execution(execution(store)):
            resumed = Tracked(winner, replace(start, resumes=True))
            assert resumed.run_ids().stage == run_id
            report(start, 1, 2)
            stage.failed(TakenOverError("was lost to process 7"))
            resumed.finish(manifest)
    run = client.get_run(run_id)
    assert (run.info.status, run.data.tags["mlflow.parentRunId"]) == ("FINISHED", winner.execution_id())
    assert "posttrain.cause" not in run.data.tags
    assert steps(client, run_id) == [1, 2]


def test_a_run_whose_directory_was_deleted_is_closed(uri, client, store):
    start, tracker = start_of(store, store.stage("base", {})), MlflowTracker(uri)
    with tracker.execution(execution(store)):
        stage = Tracked(tracker, start)
        run_id = stage.run_ids().stage
        store.delete(store.stage("base", {}))
        stage.failed(TakenOverError("was lost to gc"))
    run = client.get_run(run_id)
    assert (run.info.status, run.data.tags["posttrain.cause"]) == ("KILLED", "was lost to gc")


def test_only_what_a_dead_process_of_this_host_left_is_closed(uri, client, store):
    experiment, me = client.create_experiment("p"), Owner.here()
    tags = {Tag.HOST: me.host, Tag.PID: str(me.pid), Tag.STARTED: repr(me.started)}
    others = {
        "dead": {**tags, Tag.PID: "4194304"},
        "another process with its number": {**tags, Tag.STARTED: repr(me.started - 1000)},
        "living": tags,
        "of another host": {**tags, Tag.HOST: socket.gethostname() + "-2", Tag.PID: "4194304"},
        "of no process": {},
    }
    left = {name: client.create_run(experiment, tags=about).info.run_id for name, about in others.items()}
    record(uri, store, store.stage("base", {}))
    closed = [name for name, run_id in left.items() if client.get_run(run_id).info.status == "KILLED"]
    assert closed == ["dead", "another process with its number"]
    elsewhere = replace(DEAD, host=socket.gethostname() + "-2")
    refill(uri, store.root, [elsewhere])
    assert client.get_run(left["of another host"]).info.status == "KILLED"


def test_a_killed_stage_is_completed_with_its_last_reports_by_the_next_command(uri, client, store):
    start = start_of(store, store.stage("base", {}))
    attempt(uri, store, start, KeyboardInterrupt(), 1, 2)
    [run] = runs(client, "base")
    client.update_run(run.info.run_id, status="RUNNING")  # as a kill leaves it
    killed(start)
    report(start, 3)  # after the last sync
    refill(uri, store.root)
    [run] = runs(client, "base")
    assert (run.info.status, run.data.tags["posttrain.cause"]) == ("KILLED", "its process was killed")
    assert steps(client, run.info.run_id) == [1, 2, 3]
    ended = run.info.end_time
    refill(uri, store.root)
    assert client.get_run(run.info.run_id).info.end_time == ended


def test_a_stage_that_was_committed_before_mlflow_knew_ends_its_own_run(uri, client, store):
    manifest = store.stage("base", {}, metrics={"loss": 0.1, "parameters": 7.0})
    start = start_of(store, manifest)
    attempt(uri, store, start, KeyboardInterrupt(), 1, 2)
    [before] = runs(client, "base")
    report(start, 3)
    commit(start, replace(manifest, mlflow_run_id=before.info.run_id))
    (start.directory / "mlflow.json").unlink()  # as after `dvc pull`
    refill(uri, store.root)
    [run] = runs(client, "base")
    assert (run.info.run_id, run.info.status, run.data.metrics["parameters"]) == (before.info.run_id, "FINISHED", 7.0)
    assert "posttrain.cause" not in run.data.tags
    assert steps(client, run.info.run_id) == [1, 2, 3]
    assert refill(uri, store.root).added["runs"] == 0


def test_an_mlflow_that_cannot_be_written_is_reported_once_and_filled_in_later(tmp_path, uri, client, store, capsys):
    (tmp_path / "file").write_text("no directory")
    manifest, failed = store.stage("base", {}), store.stage("sft", {})
    away = f"sqlite:///{tmp_path}/file/mlflow.db"
    tracker, ids = record(away, store, manifest)
    assert (ids.stage, ids.execution, tracker.execution_id()) == (None, None, None)
    attempt(away, store, start_of(store, failed), ValueError("full"), 1)
    assert capsys.readouterr().err.count(f"posttrain: MLflow at {away}: ") == 2  # once per command
    refill(uri, store.root)
    status = {run.info.run_id: run.info.status for run in runs(client)}
    parents = {run.info.run_name: run.data.tags.get("mlflow.parentRunId") for run in runs(client)}
    assert {name: (status[parents[name]], *statuses(client, name)) for name in ("base", "sft")} == {
        "base": ("FINISHED", "FINISHED"), "sft": ("FAILED", "FAILED")
    }  # fmt: skip


def test_a_run_that_was_killed_before_mlflow_had_its_tables_is_killed_there(tmp_path, uri, client, store):
    (tmp_path / "file").write_text("no directory")
    away = MlflowTracker(f"sqlite:///{tmp_path}/file/mlflow.db")
    with away.execution(execution(store)):
        Tracked(away, start_of(store, store.stage("base", {}))).finish(store.stage("base", {}))
        stage = Tracked(away, start_of(store, store.stage("sft", {})))
        refill(uri, store.root)  # by another command, while it runs
    killed(stage.start)
    for _ in range(2):
        refill(uri, store.root)
        [executed] = runs(client, "p 20")
        assert (executed.info.status, executed.data.tags["posttrain.cause"]) == ("KILLED", "its process was killed")
        assert executed.data.tags["posttrain.words"] == "pipeline=p"
        assert (statuses(client, "base"), statuses(client, "sft")) == (["FINISHED"], ["KILLED"])


def test_an_mlflow_that_does_not_answer_is_given_up_at_the_end(uri, store, monkeypatch, capsys):
    monkeypatch.setattr("lineage.mlflow.tracker._CLOSE_SECONDS", 0.1)
    answers = threading.Event()
    monkeypatch.setattr(MlflowTracker, "_open", lambda self: answers.wait(60))
    tracker = MlflowTracker(uri)
    with tracker.execution(execution(store)):
        pass
    answers.set()
    assert "no answer within 0 s" in capsys.readouterr().err
    assert not tracker.is_complete  # the next command completes it


def test_a_database_that_was_lost_gets_a_new_run(uri, client, store):
    manifest = store.stage("base", {})
    start = start_of(store, manifest)
    RunFile(uri=uri, run_id="0" * 32, execution_id="", cli_args=[]).write(start.directory)
    tracker = MlflowTracker(uri)
    with tracker.execution(execution(store)):
        stage = Tracked(tracker, replace(start, resumes=True))
        assert stage.run_ids().stage is not None
        stage.finish(manifest)
    assert len(runs(client, "base")) == 1


def test_a_database_whose_migration_was_cut_short_is_made_anew(tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    uri = f"sqlite:///{tmp_path / 'fresh.db'}"
    with monkeypatch.context() as patch:
        patch.setattr(address._patient_client(), "search_registered_models", interrupted)
        with pytest.raises(KeyboardInterrupt):
            connect(uri)
    assert not (tmp_path / "fresh.db").exists()
    assert connect(uri).search_registered_models() == []
    assert sorted(path.name for path in tmp_path.glob("fresh*")) == ["fresh.db", "fresh.db.lock"]


def test_ten_samples_of_a_policy_are_a_table_of_its_run(uri, client, store):
    import pyarrow as pa
    import pyarrow.parquet as pq

    manifest = store.stage("grpo", {})
    start = start_of(store, manifest)
    rows = [{"step": step, "prompt": "1+1", "completion": "2", "reward": float(step)} for step in range(25)]
    pq.write_table(pa.Table.from_pylist(rows), start.directory / "output" / "samples.parquet")
    commit(start, manifest)
    for _ in range(2):
        Mirror(Executions(client, store.root)).sync(Entry(start.directory))
    [run] = runs(client, "grpo")
    table = json.loads(Path(client.download_artifacts(run.info.run_id, "samples.json")).read_text())
    assert table["columns"] == ["step", "prompt", "completion", "reward"]
    assert table["data"] == [[step, "1+1", "2", float(step)] for step in range(15, 25)]


def test_the_findings_on_its_curves_are_a_tag_while_it_runs_and_after(uri, client, store):
    manifest = store.stage("sft", {}, recipe={"method": "SFT", "learning_rate": 1e-6})
    tracker = MlflowTracker(uri)
    with tracker.execution(execution(store)):
        stage = Tracked(tracker, start_of(store, manifest))
        lines = [{"step": step, "time": 1000.0 + step, "metrics": {"loss": 3.0}} for step in range(1, 101)]
        (stage.start.directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        run_id = stage.run_ids().stage
        tracker.wake()
        wait_until(lambda: Tag.DIAGNOSIS in client.get_run(run_id).data.tags, "the tag of a running stage")
        stage.finish(manifest)
    found = "flat: loss 3 at the start, 3 at step 100, noise 0"
    assert client.get_run(run_id).data.tags[Tag.DIAGNOSIS] == found


@pytest.mark.parametrize("noted", [True, False], ids=["its manifest has its run", "MLflow was slow"])
@pytest.mark.parametrize("runs", [1, 2], ids=["one execution", "two executions"])
def test_a_stage_that_ran_again_with_the_same_bytes_ends_its_own_run(uri, client, store, noted, runs):
    """As after its folder was deleted by hand: the first run of these bytes is finished, and remains so."""
    manifest, ids = store.stage("a", {}), []
    for count in [2 // runs] * runs:
        tracker = MlflowTracker(uri)
        with tracker.execution(execution(store)):
            for _ in range(count):
                start = start_of(store, manifest)
                shutil.rmtree(start.directory)
                start.directory.mkdir()
                stage = Tracked(tracker, start)
                ids.append(stage.run_ids().stage)
                commit(start, manifest, stage.run_ids() if noted else None)
                tracker.on(Event(title="a", state="done", manifest=manifest))
                wait_until(lambda: RunFile.read(start.directory).version, "all of it is recorded")  # noqa: B023
    assert len({*ids}) == 2 and [client.get_run(each).info.status for each in ids] == ["FINISHED"] * 2
