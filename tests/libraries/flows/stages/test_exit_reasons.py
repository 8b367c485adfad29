import importlib
import signal
import socket
import stat
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import ActorDiedError, OutOfMemoryError
from ray.train import ControllerError, WorkerGroupError
from ray.train.v2._internal.exceptions import (
    WorkerGroupStartupFailedError,
    WorkerGroupStartupTimeoutError,
    WorkerHealthCheckFailedError,
)

from flows.stages import launch
from flows.stages.exit_reasons import asked, death, failed, left, memory_kills
from flows.stages.job import Job
from flows.stages.launch import failure_of
from flows.stages.resources import Cluster, Node
from lineage.errors import DataError, LostError, StageError, StoppedError
from lineage.store import Entry
from tasks.context import Resources
from tasks.train.loop.heartbeat import HeartbeatFile, Phase
from tests.finished import save
from tests.toy_methods import ToyModel, ToyTraining

HERE = socket.gethostname()
LATE = RuntimeError(
    "[../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 6000ms for recv operation to complete"
)
GONE = RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [10.0.0.2]:3822")


@pytest.fixture
def job(tmp_path) -> Job:
    for rank in (0, 1):
        HeartbeatFile(tmp_path / "work", rank, None).mark(12 - rank, Phase.STEPPING)
    return Job(stage="sft", method=ToyTraining(), inputs={}, resources=Resources(), directory=tmp_path)


@pytest.fixture
def cluster_job(job, monkeypatch) -> Job:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return replace(job, resources=Resources(num_workers=2, timeout_minutes=0.1))


def dead(text: str = "") -> Exception:
    error = ActorDiedError()
    error.error_msg += f"\n{text}"
    return WorkerHealthCheckFailedError("A worker health check failed.", error)


@pytest.mark.parametrize(
    ("failures", "cause"),
    [
        ({0: GONE, 1: dead()}, f"rank 1 on {HERE} died at step 11; out of memory?"),
        ({0: dead("its node has died"), 1: dead("its node has died")},
         f"ranks 0, 1 on {HERE} died at step 12: its node is gone"),
        ({1: dead("1 worker(s) were killed due to the node running low on memory.")},
         f"rank 1 on {HERE} died at step 11: its node was out of memory, and Ray killed it"),
        ({1: WorkerHealthCheckFailedError("failed", OutOfMemoryError("x"))},
         f"rank 1 on {HERE} died at step 11: its node was out of memory, and Ray killed it"),
        ({0: LATE}, f"rank 1 on {HERE} hangs at step 11, in a step: rank 0 waited 0.1 minutes for it "
         "(resources.timeout_minutes)"),
        ({0: GONE, 1: LATE}, f"rank 0 on {HERE} hangs at step 12, in a step: rank 1 waited 0.1 minutes for it "
         "(resources.timeout_minutes)"),
        ({0: GONE}, f"rank 0 on {HERE} lost its connection to another worker at step 12: RuntimeError: {GONE}"),
    ],
)  # fmt: skip
def test_a_worker_that_died_is_the_cause_and_is_lost(cluster_job, failures, cause, monkeypatch):
    monkeypatch.setattr("flows.stages.exit_reasons.memory_kills", lambda: None)
    found = failure_of(cluster_job, WorkerGroupError("x", failures), None)
    assert isinstance(found, LostError)
    assert found.cause == cause


@pytest.mark.parametrize("failures", [{0: GONE}, {0: GONE, 1: dead()}])
def test_a_node_that_is_gone_is_the_cause_of_a_lost_connection(cluster_job, monkeypatch, failures):
    for rank in (0, 1, 2):
        beat = HeartbeatFile(cluster_job.entry.work, rank, None, node=f"10.0.0.{rank and 2}, node {rank and 2}")
        beat.mark(7 + rank, Phase.STEPPING)
    there = Node(host=HERE, node="10.0.0.0, node 0", cpus=2.0)
    polls = iter([Cluster(nodes=(there, Node(host=HERE, node="10.0.0.2, node 2"))), Cluster(nodes=(there,))])
    monkeypatch.setattr(launch, "joined_cluster", lambda: next(polls))
    monkeypatch.setattr(launch, "_POLL_NODES_SECONDS", 0.0)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    found = failure_of(cluster_job, WorkerGroupError("x", failures), None)
    assert isinstance(found, LostError)
    assert found.cause == f"ranks 1, 2 on {HERE} (10.0.0.2, node 2) died at step 8: its node is gone"


def test_a_wait_for_nodes_ends_with_what_is_missing_and_what_is_kept(cluster_job, monkeypatch):
    save(cluster_job.entry, 4)
    there = Cluster(nodes=(Node(host="a", node="10.0.0.1, node 1", cpus=2.0),))
    monkeypatch.setattr(launch, "joined_cluster", lambda: there)
    found = failure_of(cluster_job, ControllerError(WorkerGroupStartupTimeoutError(2)), None)
    assert type(found) is StageError
    assert found.cause == (
        "it waited 30 minutes (resources.wait_minutes) for 2 workers with 2 CPUs each, on 1 node, and the cluster has "
        "1 node: a (10.0.0.1, node 1) with 2 CPUs, with what others use; its checkpoint of step 4 is kept: add nodes "
        "and run again, ask for fewer workers, or set resources.min_workers to resume with fewer after a lost node"
    )


class Group:
    """A placement group that is ready after so many polls."""

    def __init__(self, polls: int) -> None:
        self.polls, self.asked, self.removed = polls, [], 0

    def wait(self, seconds: float) -> bool:
        self.polls -= 1
        return self.polls < 0

    def replace_those_of(self, monkeypatch) -> None:
        module = importlib.import_module("ray.util.placement_group")
        monkeypatch.setattr(module, "placement_group", lambda *args, **named: self.asked.append((*args, named)) or self)
        monkeypatch.setattr(module, "placement_group_table", lambda group: {"bundles_to_node_id": {1: "b", 0: "a"}})
        monkeypatch.setattr(module, "remove_placement_group", lambda group: setattr(self, "removed", 1))


def test_each_node_is_reserved_for_an_equal_share_of_the_workers(cluster_job, monkeypatch):
    wide = Resources(num_workers=4, num_nodes=2, cpus_per_worker=3, gpus_per_worker=1, gpu="H100")
    group = Group(polls=2)
    group.replace_those_of(monkeypatch)
    assert launch._reserve(replace(cluster_job, resources=wide)) == ["a", "a", "b", "b"]
    bundle = {"CPU": 6.0, "GPU": 2.0, "accelerator_type:H100": 0.001}
    assert group.asked == [([bundle] * 2, {"strategy": "STRICT_SPREAD"})]
    assert group.removed


@pytest.mark.parametrize("stops", [False, True])
def test_a_wait_for_nodes_has_an_end_and_can_be_stopped(cluster_job, monkeypatch, stops):
    group = Group(polls=10**9)
    group.replace_those_of(monkeypatch)
    monkeypatch.setattr(launch, "joined_cluster", lambda: Cluster(nodes=(Node(host="a", node="1", cpus=1.0),)))
    waits = replace(cluster_job, resources=replace(cluster_job.resources, wait_minutes=60.0 if stops else 1e-6))
    if stops:
        waits.ask_to_stop()
    with pytest.raises(StoppedError if stops else StageError, match="for 2 workers with 2 CPUs each, on 1 node"):
        launch._reserve(waits)
    assert group.removed


def test_an_error_of_the_method_comes_before_what_followed_from_it_and_is_no_loss(cluster_job):
    found = failure_of(cluster_job, WorkerGroupError("x", {0: GONE, 1: DataError("rows.jsonl line 7: empty")}), None)
    assert type(found) is StageError
    assert (found.cause, found.exit_code) == (f"rank 1 on {HERE} at step 11: rows.jsonl line 7: empty", 2)


def test_a_stop_is_a_stop(cluster_job):
    stopped = StoppedError("stopped at step 12 of 20")
    assert failure_of(cluster_job, WorkerGroupError("x", {0: stopped, 1: GONE}), None) is stopped
    cause = f"its process on {HERE} was asked to end by SIGTERM, and saved: stopped at step 12 of 20"
    assert asked(cluster_job, stopped).cause == cause


def test_the_loss_of_the_cluster_is_a_loss(cluster_job, monkeypatch):
    starts = ControllerError(WorkerGroupStartupFailedError("a node went down"))
    assert isinstance(failure_of(cluster_job, starts, None), LostError)
    assert type(failure_of(cluster_job, ControllerError(ValueError("no such option")), None)) is StageError
    lost = failure_of(cluster_job, ActorDiedError(), None)
    assert isinstance(lost, LostError) and f"its Ray cluster on {HERE} was lost at step 12: " in str(lost)
    assert isinstance(death(cluster_job, 1, None), LostError)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert "is RAY_ADDRESS=10.0.0.1:6379 reachable?" in str(death(cluster_job, 1, None))


def test_a_process_that_a_signal_killed_is_lost_and_one_that_ended_by_itself_is_not(job, monkeypatch):
    monkeypatch.setattr("flows.stages.exit_reasons.memory_kills", lambda: 3)
    killed = death(job, -signal.SIGKILL, None)
    assert killed.cause == f"rank 0 on {HERE} was killed by SIGKILL at step 12; out of memory?"
    assert "at step 12; out of memory?" in death(job, -signal.SIGKILL, 3).cause
    assert death(job, -signal.SIGKILL, 2).cause.endswith("at step 12: the kernel ran out of memory for it")
    assert death(job, -signal.SIGSEGV, 2).cause.endswith("was killed by SIGSEGV at step 12")
    assert isinstance(killed, LostError)
    assert type(death(job, 3, None)) is StageError
    assert death(job, 3, None).cause == f"rank 0 on {HERE} ended at step 12 with exit code 3 and no answer"
    reads = replace(job, method=ToyModel())
    assert death(reads, -signal.SIGTERM, None).cause == f"its process on {HERE} was killed by SIGTERM"


def test_a_process_that_lost_its_fork_server_is_lost_and_says_where_it_was(job, cluster_job):
    how = "with exit code 255 and no answer: so does one whose fork server was killed"
    found = [death(each, 255, None) for each in (job, cluster_job, replace(job, method=ToyModel()))]
    assert [type(each) for each in found] == [LostError] * 3
    assert [each.cause for each in found] == [
        f"rank 0 on {HERE} ended at step 12 {how}",
        f"the process that leads its workers, on {HERE}, ended at step 12 {how}",
        f"its process on {HERE} ended {how}",
    ]


def test_the_kernel_says_how_many_it_killed(tmp_path):
    own = tmp_path / "cgroup"
    own.write_text("1:name=systemd:/\n0::/jobs/7\n")
    events = tmp_path / "jobs" / "7" / "memory.events"
    events.parent.mkdir(parents=True)
    events.write_text("low 0\nhigh 0\nmax 31\noom 2\noom_kill 2\noom_group_kill 0\n")
    assert memory_kills(own, tmp_path) == 2
    events.unlink()
    assert memory_kills(own, tmp_path) is None
    assert memory_kills(tmp_path / "none", tmp_path) is None


def test_torch_waits_for_a_worker_longer_than_whoever_looks_whether_one_hangs(tmp_path, monkeypatch):
    given = {}

    def trainer(loop, **options):
        given.update(options)
        return SimpleNamespace(fit=lambda: SimpleNamespace(return_value={"loss": 1.0}))

    monkeypatch.setattr("ray.train.torch.TorchTrainer", trainer)
    monkeypatch.setattr(launch, "connect", lambda job: None)
    day = Resources(num_workers=2, hang_minutes=1440.0)
    job = Job(stage="sft", method=ToyTraining(), inputs={}, resources=day, directory=tmp_path)
    assert launch.train(job, lambda rank, num_workers: {}) == {"loss": 1.0}
    assert given["torch_config"].timeout_s > 60 * 1440


def test_the_session_of_our_own_cluster_lies_where_no_other_account_can_enter(tmp_path, monkeypatch):
    options = {}
    monkeypatch.setattr(ray, "init", lambda **given: options.update(given))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    job = Job(stage="sft", method=ToyTraining(), inputs={}, resources=Resources(num_workers=2), directory=tmp_path)
    # Ray gives its own folder mode 0777. A socket's path has room for 107 characters.
    for parent in (None, str(tmp_path / ("long" * 20))):
        if parent:
            Path(parent).mkdir()
            monkeypatch.setenv("RAY_TMPDIR", parent)
        launch.connect(job)
        folder = Path(options["_temp_dir"])
        assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
        assert len(f"{folder}/session_2026-11-22_16-51-55_123456_1234567/sockets/plasma_store") <= 107


def test_before_it_trains_an_error_is_reported_without_a_place(job, tmp_path):
    loads = replace(job, directory=tmp_path / "other")
    for rank in (0, 1):
        HeartbeatFile(loads.directory / "work", rank, None).mark(None, Phase.LOADING)
    assert failed(loads, 0, DataError("no rows")).cause == "no rows"
    assert death(loads, -signal.SIGSEGV, None).cause == f"rank 0 on {HERE} was killed by SIGSEGV before its first step"
    assert failed(loads, 0, ValueError("x\ny")).cause == "ValueError: x"
    assert "rank 0 on " in failed(job, 0, DataError("no rows")).cause


def test_a_stage_that_was_stopped_says_what_it_resumes_from(job):
    assert left(job) == "sft starts again"
    for step in (3, 12):
        save(Entry(job.directory), step)
    assert left(job) == "sft saved at step 12"
