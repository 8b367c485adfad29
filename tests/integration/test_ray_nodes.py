"""A training over two nodes of a Ray cluster: two raylets on loopback, each with a directory of its own."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from socket import gethostname
from types import SimpleNamespace

import pytest
import torch

from tests.command import PATIENCE, Command, family, wait_until
from tests.miniature import MODEL, STEPS, write_own_rows
from tests.training import same, weights

pytestmark = pytest.mark.slow  # test_resources.py, test_attempts.py and test_exit_reasons.py have each decision

HEAD, SECOND, THIRD = "127.0.0.2", "127.0.0.3", "127.0.0.4"
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "ab" * 32}
# An earlier run of the tests' process, without a cluster, has set the second for clusters of its own.
SHARED = {**TOKEN, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"}
# A node that does not answer is taken for lost after 3 s, not 15.
QUICK = {"RAY_health_check_period_ms": "1000", "RAY_health_check_failure_threshold": "3"}
PORT = 6394
TRAINING = "stages.cpt"
FOUR = ("launcher=cluster", "num_workers=4", "num_nodes=2", "micro_batch_size=2", "save_steps=5", "cpus_per_worker=1")


class Nodes:
    """The nodes of a cluster, which are started and killed one by one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, ip: str, cpus: int = 2, before: str = "") -> None:
        """Starts a node, the head first.

        Args:
            before: commands of a shell that run before it, in a mount namespace of its own.
        """
        log, place = self._folder / f"{ip}.log", self._folder / ip[-1]
        head = ["--head", f"--port={PORT}", "--include-dashboard=false"]
        where = [f"--address={HEAD}:{PORT}"] if self._processes else head
        ray = [str(Path(sys.executable).with_name("ray")), "start", "--block", f"--node-ip-address={ip}", *where]
        ray += [f"--num-cpus={cpus}", f"--temp-dir={place}"]
        if before:
            ray = ["unshare", "--mount", "sh", "-c", f'{before} && exec "$@"', "sh", *ray]
        place.mkdir()
        with log.open("w") as said:
            self._processes[ip] = subprocess.Popen(
                ray, env={**os.environ, **SHARED, **QUICK}, stdin=subprocess.DEVNULL, stdout=said, stderr=said,
                start_new_session=True, cwd=place,
            )  # fmt: skip
        process = self._processes[ip]
        wait_until(lambda: process.poll() is not None or "Ray runtime started" in log.read_text(), f"{ip} is there")
        assert process.poll() is None, log.read_text()

    def kill(self, ip: str) -> None:
        """Kills a node with all its workers, as by a power cut."""
        process = self._processes.pop(ip)
        for each in family(process):
            each.kill()
        process.wait()

    def kill_all(self) -> None:
        for ip in list(self._processes):
            self.kill(ip)


@pytest.fixture
def nodes(tmp_path_factory) -> Iterator[Nodes]:
    folder = Path("/tmp") / f"n{os.getpid()}"  # a socket's path has at most 107 characters
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    started = Nodes(folder)
    try:
        started.start(HEAD)
        yield started
    finally:
        started.kill_all()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def own(tmp_path, prefect_url) -> Command:
    """A continued pretraining of a small model on rows of the user's own."""
    rows = write_own_rows(tmp_path)
    unused = [f"~{kind}.{name}" for kind in ("stages", "sources") for name in ("instructions", "preferences")]
    unused += [f"~stages.{name}" for name in ("sft", "reward", "dpo", "evaluate")]
    steps = [word for word in STEPS if word.startswith((f"{TRAINING}.method.max", "resources"))]
    settings = [f"{TRAINING}.method.num_steps=40", f"{TRAINING}.method.global_batch_size=8"]
    return Command(
        tmp_path, "pipeline=cpt-sft-dpo", rows[0], *unused, *MODEL, *steps, *settings,
        environment={"PREFECT_API_URL": prefect_url, "RAY_ADDRESS": f"{HEAD}:{PORT}", **SHARED},
    )  # fmt: skip


def resources(*settings: str) -> list[str]:
    return [f"{TRAINING}.resources.{setting}" for setting in (*FOUR, *settings)]


def manifest(own: Command, store: str) -> SimpleNamespace:
    [path] = (own.folder / store / "cpt").glob("*/manifest.json")
    return SimpleNamespace(**json.loads(path.read_text()), output=path.parent / "output")


class Started:
    """A run in the background."""

    def __init__(self, own: Command, store: str, *settings: str) -> None:
        self._own, self._said = own, own.folder / f"{store}.err"
        self.store = own.folder / store
        self._process = own.start("run", f"store={store}", *resources(*settings), stderr=self._said)

    def wait_for_checkpoint(self, step: int) -> None:
        wait_until(
            lambda: self._process.poll() is not None or list(self.store.glob(f"cpt/*/checkpoints/step-{step}")), "saved"
        )
        assert self._process.poll() is None, self.said

    @property
    def said(self) -> str:
        return self._said.read_text()

    def wait(self) -> int:
        return self._process.wait(300 * PATIENCE)


def test_a_lost_node_is_replaced_and_the_weights_are_those_of_an_undisturbed_run(own, nodes):
    nodes.start(SECOND)
    assert own("run", "store=whole", *resources()).returncode == 0
    whole = manifest(own, "whole")
    used = whole.provenance["nodes"]
    assert [(each["host"], each["workers"], each["gpu"]) for each in used] == [(gethostname(), 2, "")] * 2
    assert sorted(each["node"].partition(",")[0] for each in used) == [HEAD, SECOND]

    run = Started(own, "broken")
    run.wait_for_checkpoint(10)
    nodes.kill(SECOND)
    nodes.start(THIRD)
    assert run.wait() == 0, run.said
    [line] = [line for line in run.said.splitlines() if "it resumes from its checkpoint of step" in line]
    assert line.startswith("stage cpt failed: rank") and f"on {gethostname()} ({SECOND}, node " in line
    assert ") died at step " in line and ": its node is gone (log: " in line
    broken = manifest(own, "broken")
    assert sorted(each["node"].partition(",")[0] for each in broken.provenance["nodes"]) == [HEAD, THIRD]
    assert broken.provenance["resumed_at"] and broken.fingerprint == whole.fingerprint
    assert same(weights(broken.output), weights(whole.output))

    # On what is left, with fewer workers: the same model up to the order of additions.
    run = Started(own, "fewer", "min_workers=1")
    run.wait_for_checkpoint(10)
    nodes.kill(THIRD)
    assert run.wait() == 0, run.said
    assert "cpt: runs with 2 of 4 workers, on 1 node, the most that fit and divide global_batch_size=8" in run.said
    fewer = manifest(own, "fewer")
    assert [(each["node"].partition(",")[0], each["workers"]) for each in fewer.provenance["nodes"]] == [(HEAD, 2)]
    found, expected = weights(fewer.output), weights(whole.output)
    assert all(torch.allclose(found[name], expected[name], atol=1e-4) for name in expected)


def test_without_a_replacement_or_fewer_workers_the_last_good_checkpoint_is_named(own, nodes):
    nodes.start(SECOND)
    run = Started(own, "left", "wait_minutes=0.05")
    run.wait_for_checkpoint(10)
    nodes.kill(SECOND)
    assert run.wait() == 1
    last = run.said.splitlines()[-1]
    assert (
        "posttrain: stage cpt failed: it waited 0.05 minutes (resources.wait_minutes) for 4 workers with 1 CPU" in last
    )
    assert f"on 2 nodes, and the cluster has 1 node: {gethostname()} ({HEAD}, node " in last
    assert "; its checkpoint of step " in last and " is kept: add nodes and run again" in last
    nodes.start(SECOND)
    assert own("run", "store=left", *resources()).returncode == 0
    assert manifest(own, "left").provenance["resumed_at"]


def test_more_nodes_than_the_cluster_has_are_refused_before_anything_starts(own, nodes):
    result = own("run", "store=none", *resources())
    assert result.returncode == 2
    assert f"stages.cpt.resources.num_nodes=2: the cluster has 1 node: {gethostname()} ({HEAD}, node " in result.stderr
    assert not (own.folder / "none" / "base").exists()


def can_hide_a_folder() -> bool:
    return subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not can_hide_a_folder(), reason="a mount namespace needs root")
def test_a_store_that_the_second_node_does_not_see_is_refused(own, nodes):
    store = own.folder / "unseen"
    store.mkdir()
    nodes.start(SECOND, before=f"mount -t tmpfs none {store}")
    result = own("run", "store=unseen", *resources())
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert "stage cpt failed: rank " in last and f": {gethostname()} ({SECOND}, node " in last
    assert " does not see " in last and "give a `store` that every node mounts" in last
    assert "Traceback" not in result.stderr
