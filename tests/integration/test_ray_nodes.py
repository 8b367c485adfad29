"""A training over two nodes of a Ray cluster: two raylets on loopback, each with a directory of its own."""

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from socket import gethostname
from types import SimpleNamespace

import psutil
import pytest
import torch

from tests.command import PATIENCE, REPOSITORY, Command, family, wait_until
from tests.miniature import MODEL, STEPS, write_own_rows
from tests.training import same, weights

# test_resources.py, test_attempts.py and test_exit_reasons.py have a quick test of each decision.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

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
        with log.open("w") as message:
            self._processes[ip] = subprocess.Popen(
                ray, env={**os.environ, **SHARED, **QUICK}, stdin=subprocess.DEVNULL, stdout=message, stderr=message,
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
        process.wait(120)

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
    return read_manifest(own.folder / store, "cpt")


def read_manifest(store: Path, stage: str) -> SimpleNamespace:
    """The manifest of a stage that was run once, and its output."""
    [path] = (store / stage).glob("*/manifest.json")
    found = json.loads(path.read_text())
    return SimpleNamespace(**found, output=path.parent / "output")


class Started:
    """A run in the background."""

    def __init__(self, own: Command, store: str, *settings: str) -> None:
        self._own, self._errors = own, own.folder / f"{store}.err"
        self.store = own.folder / store
        self._process = own.start("run", f"store={store}", *resources(*settings), stderr=self._errors)

    def wait_for_checkpoint(self, step: int) -> None:
        wait_until(
            lambda: self._process.poll() is not None or list(self.store.glob(f"cpt/*/checkpoints/step-{step}")), "saved"
        )
        assert self._process.poll() is None, self.stderr

    @property
    def stderr(self) -> str:
        return self._errors.read_text()

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
    assert run.wait() == 0, run.stderr
    [line] = [line for line in run.stderr.splitlines() if "it resumes from its checkpoint of step" in line]
    assert line.startswith("stage cpt failed: rank") and f"on {gethostname()} ({SECOND}, node " in line
    assert ") died at step " in line and ": its node is gone (log: " in line
    broken = manifest(own, "broken")
    assert sorted(each["node"].partition(",")[0] for each in broken.provenance["nodes"]) == [HEAD, THIRD]
    assert broken.provenance["resumed_at"] and broken.fingerprint == whole.fingerprint
    assert same(weights(broken.output), weights(whole.output))


def test_on_what_is_left_fewer_workers_go_on_to_the_same_model(own, nodes):
    alone = [f"{TRAINING}.resources.{setting}" for setting in ("launcher=process", "micro_batch_size=8")]
    assert own("run", "store=whole", *alone).returncode == 0
    nodes.start(SECOND)
    run = Started(own, "fewer", "min_workers=1")
    run.wait_for_checkpoint(10)
    nodes.kill(SECOND)
    assert run.wait() == 0, run.stderr
    assert "cpt: runs with 2 of 4 workers, on 1 node, the most that fit and divide global_batch_size=8" in run.stderr
    fewer = manifest(own, "fewer")
    assert [(each["node"].partition(",")[0], each["workers"]) for each in fewer.provenance["nodes"]] == [(HEAD, 2)]
    found, expected = weights(fewer.output), weights(manifest(own, "whole").output)
    assert all(torch.allclose(found[name], expected[name], atol=1e-4) for name in expected)


def test_without_a_replacement_or_fewer_workers_the_last_good_checkpoint_is_named(own, nodes):
    nodes.start(SECOND)
    run = Started(own, "left", "wait_minutes=0.5")
    run.wait_for_checkpoint(10)
    nodes.kill(SECOND)
    assert run.wait() == 1
    last = run.stderr.splitlines()[-1]
    assert (
        "posttrain: stage cpt failed: it waited 0.5 minutes (resources.wait_minutes) for 4 workers with 1 CPU" in last
    )
    assert f"on 2 nodes, and the cluster has 1 node: {gethostname()} ({HEAD}, node " in last
    assert "; its checkpoint of step " in last and " is kept: add nodes and run again" in last
    nodes.start(THIRD)
    assert own("run", "store=left", *resources()).returncode == 0
    assert manifest(own, "left").provenance["resumed_at"]


def test_more_nodes_than_the_cluster_has_are_refused_before_anything_starts(own, nodes):
    result = own("run", "store=none", *resources())
    assert result.returncode == 2
    assert f"stages.cpt.resources.num_nodes=2: the cluster has 1 node: {gethostname()} ({HEAD}, node " in result.stderr
    assert not (own.folder / "none" / "base").exists()


MAP = """
from pathlib import Path
from flows.stages.job import Job
from flows.stages.resources import rows_mapped
from tasks.context import Resources
from tasks.data import kinds
from tests.toy_methods import ToyModel, with_its_node

kinds.INLINE_SECONDS = 0.0
resources = Resources(cpus_per_worker=1, wait_minutes=3.0)
job = Job(stage="rows", method=ToyModel(), inputs={}, resources=resources, directory=Path.cwd(), row_processes=4)
with rows_mapped(job), open("found", "w", buffering=1) as found:
    for item, node in kinds.ordered_map(with_its_node, iter(range(100)), 1):
        print(item, node, file=found)
"""


def test_rows_of_a_lost_node_are_mapped_by_the_others(nodes, tmp_path):
    nodes.start(SECOND)
    found, message = tmp_path / "found", tmp_path / "said"
    environment = {**os.environ, **SHARED, "RAY_ADDRESS": f"{HEAD}:{PORT}", "PYTHONPATH": str(REPOSITORY)}
    with message.open("w") as log:
        process = subprocess.Popen([sys.executable, "-c", MAP], cwd=tmp_path, env=environment, stdout=log, stderr=log)
    wait_until(lambda: process.poll() is not None or (found.exists() and found.read_text().count("\n") > 9), "mapped")
    nodes.kill(SECOND)
    assert process.wait(200 * PATIENCE) == 0, message.read_text()
    lines = [line.split() for line in found.read_text().splitlines()]
    assert [int(item) for item, _ in lines] == list(range(100))
    assert len({node for _, node in lines}) == 2


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


# A driver takes no CPU: the head has none, so that what runs on the cluster runs on the second node.
CLUSTER = f"""
import sys
from ray.cluster_utils import Cluster

folder = sys.argv[1]
head = {{"node_ip_address": "{HEAD}", "temp_dir": folder + "/ray", "num_cpus": 0}}
cluster = Cluster(initialize_head=True, head_node_args=head)
cluster.add_node(node_ip_address="{SECOND}", temp_dir=folder + "/2", num_cpus=2)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


def test_a_merge_runs_on_one_worker_of_the_cluster(tmp_path, prefect_url):
    rows = write_own_rows(tmp_path)[:2]
    stages = ("cpt", "sft", "reward", "dpo", "qlora-dpo", "preferences", "evaluate", "gate")
    graph = [f"~stages.{name}" for name in stages] + ["~sources.preferences"]
    graph += ["stages.qlora-sft.inputs.policy=base", "stages.merge.inputs.policy=qlora-sft"]
    graph += ["stages.qlora-sft.method.num_steps=2"]
    command = Command(
        tmp_path, "pipeline=qlora-sft-dpo", *MODEL, *rows, *graph, "resources.cpus_per_worker=1",
        environment={"PREFECT_API_URL": prefect_url},
    )  # fmt: skip
    assert command("run").returncode == 0
    here = read_manifest(tmp_path / "artifacts", "merge")
    shutil.rmtree(here.output.parent)
    folder = Path("/tmp") / f"c{os.getpid()}"
    folder.mkdir(mode=0o700)
    cluster = subprocess.Popen(
        [sys.executable, "-c", CLUSTER, str(folder)], text=True,
        env={**os.environ, **SHARED, **QUICK, "RAY_TMPDIR": str(folder)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, cwd=folder,
    )  # fmt: skip
    assert cluster.stdout
    try:
        address = cluster.stdout.readline().strip()
        assert address, "the cluster did not start"
        command.environment |= {"RAY_ADDRESS": address, **SHARED}
        result = command("run", "stages.merge.resources.launcher=cluster")
    finally:
        for each in family(cluster):
            each.kill()
        cluster.wait(120)
        shutil.rmtree(folder, ignore_errors=True)
    assert result.returncode == 0, result.stderr
    there = read_manifest(tmp_path / "artifacts", "merge")
    [used] = there.provenance["nodes"]
    assert (used["node"].partition(",")[0], used["workers"]) == (SECOND, 1)
    assert there.files == here.files


UNUSED = ("preferences", "reward", "dpo")
SMALL = (
    "tracking=none", *MODEL, *(word for word in STEPS if not word.startswith(("stages.reward", "stages.dpo"))),
    *(f"~stages.{name}" for name in UNUSED), "~sources.preferences",
    *(f"~stages.evaluate.inputs.{name}" for name in ("pairs", "reward_model", "dpo")),
    "stages.evaluate.resources.micro_batch_size=4",  # several batches
)  # fmt: skip


def end_processes(variable: str, value: str) -> None:
    """Kills what has this variable in its environment: `ray start` leaves its processes behind."""
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if each.environ().get(variable) == value:
                each.kill()


def test_the_commands_of_the_page_go_from_two_empty_machines_to_a_finished_run(tmp_path, prefect_url):
    page = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text()
    block = page.partition("```bash\n")[2].partition("```")[0]
    for found, here in (("10.0.0.1", HEAD), ("10.0.0.2", SECOND), ("6379", str(PORT)), ("/shared", str(tmp_path))):
        assert found in block
        block = block.replace(found, here)
    rows = [word for word in write_own_rows(tmp_path) if "preferences" not in word]
    small = shlex.join(word for word in (*SMALL, *rows))
    block = re.sub(r"^(posttrain run .*)$", rf"\1 {small}", block, flags=re.MULTILINE)
    block = re.sub(r"^(posttrain doctor [^#]*).*$", r"\1 || true", block, flags=re.MULTILINE)  # of the tests' machine
    folder = Path("/tmp") / f"p{os.getpid()}"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(tmp_path),
        "RAY_TMPDIR": str(folder), "PREFECT_API_URL": prefect_url, "PYTHONPATH": str(REPOSITORY),
    }  # fmt: skip
    folder.mkdir(mode=0o700)
    try:
        done = subprocess.run(
            ["bash", "-e", "-c", block], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
            timeout=600 * PATIENCE,
        )  # fmt: skip
    finally:
        end_processes("RAY_TMPDIR", str(folder))
        shutil.rmtree(folder, ignore_errors=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "answers: 2 nodes: " in done.stdout and f"{gethostname()} ({SECOND}, node " in done.stdout
    used = {
        name: [each["workers"] for each in read_manifest(tmp_path / "artifacts", name).provenance["nodes"]]
        for name in ("corpus", "base", "cpt", "sft", "evaluate")
    }
    assert used == {"corpus": [], "base": [1], "cpt": [1, 1], "sft": [1, 1], "evaluate": [1, 1]}

    # One worker of this machine measures the same, to the bit.
    report = read_manifest(tmp_path / "artifacts", "evaluate")
    shutil.rmtree(tmp_path / "artifacts" / "evaluate")
    alone = Command(tmp_path, *SMALL, *rows, environment={"PREFECT_API_URL": prefect_url})
    local = ("resources.micro_batch_size=4", "resources.cpus_per_worker=1")
    assert alone("run", "store=artifacts", *local).returncode == 0
    again = read_manifest(tmp_path / "artifacts", "evaluate")
    assert (again.metrics, again.files) == (report.metrics, report.files)
