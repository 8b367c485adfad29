"""Exit reasons: why a stage ended, in one line: cause, worker, host and step; and which worker hangs."""

import os
import re
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from flows.stages.job import Job
from flows.stages.resources import Cluster, describe_workers
from lineage.checkpoints import not_sent
from lineage.errors import AskedError, LostError, NoMemoryError, PipelineError, ShortError, StageError, StoppedError
from lineage.secrets import first_line
from tasks.context import Launcher
from tasks.evaluate.evaluate import EvaluationCheck
from tasks.judgement.check_rows import RowCheck
from tasks.train.loop.heartbeat import UNWATCHED, Heartbeat, Phase, heartbeats, stacks

_UNKNOWN = 255  # multiprocessing's exit code for a process whose fork server is gone


def memory_kills(own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """How many processes of our control group, and of those below it, the kernel has killed; None: it does not say."""
    try:
        [path] = [line.partition("::")[2] for line in own.read_text().splitlines() if line.startswith("0::")]
        events = dict(line.split() for line in (root / path.lstrip("/") / "memory.events").read_text().splitlines())
        return int(events["oom_kill"])
    except (OSError, ValueError, KeyError):
        return None


def memory_hint(before: int | None) -> str:
    """The reason for a process that was killed by SIGKILL since ``memory_kills`` was ``before``."""
    after = memory_kills()
    is_certain = before is not None and after is not None and after > before
    return ": the kernel ran out of memory for it" if is_certain else "; out of memory?"


def lost(job: Job, ranks: Sequence[int], what: str, more: str = "") -> LostError:
    """The loss of workers.

    Args:
        ranks: at least one; of several the first says at which step.
        what, more: what became of them; the step is named between the two.
    """
    return _lost(job, f"{_who(job, ranks)} {what} {_when(job, ranks[0])}{more}")


def waited_for(job: Job, waiting: Sequence[int]) -> LostError:
    """The loss of the worker that others have waited for as long as ``timeout_minutes`` lets them: the one with the
    fewest steps."""
    beats, limit = heartbeats(job.entry.work), job.resources.timeout_minutes
    others = [rank for rank in range(job.resources.num_workers) if rank not in waiting] or list(waiting)
    rank = min(others, key=lambda rank: beats[rank].step or 0 if rank in beats else -1)
    phase = beats[rank].phase if rank in beats else "starting"
    more = f"rank {waiting[0]} waited {limit or 0:g} minutes for it (resources.timeout_minutes)"
    return lost(job, [rank], "hangs", f", {phase}: {more}")


def failed(job: Job, rank: int | None, error: Exception | SystemExit) -> StageError:
    """What a worker's code raised, and would raise again unless it lacked memory; says where it had begun to train.

    Args:
        rank: None: it was no worker's.
    """
    cause, code = (str(error), error.exit_code) if isinstance(error, PipelineError) else (first_line(error), 1)
    if isinstance(job.method, RowCheck | EvaluationCheck):  # the log and the row on the screen are another stage's
        cause = f"its rows, looked at before any stage trains: {cause}"
    elif rank is not None and _step(job, rank) is not None:
        cause = f"{_who(job, [rank])} {_when(job, rank)}: {cause}"
    elif rank is not None and job.resources.on_cluster:
        cause = f"rank {rank}: {cause}"
    log = "above" if job.resources.launcher == Launcher.FOREGROUND else str(job.entry.log)
    if isinstance(error, NoMemoryError):
        return ShortError(job.stage, cause, log, error.rows)
    return StageError(job.stage, cause, log, code)


def asked(job: Job, stopped: StoppedError) -> AskedError:
    """The error of a stage that was asked to end while its run continues."""
    cause = f"its process on {socket.gethostname()} was asked to end by SIGTERM, and saved: {stopped}"
    return AskedError(job.stage, cause, str(job.entry.log))


def death(job: Job, exit_code: int | None, memory_kills_before: int | None) -> StageError:
    """The error of a stage whose process ended without an answer.

    Args:
        exit_code: as multiprocessing says it: the negative of a signal's number.
        memory_kills_before: when it started.
    """
    here = f"on {socket.gethostname()}"
    if job.resources.on_cluster:
        who, when = f"the process that leads its workers, {here},", f" {_when(job, 0)}"
    elif not job.method.trains:
        who, when = f"its process {here}", ""
    else:
        who, when = _who(job, [0]), f" {_when(job, 0)}"
    if exit_code is not None and exit_code < 0:
        hints = {
            signal.SIGKILL: memory_hint(memory_kills_before),
            signal.SIGVTALRM: ": a chat template took 60 s for one conversation; see docs/security.md",
        }
        number = signal.Signals(-exit_code)
        return _lost(job, f"{who} was killed by {number.name}{when}{hints.get(number, '')}")
    cause = f"{who} ended{when} with exit code {exit_code} and no answer"
    if exit_code == _UNKNOWN:
        return _lost(job, f"{cause}: so does one whose fork server was killed")
    if job.resources.on_cluster:
        return cluster_lost(job, f"the process that leads its workers ended with exit code {exit_code} and no answer")
    return StageError(job.stage, cause, str(job.entry.log))  # its own code exited, and would do so again


def left(job: Job) -> str:
    """What a stage that was stopped resumes from."""
    steps = job.entry.checkpoints.steps()
    saved = f"{job.stage} saved at step {steps[-1]}" if steps else f"{job.stage} starts again"
    return f"{saved}{not_sent(job.entry.work)}"


def cluster_lost(job: Job, cause: str) -> LostError:
    """The loss of the Ray cluster under a stage: of its head, or of the node that we are on."""
    address = os.environ.get("RAY_ADDRESS")
    hint = f"; is RAY_ADDRESS={address} reachable?" if address else ""
    where = f"at {address}" if address else f"on {socket.gethostname()}"
    return _lost(job, f"its Ray cluster {where} was lost {_when(job, 0)}: {cause}{hint}")


def no_capacity(job: Job, cluster: Cluster) -> StageError:
    """The error of a stage that has waited too long for the nodes of its cluster."""
    steps = job.entry.checkpoints.steps()
    kept = f"its checkpoint of step {steps[-1]} is kept: " if steps else ""
    return StageError(
        job.stage,
        f"it waited {job.resources.wait_minutes:g} minutes (resources.wait_minutes) for "
        f"{describe_workers(job.resources)}, and the cluster has {cluster}, with what others use; {kept}add nodes and "
        "run again, ask for fewer workers, or set resources.min_workers to resume with fewer after a lost node",
        str(job.entry.log),
    )


def _lost(job: Job, cause: str) -> LostError:
    return LostError(job.stage, cause, str(job.entry.log))


def _who(job: Job, ranks: Sequence[int]) -> str:
    known = heartbeats(job.entry.work)
    word = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    if job.resources.on_cluster and not all(rank in known for rank in ranks):
        return word  # a worker that has not started has not reported its host; without a cluster it is this one
    hosts = {known[rank].where if rank in known else socket.gethostname() for rank in ranks}
    return f"{word} on {', '.join(sorted(hosts))}"


def _when(job: Job, rank: int) -> str:
    step = _step(job, rank)
    return "before its first step" if step is None else f"at step {step}"


def _step(job: Job, rank: int) -> int | None:
    beat = heartbeats(job.entry.work).get(rank)
    return beat.step if beat else None


# --- a worker that hangs

_LONGEST_SECONDS = 10.0  # from one poll to the next
_START_SECONDS = 120.0  # in which a process may start, however short a step is
# The innermost frame of a thread that waits for other workers: in a collective, or in a backward pass that holds some.
_WAITING = re.compile(r'recent call first\):\n  File ".*/torch/(distributed|autograd)/')


class HangWatch:
    """Polls the heartbeats of one attempt, from its driver.

    Hosts have clocks of their own: what counts is how long a heartbeat has not changed, by the driver's clock.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        minutes = job.resources.hang_minutes
        self._limit = 60 * minutes if minutes and job.method.trains else None
        self._seen: dict[int, tuple[Heartbeat | None, float]] = {}  # rank -> its last heartbeat, and when that came
        # A cluster that is joined may have capacity for the first worker only after hours.
        self._queues = bool(job.resources.on_cluster and os.environ.get("RAY_ADDRESS"))

    @property
    def pause_seconds(self) -> float | None:
        """From one poll to the next; None: nothing is watched."""
        return None if self._limit is None else min(self._limit / 10, _LONGEST_SECONDS)

    def hung(self) -> LostError | None:
        """The loss of the worker that the others wait for; the stacks of all that hang go to the stage's log."""
        now, latest, work = time.monotonic(), heartbeats(self._job.entry.work), self._job.entry.work
        if latest or not self._queues:
            for rank in range(self._job.resources.num_workers):
                beat = latest.get(rank)
                if rank not in self._seen or (beat and self._seen[rank][0] != beat):
                    self._seen[rank] = beat, now
        hanging = [rank for rank, (beat, since) in self._seen.items() if self._hangs(beat, now - since)]
        if not hanging:
            return None
        found = {rank: stacks(work, rank) for rank in hanging}
        with self._job.entry.log.open("a") as log:
            log.writelines(f"rank={rank} state=hung\n{text or 'no stack'}\n" for rank, text in found.items())
        rank = min(hanging, key=lambda rank: self._order(rank, found[rank]))
        beat, since = self._seen[rank]
        phase = beat.phase if beat else "starting"
        return lost(self._job, [rank], "hangs", f", {phase}: no progress for {now - since:.3g} s")

    def _hangs(self, beat: Heartbeat | None, seconds: float) -> bool:
        if self._limit is None:
            return False
        if beat is None:
            return seconds >= max(self._limit, _START_SECONDS)
        # Workers that have their inputs wait for those that fetch them.
        fetches = any(other and other.phase == Phase.FETCHING for other, _ in self._seen.values())
        return seconds >= self._limit and beat.phase not in UNWATCHED and not (fetches and beat.step is None)

    def _order(self, rank: int, text: str) -> tuple[int, bool, bool, float]:
        """By steps done, then those that do not wait for others in the step, then the oldest heartbeat."""
        beat, since = self._seen[rank]
        step = -2 if beat is None else -1 if beat.step is None else beat.step
        return step, beat is not None and beat.phase == Phase.STEPPING, bool(_WAITING.search(text)), since
