"""A deployed run that is cancelled, in Prefect or by `posttrain cancel`, saves first; the next one goes on."""

import json
import os
import signal

import pytest

from tests.chaos.record import digests
from tests.command import CONF, REPOSITORY, call, family, wait_until
from tests.prefect_api import PrefectApi, serve
from tests.toy_interrupted import HOLD_FILE, ToyInterrupted, unbroken

TOY = ["pipeline=toy-interrupted", "model=none", "tracking=none", "sources.rows.path=rows.txt"]
WORDS = ["--config-dir", str(CONF), *TOY]
DEPLOYMENT = "toy-interrupted/local"
NUM_STEPS = 8


@pytest.fixture
def environment(tmp_path, prefect_url) -> dict[str, str]:
    (tmp_path / "rows.txt").write_text("rows")
    return {
        **os.environ, "PREFECT_API_URL": prefect_url, "PREFECT_HOME": str(tmp_path / "home"),
        "PYTHONPATH": str(REPOSITORY), "PWD": str(tmp_path),
    }  # fmt: skip


@pytest.fixture
def served(tmp_path, environment):
    process = serve(tmp_path, environment, *WORDS)
    yield process
    process.send_signal(signal.SIGTERM)
    process.wait(60)


@pytest.mark.slow
def test_a_cancelled_run_saves_and_the_next_one_resumes(served, environment, prefect_url, tmp_path):
    api = PrefectApi(prefect_url)

    def steps() -> list[int]:
        files = list(tmp_path.glob("artifacts/train/*/metrics.jsonl"))
        return [json.loads(line)["step"] for line in files[0].read_text().splitlines()] if files else []

    def saved() -> list[str]:
        return sorted(path.name for path in tmp_path.glob("artifacts/train/*/checkpoints/step-*"))

    def held_in(step: int) -> str:
        """A run that waits in a step."""
        hold.write_text(str(step))
        run = api.start(DEPLOYMENT)
        wait_until(lambda: len(steps()) == step - 1, "it steps")
        return run

    hold = tmp_path / "artifacts" / HOLD_FILE
    hold.parent.mkdir()
    run = held_in(4)
    api.set_state(run, "CANCELLING")
    assert api.end(run)["type"] == "CANCELLED"
    wait_until(lambda: len(family(served)) == 1, "all processes end")
    assert "step-4" in saved()

    run = held_in(7)
    log = tmp_path / "serve.log"  # Prefect drops a batch of its own log that a busy server does not take
    wait_until(lambda: f"train: resumes from step 4 of {NUM_STEPS}" in log.read_text(), "it logs where it resumes")
    assert " is stopped; " in call(["cancel", "latest"], tmp_path, environment).stdout
    assert api.end(run)["type"] == "CANCELLED"
    assert "step-7" in saved()

    hold.unlink()
    last = api.start(DEPLOYMENT)
    assert api.end(last)["type"] == "COMPLETED"
    assert "train: resumes from step" in api.log(run) + api.log(last)
    assert steps() == list(range(1, NUM_STEPS + 1))
    assert digests(tmp_path / "artifacts")["train"] == unbroken(ToyInterrupted(num_steps=NUM_STEPS))
    [manifest] = tmp_path.glob("artifacts/train/*/manifest.json")
    assert json.loads(manifest.read_text())["provenance"]["resumed_at"] == [4, 7]
