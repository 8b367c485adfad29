"""What the end of a group of Ray workers means: a worker that died, or one whose code raised an error."""

from collections.abc import Mapping

from ray.exceptions import OutOfMemoryError, RayActorError, RayError
from ray.train import ControllerError, TrainingFailedError, WorkerGroupError
from ray.train.v2._internal.exceptions import (
    WorkerGroupStartupFailedError,
    WorkerHealthCheckFailedError,
    WorkerHealthCheckTimeoutError,
)

from flows.stages.endings import cluster_lost, failed, lost, one_line
from flows.stages.job import Job
from flows.stages.memory_kills import memory_hint, memory_kills
from lineage.errors import LostError, PipelineError, StageError, StoppedError

# What gloo and NCCL say of a peer that is gone: it follows from what ended the peer, and is no cause.
_PEER_GONE = (
    "connection closed by peer", "connection reset by peer", "broken pipe", "socket closed", "remote process exited",
    "read timeout", "connection refused",
)  # fmt: skip


def lost_its_peer(error: BaseException) -> bool:
    """Whether a worker raised it because another one is gone."""
    text = str(error).lower()
    is_distributed = isinstance(error, RuntimeError | ConnectionError) and not isinstance(error, PipelineError)
    return is_distributed and any(words in text for words in _PEER_GONE)


def ending(job: Job, error: TrainingFailedError | RayError, memory_kills_before: int | None) -> PipelineError:
    """The one error of a stage: a dead worker before an error, an error before what followed from it.

    Args:
        error: as ``fit`` raised it.
        memory_kills_before: on this host, when the workers started.
    """
    if isinstance(error, WorkerGroupError):
        return _of_workers(job, error.worker_failures, memory_kills_before)
    if isinstance(error, ControllerError):
        if isinstance(error.controller_failure, WorkerGroupStartupFailedError):
            return LostError(job.stage, f"a worker was lost while it started: {_text(error)}", str(job.log))
        return StageError(job.stage, f"Ray Train: {_text(error)}", str(job.log))
    return cluster_lost(job, _text(error))


def _of_workers(job: Job, failures: Mapping[int, Exception], memory_kills_before: int | None) -> PipelineError:
    dead = {rank: why for rank, error in failures.items() if (why := _death(error)) is not None}
    if dead:
        ranks = [rank for rank in sorted(dead) if dead[rank] == dead[min(dead)]]
        why = dead[ranks[0]]
        return lost(job, ranks, "died", f": {why}" if why else memory_hint(memory_kills_before, memory_kills()))
    raised = {rank: _root(error) for rank, error in sorted(failures.items())}
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
    if isinstance(error, WorkerHealthCheckTimeoutError):
        return "it no longer answers Ray"
    cause = _root(error)
    text = str(error)
    if isinstance(cause, OutOfMemoryError) or "running low on memory" in text:
        return "its node was out of memory, and Ray killed it"
    if not isinstance(cause, RayActorError):
        return None
    if cause.preempted:
        return "its node was preempted"
    return "its node is gone" if "node has died" in text else ""


def _root(error: Exception) -> Exception:
    """What the worker raised, not Ray's wrapper of it: a wrong row stays a wrong row."""
    if isinstance(error, WorkerHealthCheckFailedError):
        return _root(error.health_check_failure)
    cause = error.__cause__
    is_wrapper = type(error).__module__.startswith("ray.") and not isinstance(error, RayActorError)
    return cause if isinstance(cause, Exception) and is_wrapper else error


def _text(error: Exception) -> str:
    """An error's type, and the line that says most: Ray's first ones are the same for all."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1][:200]}" if lines else type(error).__name__
