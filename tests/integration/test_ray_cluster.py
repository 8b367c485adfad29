"""A sweep on a Ray cluster that is not ours: it was started before, and goes on after."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.record import digests
from tests.command import TOY, Command, family, wait_until
from tests.toy_interrupted import TROUBLE_FILE, ToyInterrupted, unbroken

TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "ab" * 32}
HOST = "127.0.0.2"  # of this machine alone; for 127.0.0.1 Ray takes an address that others reach
RATES = "stages.left.method.learning_rate=0.1,0.2"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[str]:
    """The address of a cluster of one node with three CPUs: two for workers, one for what Ray Train adds to each."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("ray") / "ray.log"
    cli_args = ["--head", "--block", f"--node-ip-address={HOST}", f"--port={port}", "--num-cpus=3"]
    cli_args += ["--include-dashboard=false", f"--temp-dir={tempfile.gettempdir()}/ray"]
    with log.open("w") as message:
        head = subprocess.Popen(
            [Path(sys.executable).with_name("ray"), "start", *cli_args], env={**os.environ, **TOKEN},
            stdin=subprocess.DEVNULL, stdout=message, stderr=message, start_new_session=True,
        )  # fmt: skip
    try:
        wait_until(lambda: head.poll() is not None or "Ray runtime started" in log.read_text(), "the cluster is there")
        assert head.poll() is None, log.read_text()
        yield f"{HOST}:{port}"
    finally:
        for each in family(head):  # asked to end, it would wait half a minute for its work to leave
            each.kill()
        head.wait(120)


@pytest.fixture
def toy(tmp_path, prefect_url, cluster) -> Command:
    (tmp_path / "rows.txt").write_text("rows")
    return Command(
        tmp_path, *TOY, "stages.left.resources.launcher=cluster",
        environment={"PREFECT_API_URL": prefect_url, "RAY_ADDRESS": cluster, "RAY_AUTH_TOKEN": TOKEN["RAY_AUTH_TOKEN"]},
    )  # fmt: skip


@pytest.mark.slow
def test_the_trials_of_a_sweep_run_side_by_side_on_a_cluster(toy):
    slow = ("stages.left.method.num_steps=20", "stages.left.method.step_seconds=0.5")
    result = toy("run", "--multirun", "--json", RATES, *slow)
    assert result.returncode == 0, result.stderr
    assert [trial["state"] for trial in json.loads(result.stdout)["trials"]] == ["complete", "complete"]

    manifests = [json.loads(path.read_text()) for path in (toy.folder / "artifacts/left").glob("*/manifest.json")]
    spans = sorted((each["provenance"]["start"], each["provenance"]["end"]) for each in manifests)
    assert len(spans) == 2 and spans[1][0] < spans[0][1]  # the second began before the first was over
    logs = [path.read_text() for path in (toy.folder / "artifacts/left").glob("*/logs/stage.log")]
    assert len(logs) == 2 and all("Connecting to existing Ray cluster" in log for log in logs)


@pytest.mark.slow
def test_a_token_that_the_cluster_does_not_take_is_reported_in_one_line(toy):
    toy.environment["RAY_AUTH_TOKEN"] = "cd" * 32
    result = toy("run", "--multirun", RATES)
    assert result.returncode == 2, result.stderr
    assert "the cluster wants a token and was given none, or another; set RAY_AUTH_MODE=token" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("trouble", ["", "die:6:1"])  # by SIGKILL, in step 6
def test_workers_on_a_cluster_end_with_the_same_bits_also_where_one_dies_and_is_replaced(toy, trouble):
    cli_args = ("pipeline=toy-interrupted", "stages.train.resources.launcher=cluster",
             "stages.train.resources.num_workers=2", "stages.train.resources.micro_batch_size=4")  # fmt: skip
    command = Command(toy.folder, "model=none", "sources.rows.path=rows.txt", environment=toy.environment)
    (toy.folder / "artifacts").mkdir()
    (toy.folder / "artifacts" / TROUBLE_FILE).write_text(trouble)
    result = command("run", *cli_args)
    assert result.returncode == 0, result.stderr
    lost = [line for line in result.stderr.splitlines() if "it resumes from its checkpoint of step 4" in line]
    assert bool(lost) == bool(trouble)
    assert not lost or (lost[0].startswith("stage train failed: rank 1 on ") and " died at step " in lost[0])
    assert digests(toy.folder / "artifacts")["train"] == unbroken(ToyInterrupted(num_steps=8))


@pytest.mark.slow
def test_what_has_no_room_on_the_cluster_waits(toy):
    wide = ("stages.left.resources.num_workers=2", "stages.left.resources.micro_batch_size=2")
    result = toy("run", "--multirun", "--json", RATES, *wide)
    assert result.returncode == 0, result.stderr
    assert [trial["state"] for trial in json.loads(result.stdout)["trials"]] == ["complete", "complete"]
