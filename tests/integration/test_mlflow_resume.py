"""A stage that is interrupted again and again, in every way, is one run in MLflow with each step once."""

import json
import signal

import psutil
import pytest

from lineage.mlflow.address import connect
from tests.chaos.record import digests
from tests.command import Command, family, wait_until
from tests.toy_methods import ToyTraining
from tests.unbroken import unbroken

TOY = ("pipeline=toy", "model=none", "sources.rows.path=rows.txt", "tracking.dvc=false")
NUM_STEPS = 60
SAVING = (f"stages.left.method.num_steps={NUM_STEPS}", "stages.left.method.step_seconds=0.1", "resources.save_steps=5")


@pytest.fixture
def toy(tmp_path, prefect_url, uri):
    (tmp_path / "rows.txt").write_text("rows")
    return Command(
        tmp_path, *TOY, environment={"PREFECT_API_URL": prefect_url, "MLFLOW_TRACKING_URI": uri}, tracked=True
    )


def checkpoint(toy) -> int:
    """Step of the newest one of left."""
    names = [path.name for path in toy.folder.glob("artifacts/left/*/checkpoints/step-*")]
    return max((int(name.removeprefix("step-")) for name in names), default=0)


def runs(client, name):
    experiment = client.get_experiment_by_name("toy")
    found = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"]) if experiment else []
    return [run for run in found if run.info.run_name.partition(" ")[0] == name]


def steps(client):
    [left] = runs(client, "left")
    return [each.step for each in client.get_metric_history(left.info.run_id, "loss")]


def process_of(driver, stage: str) -> psutil.Process:
    found = []
    for each in family(driver):
        if any(stage in file.path for file in each.open_files() if file.path.endswith("stage.log")):
            found.append(each)
    [process] = found
    return process


@pytest.mark.slow
def test_one_run_per_stage_whatever_interrupts_it(toy, uri):
    client = connect(uri)
    driver = toy.start("run", *SAVING)
    wait_until(lambda: checkpoint(toy) >= 5 and runs(client, "left") and len(steps(client)) > 5, "left is recorded")
    driver.kill()
    driver.communicate()

    first = checkpoint(toy)
    driver = toy.start("run", *SAVING)
    wait_until(lambda: checkpoint(toy) > first, "left goes on")
    assert runs(client, "left")[0].info.status == "RUNNING"
    process_of(driver, "left").kill()
    second = checkpoint(toy)
    wait_until(lambda: checkpoint(toy) > second, "left goes on in the same execution")
    driver.send_signal(signal.SIGINT)
    _, errors = driver.communicate(timeout=60)
    assert driver.returncode == 130, errors
    assert runs(client, "left")[0].info.status == "KILLED"

    last = toy("run", "--json", *SAVING)
    assert last.returncode == 0, last.stderr
    assert digests(toy.folder / "artifacts")["left"] == unbroken(ToyTraining(num_steps=NUM_STEPS))
    [left] = runs(client, "left")
    executions = runs(client, "toy")
    assert [run.info.status for run in executions] == ["KILLED", "KILLED", "FINISHED"]
    assert {run.info.status for name in ("data", "model", "left", "right") for run in runs(client, name)} == {
        "FINISHED"
    }
    assert steps(client) == list(range(1, NUM_STEPS + 1))
    assert left.data.tags["mlflow.parentRunId"] == json.loads(last.stdout)["mlflow_run_id"]
    assert "posttrain.cause" not in left.data.tags
    [path] = toy.folder.glob("artifacts/left/*/manifest.json")
    resumed_at = json.loads(path.read_text())["provenance"]["resumed_at"]
    assert len(resumed_at) == 3
    assert json.loads(left.data.tags["posttrain.resumed_at"]) == resumed_at

    (toy.folder / "mlflow.db").unlink()
    assert toy("rebuild").returncode == 0
    client = connect(f"sqlite:///{toy.folder}/./mlflow.db")  # another spelling: no connection to the deleted file
    [left] = runs(client, "left")
    assert steps(client) == list(range(1, NUM_STEPS + 1))
    assert json.loads(left.data.tags["posttrain.resumed_at"]) == resumed_at
