"""Exit reasons: why a stage ended, in one line: the cause, the worker, its host and its step."""

import contextlib
import os
import signal
import socket
from collections.abc import Sequence
from pathlib import Path

from flows.stages.job import CheckJob, Job
from lineage.errors import AskedError, LostError, PipelineError, StageError, StoppedError
from lineage.store import Entry
from tasks.context import Launcher
from tasks.heartbeat import Heartbeat, heartbeats

_HINT = "; out of memory?"


def memory_kills(own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """How many processes of our control group, and of those below it, the kernel has killed; None: it does not say."""
    try:
        [path] = [line.partition("::")[2] for line in own.read_text().splitlines() if line.startswith("0::")]
        events = dict(line.split() for line in (root / path.lstrip("/") / "memory.events").read_text().splitlines())
        return int(events["oom_kill"])
    except (OSError, ValueError, KeyError):
        return None


def memory_hint(before: int | None, after: int | None) -> str:
    """The message for a process that was killed by SIGKILL between two readings."""
    if before is not None and after is not None and after > before:
        return ": the kernel ran out of memory for it"
    return _HINT


_UNKNOWN = 255  # multiprocessing's exit code for a process whose fork server is gone


def lost(job: Job, ranks: Sequence[int], what: str, more: str = "") -> LostError:
    """The loss of workers.

    Args:
        ranks: at least one; of several the first is asked where it was.
        what, more: what became of them; what is said between them is where.
    """
    return LostError(job.stage, f"{_who(job, ranks)} {what} {_when(job, ranks[0])}{more}", str(job.log))


def failed(job: Job, rank: int | None, error: Exception | SystemExit) -> StageError:
    """What a worker's code raised, and would raise again; says where, of one that had begun to train.

    Args:
        rank: None: it was no worker's.
    """
    cause, code = (str(error), error.exit_code) if isinstance(error, PipelineError) else (one_line(error), 1)
    if isinstance(job, CheckJob):  # the log and the row on the screen are another stage's
        cause = f"its rows, looked at before any stage trains: {cause}"
    elif rank is not None and _step(job, rank) is not None:
        cause = f"{_who(job, [rank])} {_when(job, rank)}: {cause}"
    elif rank is not None and job.resources.on_cluster:
        cause = f"rank {rank}: {cause}"
    log = "above" if job.resources.launcher == Launcher.FOREGROUND else str(job.log)
    return StageError(job.stage, cause, log, code)


def one_line(error: BaseException) -> str:
    """An error's type and the first line of its message."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def asked(job: Job, stopped: StoppedError) -> AskedError:
    """The error of a stage that was asked to end while its run continues."""
    cause = f"its process on {socket.gethostname()} was asked to end by SIGTERM, and saved: {stopped}"
    return AskedError(job.stage, cause, str(job.log))


def death(job: Job, exit_code: int | None, memory_kills_before: int | None) -> StageError:
    """The error of a stage whose process ended without an answer.

    Args:
        exit_code: as multiprocessing says it: the negative of a signal's number.
        memory_kills_before: when it started.
    """
    here = f"on {socket.gethostname()}"
    if not job.trains:
        who, when = f"its process {here}", ""
    elif job.resources.on_cluster:
        who, when = f"the process that leads its workers, {here},", f" {_when(job, 0)}"
    else:
        who, when = _who(job, [0]), f" {_when(job, 0)}"
    if exit_code is not None and exit_code < 0:
        hint = memory_hint(memory_kills_before, memory_kills()) if -exit_code == signal.SIGKILL else ""
        if -exit_code == signal.SIGVTALRM:
            hint = ": a chat template took 60 s for one conversation; see docs/security.md"
        cause = f"{who} was killed by {signal.Signals(-exit_code).name}{when}{hint}"
        return LostError(job.stage, cause, str(job.log))
    cause = f"{who} ended{when} with exit code {exit_code} and no answer"
    if exit_code == _UNKNOWN:
        return LostError(job.stage, f"{cause}: so does one whose fork server was killed", str(job.log))
    if not job.resources.on_cluster:
        return StageError(job.stage, cause, str(job.log))  # its own code exited, and would do so again
    return cluster_lost(job, f"the process that leads its workers ended with exit code {exit_code} and no answer")


def left(job: Job) -> str:
    """What a stage that was stopped goes on from."""
    steps = Entry(job.directory).checkpoints.steps()
    return f"{job.stage} saved at step {steps[-1]}" if steps else f"{job.stage} starts again"


def cluster_lost(job: Job, cause: str) -> LostError:
    """The loss of the Ray cluster under a stage: of its head, or of the node that we are on."""
    address = os.environ.get("RAY_ADDRESS")
    hint = f"; is RAY_ADDRESS={address} reachable?" if address else ""
    where = f"at {address}" if address else f"on {socket.gethostname()}"
    return LostError(job.stage, f"its Ray cluster {where} was lost {_when(job, 0)}: {cause}{hint}", str(job.log))


def _who(job: Job, ranks: Sequence[int]) -> str:
    known = _heartbeats(job)
    hosts = {known[rank].host if rank in known else socket.gethostname() for rank in ranks}
    word = "rank" if len(ranks) == 1 else "ranks"
    # A worker that has not started has not reported its host; without a cluster it is this one.
    unknown = job.resources.on_cluster and not all(rank in known for rank in ranks)
    where = "" if unknown else f" on {', '.join(sorted(hosts))}"
    return f"{word} {', '.join(map(str, ranks))}{where}"


def _when(job: Job, rank: int) -> str:
    step = _step(job, rank)
    return "before its first step" if step is None else f"at step {step}"


def _step(job: Job, rank: int) -> int | None:
    known = _heartbeats(job)
    return known[rank].step if rank in known else None


def _heartbeats(job: Job) -> dict[int, Heartbeat]:
    with contextlib.suppress(OSError, ValueError):
        return {beat.rank: beat for beat in heartbeats(job.directory / "work")}
    return {}
