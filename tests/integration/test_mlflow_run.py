"""``posttrain run`` and MLflow: what its own client sees of toy runs, in a file and on a server."""

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest

from lineage.mlflow.address import connect
from lineage.record.run_file import RunFile
from tests.command import Command, wait_until
from tests.libraries.flows.test_trackers import READ
from tests.mlflow_walk import walk

TOY = ("pipeline=toy", "model=none", "sources.rows.path=rows.txt", "tracking.dvc=false")
SLOW_LEFT = ("stages.left.method.num_steps=600", "stages.left.method.step_seconds=0.1")


@pytest.fixture
def toy(tmp_path, prefect_url, migrated):
    (tmp_path / "rows.txt").write_text("rows")
    shutil.copy(migrated, tmp_path / "mlflow.db")
    environment = {"PREFECT_API_URL": prefect_url, "MLFLOW_TRACKING_URI": ""}
    return Command(tmp_path, *TOY, environment=environment, tracked=True)


def client_of(toy):
    return connect(f"sqlite:///{toy.folder / 'mlflow.db'}")


def versions(client):
    found = client.search_model_versions("name='toy'")
    return {each.tags["posttrain.stage"]: each.version for each in found}


def statuses(client):
    experiment = client.get_experiment_by_name("toy").experiment_id
    found = client.search_runs([experiment], order_by=["attributes.start_time ASC"])
    return [(run.info.run_name.partition(" ")[0], run.info.status) for run in found]


def steps_of(client):
    """Steps that are recorded of the newest run."""
    [run] = client.search_runs([client.get_experiment_by_name("toy").experiment_id], max_results=1)
    return len(client.get_metric_history(run.info.run_id, "loss"))


def test_a_version_leads_to_its_run_its_data_its_parent_and_the_root_also_after_a_rebuild(toy):
    result = toy("run", "--json")
    assert result.returncode == 0, result.stderr
    assert "mlflow" not in result.stderr.lower()  # it has nothing to say
    client = client_of(toy)
    first = walk(client, "toy", versions(client)["left"])
    assert [hop["stage"] for hop in first[1:]] == ["left", "model"]
    left, model = first[1:]
    assert left["params"]["learning_rate"] == "0.1"
    assert [(step, value) for step, value, _ in left["metrics"]["loss"]] == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    assert [name for name, *_ in left["data"]] == [name for name, *_ in model["data"]] == ["data"]
    assert left["from"] == model["made"]
    assert left["made"][0][2]["output"] == first[0]["tags"]["posttrain.output"]
    document = json.loads(result.stdout)
    assert client.get_run(document["mlflow_run_id"]).info.status == "FINISHED"
    [path] = (toy.folder / "artifacts" / "left").glob("*/manifest.json")
    manifest = json.loads(path.read_text())
    assert client.get_run(manifest["mlflow_run_id"]).info.run_name == "left"
    assert client.get_run(manifest["execution_run_id"]).data.tags["posttrain.store"] == str(toy.folder / "artifacts")
    assert [each.path for each in client.list_artifacts(manifest["execution_run_id"])] == ["report.html"]
    assert {client.get_run(run_id).info.run_name for run_id in manifest["parent_run_ids"]} == {"model", "data"}
    assert sorted(path.name for path in toy.folder.iterdir() if "mlruns" in path.name) == []
    [note] = [RunFile.read(path) for path in (toy.folder / "artifacts" / "left").iterdir()]
    assert note and note.uri == f"sqlite:///{toy.folder / 'mlflow.db'}"

    (toy.folder / "mlflow.db").unlink()
    rebuilt = toy("rebuild")
    assert rebuilt.returncode == 0, rebuilt.stderr
    assert "added 1 executions, 4 runs, 3 models, 3 versions, 0 aliases; 0 runs were present" in rebuilt.stdout
    client = connect(f"sqlite:///{toy.folder}/./mlflow.db")  # another spelling: no connection to the deleted file
    again = walk(client, "toy", versions(client)["left"])
    for each in (first[0], again[0]):
        each.pop("version")  # left and right end in the same moment: either may be the second
    assert again == first
    assert toy("rebuild").stdout.startswith("MLflow: added 0 executions, 0 runs")


@pytest.mark.slow
def test_a_failed_stage_and_a_stopped_run_are_closed(toy):
    assert toy("run", "stages.left.method.fail=true").returncode == 1
    client = client_of(toy)
    assert {("toy", "FAILED"), ("left", "FAILED"), ("right", "FINISHED")} < set(statuses(client))
    process = toy.start("run", *SLOW_LEFT)
    wait_until(lambda: statuses(client)[-1] == ("left", "RUNNING"), "the stage's run is open")
    wait_until(lambda: steps_of(client), "it has reported a step")
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert statuses(client)[-2:] == [("toy", "KILLED"), ("left", "KILLED")]


@pytest.mark.slow  # of a killed process in test_mlflow_tracker.py
def test_a_killed_run_is_closed_by_the_next_command_also_by_one_with_nothing_to_do(toy):
    toy.run()
    process = toy.start("run", *SLOW_LEFT)
    client = client_of(toy)
    wait_until(lambda: ("left", "RUNNING") in statuses(client), "the stage's run is open")
    process.kill()
    process.communicate(timeout=120)
    assert "is open, and its process or its folder is gone" in toy("verify").stdout
    assert "nothing to do" in toy("run").stdout
    assert {("left", "KILLED"), ("toy", "KILLED")} <= set(statuses(client))  # the stage and the execution
    assert "RUNNING" not in {status for _, status in statuses(client)}
    assert toy("verify").returncode == 0


@pytest.mark.slow  # of events alone: tests/libraries/flows/test_trackers.py
@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_ended_early_continues_its_record_in_every_tracker_of_a_list(toy, stop):
    names = [name for name in READ if importlib.util.find_spec({"tensorboard": "tensorboardX"}.get(name, name))]
    toy.environment |= {"WANDB_MODE": "offline"}
    if "trackio" in names:
        toy.environment |= {"TRACKIO_DIR": str(importlib.import_module("trackio.utils").TRACKIO_DIR)}
    steps = {step: round(1.0 / step, 4) for step in range(1, 101)}
    overrides = (
        f"tracking=[mlflow,{','.join(names)}]", f"tracking.experiment={toy.folder.name}",
        f"stages.left.method.num_steps={len(steps)}", "stages.left.method.step_seconds=0.1",
    )  # fmt: skip

    def notes():
        found = [next(iter(toy.folder.glob(f"artifacts/left/*/{name}.json")), None) for name in names]
        return [json.loads(note.read_text()) if note else {"step": 0} for note in found]

    def recorded(note, name):
        every, fingerprint = READ[name](toy.folder / "artifacts"), note["id"].partition("-")[0]
        [seen] = [seen for run, seen in every.items() if fingerprint in run]
        return str(seen["status"]).partition(":")[0], seen["steps"]

    process = toy.start("run", *overrides)
    wait_until(lambda: all(note["step"] > 20 for note in notes()), "each tracker has steps")
    process.send_signal(stop)
    _, errors = process.communicate(timeout=120)
    before = notes()
    if stop == signal.SIGINT:
        assert "it did not take the end of the run in time" not in errors
        assert [recorded(*each)[0] for each in zip(before, names, strict=True)] == ["killed"] * len(names)
    again = toy.process("run", *overrides)
    assert again.returncode == 0, again.stderr
    assert [note["id"] for note in notes()] == [note["id"] for note in before]
    for note, name in zip(before, names, strict=True):
        assert recorded(note, name) == ("finished", steps), name
    client = client_of(toy)
    runs = client.search_runs([client.get_experiment_by_name(toy.folder.name).experiment_id])
    [left] = [run for run in runs if run.info.run_name == "left"]
    history = client.get_metric_history(left.info.run_id, "loss")
    assert (left.info.status, [each.step for each in history]) == ("FINISHED", [*steps])
    executions = [run.info.status for run in runs if "mlflow.parentRunId" not in run.data.tags]
    assert sorted(executions) == ["FINISHED", "KILLED"]


@pytest.mark.slow
def test_a_damaged_database_is_reported_without_a_traceback(toy):
    toy.run()
    (toy.folder / "mlflow.db").write_bytes(b"garbage" * 1000)
    for verb in ("verify", "rebuild"):
        result = toy.process(verb)
        assert result.returncode == 1
        assert "cannot be opened" in result.stdout + result.stderr
        assert "Traceback" not in result.stderr


def test_tracking_none_and_mlflow_false_record_nothing_and_uri_says_where(toy):
    (toy.folder / "mlflow.db").unlink()
    toy.run("tracking=none")
    alone = toy("stage", "left", *toy.cli_args("run"), "tracking.mlflow=false", "stages.left.method.learning_rate=0.2")
    assert alone.returncode == 0, alone.stderr
    assert not (toy.folder / "mlflow.db").exists()
    other = toy.folder / "there" / "other.db"
    toy.run(f"tracking.uri=sqlite:///{other}", "stages.left.method.learning_rate=0.3")
    assert not (toy.folder / "mlflow.db").exists()
    # What was made before without a record was written from its manifests: the walk has no hole.
    client = connect(f"sqlite:///{other}")
    assert [hop["stage"] for hop in walk(client, "toy", versions(client)["left"])[1:]] == ["left", "model"]
    refused = toy("rebuild", "tracking=none")
    assert (refused.returncode, "there is no MLflow to refill" in refused.stderr) == (2, True)


@pytest.mark.slow
def test_many_runs_at_once_share_one_fresh_database(toy):
    rates = ["0.2", "0.3", "0.4"]
    started = [toy.start("run", f"stages.left.method.learning_rate={rate}") for rate in rates]
    for process in started:
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        assert "mlflow" not in err.lower()
    client = client_of(toy)
    found = statuses(client)
    assert {status for _, status in found} == {"FINISHED"}
    names = [name for name, _ in found]
    assert {name: names.count(name) for name in set(names)} == {"toy": 3, "left": 3, "data": 1, "model": 1, "right": 1}
    for version in client.search_model_versions("name='toy'"):
        assert walk(client, "toy", version.version)[-1]["stage"] == "model"


@pytest.fixture
def server(tmp_path):
    """An MLflow server on a port of its own; ends with its whole session."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = tmp_path / "server"
    folder.mkdir()
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--backend-store-uri", f"sqlite:///{folder}/mlflow.db"], cwd=folder, stdout=log, stderr=log,
            start_new_session=True, env={**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"},
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    wait_until(lambda: _answers(url), "the server answers")
    yield url
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(120)


def _answers(url):
    try:
        return urllib.request.urlopen(f"{url}/health", timeout=5).status == 200
    except OSError:
        return False


@pytest.mark.slow
def test_the_same_on_a_server(toy, server):
    toy.environment["MLFLOW_TRACKING_URI"] = server
    (toy.folder / "mlflow.db").unlink()  # of the tests without a server
    toy.run()
    client = connect(server)
    hops = walk(client, "toy", versions(client)["right"])
    assert [hop["stage"] for hop in hops[1:]] == ["right", "model"]
    assert len(hops[1]["metrics"]["loss"]) == 3
    assert hops[1]["from"] == hops[2]["made"]
    again = toy("rebuild")
    assert "added 0 executions, 0 runs, 0 models, 0 versions, 0 aliases; 4 runs were present" in again.stdout, (
        again.stderr
    )
    assert not (toy.folder / "mlflow.db").exists()
