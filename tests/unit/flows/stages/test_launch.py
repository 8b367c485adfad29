"""The processes of stages: their start, their environment, their end."""

import multiprocessing.context
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from flows.stages import launch, resources
from flows.stages.job import Job
from flows.stages.launch import StageProcesses, context_of, saving_first
from flows.stages.process_settings import set_environment, stage_environment, worker_environment
from flows.stages.stops import stoppable
from lineage.errors import ArtifactError, PrunedError, StageError
from lineage.filesystem.lock import Lock, acquire_or
from tasks.context import Launcher, Resources
from tasks.data.kinds import ELSEWHERE
from tasks.method import Method
from tasks.sft import SFT
from tasks.train.evaluation import Evaluation
from tests.toy_methods import ToyModel, ToyTraining


@pytest.mark.parametrize("when", ["before", "between"])
def test_a_stage_that_nobody_needs_any_more_never_starts_its_work(when, tmp_path, monkeypatch):
    processes, started = StageProcesses(), []
    start = multiprocessing.context.SpawnProcess.start

    def slow_start(process):
        start(process)
        started.append(process)
        processes.end(tmp_path, PrunedError("pruned at step 1"))

    for part in ("output", "work", "logs"):
        (tmp_path / part).mkdir()
    monkeypatch.setattr(multiprocessing.context.SpawnProcess, "start", slow_start)
    if when == "before":
        processes.end(tmp_path, PrunedError("pruned at step 1"))
    job = Job(stage="left", method=ToyModel(), inputs={}, resources=Resources(), directory=tmp_path)
    with pytest.raises(PrunedError, match="pruned at step 1"):
        processes.run(job)
    assert not (tmp_path / "output" / "model.txt").exists()
    assert [process.is_alive() for process in started] == [False] * (when == "between")


def test_a_stage_in_the_commands_own_process_has_the_environment_of_one(tmp_path, monkeypatch):
    def answer(job):
        return {"has": float(os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8")}

    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr("flows.stages.launch.answer", answer)
    resources = Resources(launcher=Launcher.FOREGROUND)
    job = Job(stage="left", method=ToyTraining(), inputs={}, resources=resources, directory=tmp_path)
    assert StageProcesses().run(job) == {"has": 1.0}


@pytest.mark.parametrize(("gpus", "beside", "own"), [("357", 1, "35"), ("3", 1, ""), ("35", 0, "35"), ("", 1, "")])
def test_the_workers_do_not_see_the_gpu_of_what_scores_their_checkpoints(tmp_path, gpus, beside, own):
    method = SFT(num_steps=1, evaluation=Evaluation(every_steps=1, gpus=beside))
    job = Job(
        stage="sft", method=method, inputs={}, resources=Resources(), directory=tmp_path, visible_gpus=tuple(gpus)
    )
    assert job.gpus == (tuple(own), tuple(gpus[len(own) :]))


def test_a_method_that_exits_has_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(ToyModel, "run", lambda method, inputs, ctx: sys.exit(0))
    resources = Resources(launcher=Launcher.FOREGROUND)
    job = Job(stage="model", method=ToyModel(), inputs={}, resources=resources, directory=tmp_path)
    with pytest.raises(StageError, match="SystemExit: 0"):
        StageProcesses().run(job)


HERE = Resources(launcher=Launcher.FOREGROUND)


def job_of(method: Method, folder: Path) -> Job:
    (folder / "work").mkdir()
    return Job(stage="left", method=method, inputs={}, resources=HERE, directory=folder)


def interrupted(job: Job, *numbers: int) -> list[bool]:
    """What a stage of this process sees after each signal, until they end it: whether it is asked to stop."""
    seen: list[bool] = []

    def stage() -> None:
        with stoppable(), saving_first(job):
            for number in numbers:
                os.kill(os.getpid(), number)
                seen.append(job.is_asked_to_stop())

    with pytest.raises(KeyboardInterrupt):
        stage()
    return seen


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_training_in_this_process_saves_before_a_signal_is_heeded(tmp_path, number):
    assert interrupted(job_of(ToyTraining(), tmp_path), number) == [True]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_second_ctrl_c_is_heeded_at_once(tmp_path):
    job = job_of(ToyTraining(), tmp_path)
    assert interrupted(job, signal.SIGTERM, signal.SIGTERM, signal.SIGINT) == [True, True]


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(("gpus", "installed", "shares"), [(1, True, False), (1, False, True), (0, True, True)])
def test_a_stage_with_a_gpu_is_not_forked_after_torchao_was_imported(monkeypatch, gpus, installed, shares):
    monkeypatch.setattr(launch, "find_spec", lambda name: installed)
    assert launch.shares_imports(ToyTraining(), Resources(gpus_per_worker=gpus), is_first=False) == shares


def test_torch_initializes_no_cuda_where_stages_are_forked():
    assert stage_environment()["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"


def test_a_cluster_of_our_own_lets_nobody_in_without_its_token():
    first, second = stage_environment(), stage_environment()
    assert first["RAY_AUTH_MODE"] == "token" and len(first["RAY_AUTH_TOKEN"]) == 64
    assert first == second  # one token for all processes of a run


def test_only_a_cluster_of_our_own_is_kept_on_loopback(monkeypatch):
    variable = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # as Ray names whether other machines may reach it
    assert stage_environment()[variable] == "0"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.2:6379")
    assert variable not in stage_environment()


def test_a_cluster_that_is_joined_is_given_the_token_that_the_user_has(monkeypatch, home):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.2:6379")
    assert "RAY_AUTH_MODE" not in stage_environment()
    (home / ".ray").mkdir()
    (home / ".ray/auth_token").write_text("token")
    assert stage_environment()["RAY_AUTH_MODE"] == "token" and "RAY_AUTH_TOKEN" not in stage_environment()
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(home / "none"))
    assert "RAY_AUTH_MODE" not in stage_environment()
    monkeypatch.setenv("RAY_AUTH_TOKEN", "token")
    assert stage_environment()["RAY_AUTH_MODE"] == "token"


def test_what_has_nothing_to_save_is_not_waited_for(tmp_path):
    assert interrupted(job_of(ToyModel(), tmp_path), signal.SIGTERM) == []


def test_what_the_user_has_set_takes_precedence(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    set_environment()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert os.environ["OMP_WAIT_POLICY"] == worker_environment()["OMP_WAIT_POLICY"] == "ACTIVE"
    assert "GOMP_SPINCOUNT" not in os.environ  # of libgomp it would outrank the policy


def test_threads_spin_shortly_and_sleep_then(monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    set_environment()
    for name, value in (("OMP_WAIT_POLICY", "PASSIVE"), ("GOMP_SPINCOUNT", "4000")):
        assert os.environ[name] == worker_environment()[name] == value
        monkeypatch.delenv(name)
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert worker_environment()["GOMP_SPINCOUNT"] == "7"


def test_a_store_that_a_worker_does_not_see_is_refused_also_where_its_own_has_the_directory(tmp_path):
    lock = Lock(tmp_path / "shared" / "left" / "f00d")
    assert acquire_or(lock, lambda: False, lambda: None)
    with lock.holding():
        seen = Job(
            stage="left", method=ToyModel(), inputs={}, resources=HERE, directory=lock.directory, token=lock.token
        )  # fmt: skip
        (seen.directory / "output").mkdir()
        assert launch.run_worker(seen, 2, 4, "10.0.0.2, node 2") == {}
        own = tmp_path / "own" / "left" / "f00d"
        for _ in range(2):
            with pytest.raises(
                ArtifactError, match=r" \(10.0.0.2, node 2\) does not see .*/own/left/f00d as the driver"
            ):
                launch.run_worker(replace(seen, directory=own), 2, 4, "10.0.0.2, node 2")
            (own / "output").mkdir(parents=True, exist_ok=True)  # of an earlier run on that machine


def test_a_request_to_stop_is_seen_where_the_host_remembers_that_there_was_none(tmp_path, monkeypatch):
    job = job_of(ToyTraining(), tmp_path)
    should_stop = context_of(job).should_stop
    assert not should_stop()
    job.ask_to_stop()
    monkeypatch.setattr(Path, "exists", lambda path: False)  # as NFS does, for up to a minute
    assert should_stop()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_that_comes_while_the_fork_server_starts_is_not_lost(number, monkeypatch):
    monkeypatch.setattr("multiprocessing.forkserver.ensure_running", lambda: signal.raise_signal(number))
    with pytest.raises(KeyboardInterrupt), stoppable():
        StageProcesses().warm_up([])


@pytest.mark.parametrize(
    ("rows", "address", "launcher", "on_ray"),
    [
        ("auto", "", "process", False), ("auto", "10.0.0.1:6379", "process", True), ("ray", "", "process", True),
        ("local", "10.0.0.1:6379", "process", False), ("ray", "10.0.0.1:6379", "cluster", False),
    ],
)  # fmt: skip
def test_rows_are_mapped_on_ray_where_it_is_joined_or_asked_for(monkeypatch, tmp_path, rows, address, launcher, on_ray):
    monkeypatch.setenv("RAY_ADDRESS", address)
    job = replace(job_of(ToyModel(), tmp_path), resources=Resources(rows=rows, launcher=Launcher(launcher)))
    with launch.rows_mapped(job):
        assert (ELSEWHERE.get() is not None) == on_ray
    assert ELSEWHERE.get() is None


def test_few_bytes_of_rows_are_with_ray_at_once():
    items = iter([b"x" * 1000] * 50)
    assert len(list(resources._up_to(10_000, items))) == 10
    assert len(list(resources._up_to(10**6, items))) == 40
    assert list(resources._up_to(10_000, items)) == []
