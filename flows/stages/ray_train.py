"""Ray Train around a training stage: local mode for one worker, a cluster for more."""

import contextlib
import importlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import cast

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError
from ray.train import (
    ControllerError,
    FailureConfig,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    WorkerGroupError,
    get_context,
)
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2._internal.exceptions import (
    WorkerGroupStartupFailedError,
    WorkerHealthCheckFailedError,
    WorkerHealthCheckTimeoutError,
)

from flows.progress.run_record import dashboard_file
from flows.stages.exit_reasons import cluster_lost, failed, lost, memory_hint, memory_kills, one_line
from flows.stages.job import Job
from flows.stages.process_settings import WORKER_ENVIRONMENT
from flows.stages.resources import join
from lineage.errors import ConfigError, LostError, PipelineError, StageError, StoppedError
from lineage.filesystem.remote_files import private_folder
from tasks.context import Metrics

_PEER_SECONDS = 5.0
# Torch's own limit of a wait for others comes last: `HangWatch` finds who hangs, and a save takes as long as it takes.
_WAIT_SECONDS = 7 * 24 * 3600
_LONGEST_PARENT = 38  # of the 107 characters of a socket's path; the rest is /ray/SESSION/sockets/plasma_store


Work = Callable[[int, int], Metrics]  # of one worker: its rank, and the number of workers


def train(job: Job, work: Work) -> Metrics:
    """Runs a job's work through ``TorchTrainer`` and returns rank 0's metrics."""
    if job.resources.on_cluster:
        return _train_on_cluster(job, work)
    # Ray Train's local mode: in this process, without a cluster or actors.
    trainer = TorchTrainer(lambda: work(0, 1), scaling_config=ScalingConfig(num_workers=0))
    return cast(Metrics, trainer.fit().return_value)


def _train_on_cluster(job: Job, work: Work) -> Metrics:
    resources, kills = job.resources, memory_kills()
    gpus = {"GPU": float(resources.gpus_per_worker)} if resources.gpus_per_worker else {}
    try:
        with _own_sigterm():
            _connect(job)
        trainer = TorchTrainer(
            _worker_loop,
            train_loop_config={"work": work},
            torch_config=TorchConfig(timeout_s=_WAIT_SECONDS),
            scaling_config=ScalingConfig(
                num_workers=resources.num_workers,
                use_gpu=resources.gpus_per_worker > 0,
                resources_per_worker={"CPU": float(resources.cpus_per_worker), **gpus},
                placement_strategy="SPREAD" if resources.num_nodes > 1 else "PACK",
            ),
            # The store is the only place of checkpoints; what Ray keeps of its own is scratch.
            # It retries nothing: the driver does, which knows the newest checkpoint.
            run_config=RunConfig(
                name="ray",
                storage_path=str(job.entry.work),
                failure_config=FailureConfig(max_failures=0, max_preemption_failures=0, controller_failure_limit=0),
            ),
        )
        return cast(Metrics, trainer.fit().return_value)
    except (TrainingFailedError, RayError) as error:
        raise ending(job, error, kills) from error
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keeps what SIGTERM means to us, which ``ray.init`` replaces.

    The processes that it starts do not hear it at all: a machine that is to go down sends it to every process,
    and the workers must still save. They end with us.
    """
    handler = signal.getsignal(signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _worker_loop(config: dict[str, Work]) -> dict[str, float]:
    context = get_context()
    try:
        return dict(config["work"](context.get_world_rank(), context.get_world_size()))
    except Exception as error:
        if lost_its_peer(error):
            time.sleep(_PEER_SECONDS)  # Ray reports the first failure that it sees: that should be the peer's
        raise


def _connect(job: Job) -> None:
    """Joins the cluster at RAY_ADDRESS, or starts one on this machine that ends with this process."""
    resources = job.resources
    environment = {
        "py_modules": _packages(job),
        "env_vars": {**WORKER_ENVIRONMENT, "RAY_TRAIN_ENABLE_PRINT_PATCH": "0"},
    }
    if os.environ.get("RAY_ADDRESS"):
        address = join(runtime_env=environment, log_to_driver=True)
        if address:
            dashboard_file(job.directory).write_text(address)
        return
    ray.init(
        address="local",  # a cluster of our own, whatever else runs here
        # One CPU more, for Ray Train's own controller: the workers have theirs to themselves.
        num_cpus=resources.num_workers * resources.cpus_per_worker + 1,
        num_gpus=resources.num_workers * resources.gpus_per_worker,
        include_dashboard=False,
        runtime_env=environment,
        log_to_driver=True,
        _temp_dir=str(_session_parent()),
    )


def _session_parent() -> Path:
    """The directory of Ray's session, inside one that no other account can enter: Ray gives the session mode 0777."""
    folder = private_folder(os.environ.get("RAY_TMPDIR"))
    if len(str(folder)) > _LONGEST_PARENT:
        folder = private_folder("/tmp")
    return folder / "ray"


def _packages(job: Job) -> list[str]:
    """The package directories that the workers need: ours, and that of the user's own method.

    Raises:
        ConfigError: the method is a single file, which does not travel.
    """
    own = type(job.method).__module__.partition(".")[0]
    modules = [importlib.import_module(name) for name in sorted({"lineage", "tasks", "flows", own})]
    if not all(hasattr(module, "__path__") for module in modules):
        raise ConfigError(
            f"stages.{job.stage}.method: {own}.py is a single file and code travels to a cluster as packages; "
            f"make it {own}/__init__.py, or a module of a package"
        )
    return [next(iter(module.__path__)) for module in modules]


# What gloo and NCCL say of a peer that is gone: it follows from what ended the peer, and is no cause.
_PEER_GONE = (
    "connection closed by peer", "connection reset by peer", "broken pipe", "socket closed", "remote process exited",
    "read timeout", "connection refused",
)  # fmt: skip


def lost_its_peer(error: BaseException) -> bool:
    """Whether a worker raised the error because another worker is gone."""
    text = str(error).lower()
    is_distributed = isinstance(error, RuntimeError | ConnectionError) and not isinstance(error, PipelineError)
    return is_distributed and any(words in text for words in _PEER_GONE)


def ending(job: Job, error: TrainingFailedError | RayError, memory_kills_before: int | None) -> PipelineError:
    """The error of a stage: a dead worker rather than an error, an error rather than its consequences.

    Args:
        error: as ``fit`` raised it.
        memory_kills_before: on this host, when the workers started.
    """
    if isinstance(error, WorkerGroupError):
        return _of_workers(job, error.worker_failures, memory_kills_before)
    if not isinstance(error, ControllerError):
        return cluster_lost(job, _text(error))
    if isinstance(error.controller_failure, WorkerGroupStartupFailedError):
        return LostError(job.stage, f"a worker was lost while it started: {_text(error)}", str(job.entry.log))
    return StageError(job.stage, f"Ray Train: {_text(error)}", str(job.entry.log))


def _of_workers(job: Job, failures: Mapping[int, Exception], memory_kills_before: int | None) -> PipelineError:
    raised = {rank: _root(error) for rank, error in sorted(failures.items())}
    dead = {rank: why for rank in raised if (why := _death(failures[rank])) is not None}
    if dead:
        why = next(iter(dead.values()))
        ranks = [rank for rank in dead if dead[rank] == why]
        return lost(job, ranks, "died", f": {why}" if why else memory_hint(memory_kills_before))
    for rank, error in raised.items():
        if not isinstance(error, StoppedError) and not lost_its_peer(error):
            return failed(job, rank, error)
    for error in raised.values():
        if isinstance(error, StoppedError):
            return error
    rank, error = next(iter(raised.items()))
    return lost(job, [rank], "lost its connection to another worker", f": {one_line(error)}")


def _death(error: Exception) -> str | None:
    """Why a worker is gone, empty where Ray does not know; None: it is there, and raised an error."""
    cause, text = _root(error), str(error)
    if isinstance(error, WorkerHealthCheckTimeoutError):
        return "it no longer answers Ray"
    if isinstance(cause, OutOfMemoryError) or "running low on memory" in text:
        return "its node was out of memory, and Ray killed it"
    if not isinstance(cause, RayActorError):
        return None
    if cause.preempted:
        return "its node was preempted"
    return "its node is gone" if "node has died" in text else ""


def _root(error: Exception) -> Exception:
    """The error that the worker raised, without Ray's wrapper, so that its type is kept."""
    if isinstance(error, WorkerHealthCheckFailedError):
        return _root(error.health_check_failure)
    is_wrapper = type(error).__module__.startswith("ray.") and not isinstance(error, RayActorError)
    return error.__cause__ if is_wrapper and isinstance(error.__cause__, Exception) else error


def _text(error: Exception) -> str:
    """An error's type, and its most specific line: the first lines of Ray's errors are all the same."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1][:200]}" if lines else type(error).__name__
