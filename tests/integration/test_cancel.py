"""A deployed run that is cancelled, in Prefect or by `posttrain cancel`, saves first; the next one goes on."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.chaos.record import digests
from tests.command import CONF, REPOSITORY, family, wait_until
from tests.prefect_api import PrefectApi
from tests.toy_methods import ToyTraining
from tests.unbroken import unbroken

WORDS = ["--config-dir", str(CONF), "pipeline=toy", "model=none", "tracking=none", "sources.rows.path=rows.txt"]
NUM_STEPS = 60
TRAINS = [f"stages.left.method.num_steps={NUM_STEPS}", "stages.left.method.step_seconds=0.2"]


@pytest.fixture
def environment(tmp_path, prefect_url) -> dict[str, str]:
    (tmp_path / "rows.txt").write_text("rows")
    return {
        **os.environ, "PREFECT_API_URL": prefect_url, "PREFECT_HOME": str(tmp_path / "home"),
        "PYTHONPATH": str(REPOSITORY), "PWD": str(tmp_path),
    }  # fmt: skip


@pytest.fixture
def served(tmp_path, environment):
    with (tmp_path / "serve.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "flows", "serve", *WORDS], cwd=tmp_path, env=environment,
            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    wait_until(lambda: process.poll() is not None or "run one:" in (tmp_path / "serve.log").read_text(), "served")
    assert process.poll() is None, (tmp_path / "serve.log").read_text()
    yield process
    process.send_signal(signal.SIGTERM)
    process.wait(60)


def test_a_cancelled_run_saves_and_the_next_one_goes_on(served, environment, prefect_url, tmp_path):
    api = PrefectApi(prefect_url)

    def steps() -> list[int]:
        files = list(tmp_path.glob("artifacts/left/*/metrics.jsonl"))
        return [json.loads(line)["step"] for line in files[0].read_text().splitlines()] if files else []

    def saved() -> list[str]:
        return [path.name for path in tmp_path.glob("artifacts/left/*/checkpoints/step-*")]

    run = api.start("toy/local", *TRAINS)
    wait_until(lambda: len(steps()) > 2, "left steps")
    api.set_state(run, "CANCELLING")
    assert api.end(run)["type"] == "CANCELLED"
    wait_until(lambda: len(family(served)) == 1, "all processes end")
    [first] = saved()

    run = api.start("toy/local", *TRAINS)
    before = len(steps())
    wait_until(lambda: len(steps()) > before, "left goes on")
    assert f"left: goes on from step {before} of {NUM_STEPS}" in api.log(run)
    called = [sys.executable, "-m", "flows", "cancel", "latest"]
    said = subprocess.run(called, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    assert " is stopped; " in said
    assert api.end(run)["type"] == "CANCELLED"
    assert saved() != [first]

    assert api.end(api.start("toy/local", *TRAINS))["type"] == "COMPLETED"
    assert steps() == list(range(1, NUM_STEPS + 1))
    assert digests(tmp_path / "artifacts")["left"] == unbroken(ToyTraining(num_steps=NUM_STEPS))
    [manifest] = tmp_path.glob("artifacts/left/*/manifest.json")
    assert len(json.loads(manifest.read_text())["provenance"]["resumed_at"]) == 2
