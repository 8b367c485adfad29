"""Finds the worker of a training that makes no progress, by the heartbeats of all workers."""

import contextlib
import os
import re
import time

from flows.stages.endings import lost
from flows.stages.job import CheckJob, Job
from lineage.errors import LostError
from tasks.context import Launcher
from tasks.heartbeat import UNWATCHED, Doing, Mark, marks, stacks

_LONGEST_SECONDS = 10.0  # from one poll to the next
_START_SECONDS = 120.0  # in which a process may start, however short a step is
# The innermost frame of a thread that waits for other workers: in a collective, or in a backward pass that holds some.
_WAITING = re.compile(r'recent call first\):\n  File ".*/torch/(distributed|autograd)/')


class HangWatch:
    """Polls the heartbeats of one attempt, from its driver.

    Hosts have clocks of their own: what counts is how long a heartbeat has not changed, by the driver's clock.
    """

    def __init__(self, job: Job) -> None:
        self._job, self._work = job, job.directory / "work"
        minutes = job.resources.hang_minutes
        # In the foreground a debugger may stop a stage for as long as it likes.
        watched = job.method.trains and not isinstance(job, CheckJob) and job.resources.launcher != Launcher.FOREGROUND
        self._limit = 60 * minutes if watched and minutes else None
        self._seen: dict[int, tuple[Mark | None, float]] = {}  # rank -> its last heartbeat, and when it was first seen
        # A cluster that is joined may have capacity for the first worker only after hours.
        self._queues = bool(job.resources.on_cluster and os.environ.get("RAY_ADDRESS"))

    @property
    def pause_seconds(self) -> float | None:
        """From one poll to the next; None: nothing is watched."""
        return None if self._limit is None else min(self._limit / 10, _LONGEST_SECONDS)

    def hung(self) -> LostError | None:
        """The loss of the worker that the others wait for; the stacks of all that hang go to the stage's log."""
        if self._limit is None:
            return None
        now = time.monotonic()
        with contextlib.suppress(OSError, ValueError):  # the store is away
            for mark in marks(self._work):
                if self._seen.get(mark.rank, (None, now))[0] != mark:
                    self._seen[mark.rank] = mark, now
        if self._seen or not self._queues:
            for rank in range(self._job.resources.num_workers):
                self._seen.setdefault(rank, (None, now))
        hanging = [rank for rank, (mark, since) in sorted(self._seen.items()) if self._hangs(mark, now - since)]
        if not hanging:
            return None
        found = {rank: stacks(self._work, rank) for rank in hanging}
        with self._job.log.open("a") as log:
            log.writelines(f"rank={rank} state=hung\n{text or 'no stack'}\n" for rank, text in found.items())
        rank = min(hanging, key=lambda rank: self._order(rank, found[rank]))
        mark, since = self._seen[rank]
        phase = mark.doing if mark else "starting"
        return lost(self._job, [rank], "hangs", f", {phase}: no progress for {now - since:.3g} s")

    def _hangs(self, mark: Mark | None, seconds: float) -> bool:
        assert self._limit is not None
        if mark is None:
            return seconds >= max(self._limit, _START_SECONDS)
        # Workers that have their inputs wait for those that fetch them.
        fetches = any(other and other.doing == Doing.FETCHING for other, _ in self._seen.values())
        return seconds >= self._limit and mark.doing not in UNWATCHED and not (fetches and mark.step is None)

    def _order(self, rank: int, text: str) -> tuple[int, bool, bool, float]:
        """By steps done, then those that do not wait for others in the step, then the oldest heartbeat."""
        mark, since = self._seen[rank]
        if mark is None:
            return -2, False, False, since
        return -1 if mark.step is None else mark.step, mark.doing == Doing.STEPPING, bool(_WAITING.search(text)), since
