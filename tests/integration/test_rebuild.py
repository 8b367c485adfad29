"""MLflow refilled from a store's manifests, and what tells that the two part ways."""

import json
import shutil
import sys
from dataclasses import replace

import pytest
from mlflow import MlflowClient

from lineage.dvc import VIEWS
from lineage.errors import ArtifactError
from lineage.filesystem.owner import Owner
from lineage.mlflow.address import connect
from lineage.mlflow.entities import Key, Tag, process_tags
from lineage.mlflow.executions import Executions
from lineage.mlflow.registry import aliases, close_left, links, refill, set_alias
from lineage.record.run_file import RunFile
from lineage.store import Store
from lineage.verify.mlflow import check_mlflow
from lineage.verify.store import Checked, Fault, read_store
from tests.command import TOY, Command


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
    for promoted, alias in (("cpt", "champion"), ("dpo", "champion"), ("base", "baseline")):
        store.event(made[promoted], alias)
    assert refill(uri, store.root).added["aliases"] == 2
    assert links(uri, ["p"]).aliases["p"] == {"champion": Key.of(made["dpo"]), "baseline": Key.of(made["base"])}
    store.event(made["cpt"], action="rollback")
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


def found_by_verify(uri, store):
    everything, _ = read_store(store.root)
    checked = Checked(all=everything, chosen=list(everything))
    return [(each.fault, each.mend) for each in check_mlflow(uri, store.root, checked)]


def test_a_finished_output_that_was_deleted_by_hand_is_named_until_a_rebuild_records_that(uri, store):
    made = store.chain()
    refill(uri, store.root)
    folder = store.root / "dpo" / made["dpo"].fingerprint[:16]
    manifest = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text("{")
    assert refill(uri, store.root).lost == 0  # damaged, and not deleted
    shutil.rmtree(folder)
    [(fault, remedy)] = found_by_verify(uri, store)
    assert fault == Fault.ORPHANED and remedy.endswith("posttrain rebuild")
    assert refill(uri, store.root).lost == 1
    assert found_by_verify(uri, store) == [] and refill(uri, store.root).lost == 0
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(manifest)  # restored: it counts again
    assert found_by_verify(uri, store) == []


def test_an_open_run_whose_folder_was_deleted_is_named_and_closed(uri, store):
    """Also while the process that opened it still runs, and for a pipeline without outputs in the store."""
    base = store.chain()["base"]
    refill(uri, store.root)
    client, runs = connect(uri), Executions(connect(uri), store.root)

    def open_run(pipeline, folder):
        tags = {Tag.OUTPUT: (folder / "output").as_uri(), **process_tags(Owner.here())}
        return runs.create(pipeline, "sft", tags, 0.0).info.run_id

    there, *gone = (
        open_run("p", store.root / "base" / base.fingerprint[:16]), open_run("p", store.root / "sft" / "0"),
        open_run("other", store.root / "sft" / "1"),
    )  # fmt: skip
    assert found_by_verify(uri, store) == [(Fault.CHANGED, "posttrain rebuild")]
    refill(uri, store.root)
    assert [client.get_run(each).info.status for each in gone] == ["KILLED", "KILLED"]
    assert client.get_run(gone[0]).data.tags[Tag.CAUSE] == "its folder in the store was deleted"
    assert client.get_run(there).info.status == "RUNNING" and found_by_verify(uri, store) == []


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


# What `posttrain verify` says when MLflow and the store part ways.


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, prefect_url):
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "rows.txt").write_text("rows")
    toy = Command(folder, *TOY, environment={"PREFECT_API_URL": prefect_url}, tracked=True)
    toy.run()
    assert toy("promote", "toy/left", "--alias", "champion", "--force", "--why", "test").returncode == 0
    assert toy("verify").returncode == 0, toy("verify").stdout
    return folder


@pytest.fixture
def toy(recorded, tmp_path):
    shutil.copytree(recorded, tmp_path / "copy", symlinks=True)
    return Command(tmp_path / "copy", tracked=True)


def faults(toy: Command, *arguments: str) -> str:
    result = toy("verify", *arguments)
    assert result.returncode == 1, result.stdout
    return result.stdout


@pytest.fixture
def client(toy):
    return MlflowClient(f"sqlite:///{toy.folder / 'mlflow.db'}")


def test_a_lost_database_is_named_and_not_made_by_the_look(toy):
    (toy.folder / "mlflow.db").unlink()
    assert "mlflow.db is gone, which 4 manifests were recorded in" in faults(toy)
    assert not (toy.folder / "mlflow.db").exists()


def delete_run(client):
    client.delete_run(client.get_model_version_by_alias("toy", "champion").run_id)


def delete_version(client):
    client.delete_model_version("toy", client.get_model_version_by_alias("toy", "champion").version)


def move_alias(client):
    [other] = client.search_model_versions("name='toy' and tags.`posttrain.stage`='right'")
    client.set_registered_model_alias("toy", "champion", other.version)


@pytest.mark.parametrize(
    ("harm", "found"),
    [
        (delete_run, ["no finished run of it"]),
        (delete_version, ["no registered version of it", "alias champion"]),
        (move_alias, ["alias champion: registered model toy has it at right@"]),
    ],
)
def test_what_was_deleted_or_moved_by_hand_is_named_and_rebuild_mends_it(toy, client, harm, found):
    harm(client)
    reported = faults(toy)
    assert all(each in reported for each in found)
    if harm == delete_run:
        assert found[0] in faults(toy, "toy/left") and toy("verify", "toy/right").returncode == 0
    assert toy("rebuild").returncode == 0
    assert toy("verify").returncode == 0


def test_commands_read_the_record_where_the_last_run_wrote_it(tmp_path, prefect_url, migrated):
    """Without the ``tracking.uri`` of the run."""
    (tmp_path / "rows.txt").write_text("rows")
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(migrated, tmp_path / "elsewhere" / "mlflow.db")
    toy = Command(tmp_path, *TOY, environment={"PREFECT_API_URL": prefect_url}, tracked=True)
    toy.run("tracking.uri=sqlite:///elsewhere/mlflow.db")
    assert toy("promote", "toy/left", "--alias", "champion", "--force", "--why", "test").returncode == 0
    assert toy("verify").returncode == 0
    other = MlflowClient(f"sqlite:///{tmp_path}/elsewhere/mlflow.db")
    assert other.get_model_version_by_alias("toy", "champion").tags["posttrain.stage"] == "left"
    delete_run(other)
    assert f"MLflow at sqlite:///{tmp_path}/elsewhere/mlflow.db has no finished run of it" in faults(toy)
    assert toy("rebuild").returncode == 0 and toy("verify").returncode == 0
    [base] = other.search_model_versions("name='toy' and tags.`posttrain.stage`='model'")
    other.set_registered_model_alias("toy", "mine", base.version)
    shutil.rmtree(tmp_path / "artifacts" / VIEWS)  # a view is a reason too
    assert "alias mine of MLflow" in toy("gc", "--dry-run", "--json").stdout
    assert not (tmp_path / "mlflow.db").exists()


def test_a_killed_runs_record_is_ended_where_it_is(uri, store, tmp_path, migrated):
    """In the MLflow that it used, while another one is used now."""
    shutil.copy(migrated, tmp_path / "former.db")
    client, gone = connect(f"sqlite:///{tmp_path}/former.db"), replace(Owner.here(), started=0.0)
    manifest = store.stage("base", {})
    entry = Store(store.root).entry("base", manifest.fingerprint)
    runs = Executions(client, store.root)
    run = runs.create("p", "base", process_tags(gone), 1.0)
    execution = runs.create("p", "execution", process_tags(gone), 1.0)
    note = RunFile(uri=runs.uri, run_id=run.info.run_id, execution_id=execution.info.run_id, cli_args=[], writer=gone)
    note.write(entry.path)
    runs.tag(run.info.run_id, {Tag.STAGE: "base", Tag.FINGERPRINT: manifest.fingerprint})
    close_left(client.tracking_uri, store.root, [str(entry.path), str(tmp_path / "never")])
    ended = [client.get_run(each.info.run_id).info.status for each in (run, execution)]
    assert ended == ["FINISHED", "KILLED"]  # its stage was committed


def test_a_run_of_what_the_store_lost_is_an_orphan(recorded):
    toy = Command(recorded, tracked=True)
    shutil.move(recorded / "artifacts" / "right", recorded / "right")
    try:
        assert "orphaned" in faults(toy)
    finally:
        shutil.move(recorded / "right", recorded / "artifacts" / "right")
