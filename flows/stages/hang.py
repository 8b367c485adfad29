"""Finds the worker of a training that stands still, or never begins, by the marks that all of them make."""

import contextlib
import os
import time

from flows.stages.endings import lost
from flows.stages.job import CheckJob, Job
from lineage.errors import LostError
from tasks.context import Launcher
from tasks.heartbeat import UNWATCHED, Doing, Mark, innermost_frame, marks, stack

_LOOKS = 10  # in the time after which a worker is taken for hung
_LONGEST_SECONDS = 10.0  # from one look to the next
_START_SECONDS = 120.0  # in which a process may start, however short a step is
# Where a worker is that only waits for the one that hangs: in a collective, or in the backward pass that holds some.
_WAITING = ("/torch/distributed/", "/torch/autograd/")


class HangWatch:
    """Looks at the marks of one attempt at a training, from its driver.

    Hosts have clocks of their own: what counts is how long a mark has not changed, seen from here.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        minutes = job.resources.hang_minutes
        # In the foreground a debugger may stand still as long as it likes, and there nobody looks.
        trains = job.method.trains and not isinstance(job, CheckJob)
        watched = trains and job.resources.launcher != Launcher.FOREGROUND and minutes is not None
        self._limit = 60 * minutes if watched and minutes is not None else None
        self._seen: dict[int, tuple[Mark, float]] = {}  # rank -> its last mark, and when it was first seen here
        # Since when each is expected: a cluster that we join may have room for the first only after hours.
        joins = job.resources.on_cluster and os.environ.get("RAY_ADDRESS")
        self._began = None if joins else time.monotonic()

    @property
    def pause_seconds(self) -> float | None:
        """From one look to the next; None: nobody needs to look."""
        return None if self._limit is None else min(self._limit / _LOOKS, _LONGEST_SECONDS)

    def hung(self) -> LostError | None:
        """What to end the stage for: the worker that the others wait for; its stack goes to the stage's log."""
        if self._limit is None:
            return None
        now = time.monotonic()
        with contextlib.suppress(OSError, ValueError):  # the next attempt clears them away, or a store is away
            for mark in marks(self._job.directory / "work"):
                if self._seen.get(mark.rank, (None, now))[0] != mark:
                    self._seen[mark.rank] = mark, now
        if self._seen and self._began is None:
            self._began = now
        return self._absent(now, self._limit) or self._still(now, self._limit)

    def _absent(self, now: float, limit: float) -> LostError | None:
        """A worker that has made no mark yet: its process does not start, or does not meet the others."""
        absent = sorted(set(range(self._job.resources.num_workers)) - self._seen.keys())
        seconds = 0.0 if self._began is None else now - self._began
        if not absent or seconds < max(limit, _START_SECONDS):
            return None
        return lost(self._job, absent, "hangs", f", starting: nothing was heard of it for {seconds:.3g} s")

    def _still(self, now: float, limit: float) -> LostError | None:
        seen = self._seen.values()
        still = [mark for mark, since in seen if mark.doing not in UNWATCHED and now - since >= limit]
        if any(mark.doing == Doing.FETCHING for mark, _ in seen):  # who is done with that waits for who is not
            still = [mark for mark in still if mark.step is not None]
        if not still:
            return None
        stacks = {mark.rank: stack(self._job.directory / "work", mark.rank) for mark in still}
        _log(self._job, still, stacks)
        behind = min(still, key=lambda mark: _behind(mark, stacks[mark.rank]))
        frame = innermost_frame(stacks[behind.rank], behind.thread)
        where = f", {behind.doing}{f' ({frame})' if frame else ''}"
        seconds = now - self._seen[behind.rank][1]
        return lost(self._job, [behind.rank], "hangs", f"{where}: nothing came of it for {seconds:.3g} s")


def _behind(mark: Mark, stack: str) -> tuple[int, bool, bool, float]:
    """The order in which workers are suspected: who has done least, who does not wait for others, who stood first."""
    waits = any(word in innermost_frame(stack, mark.thread) for word in _WAITING)
    step = -1 if mark.step is None else mark.step
    return step, mark.doing == Doing.STEPPING, waits, mark.time


def _log(job: Job, still: list[Mark], stacks: dict[int, str]) -> None:
    with job.log.open("a") as log:
        for mark in still:
            log.write(f"rank={mark.rank} host={mark.host} pid={mark.pid} step={mark.step} state=hung\n")
            log.write(stacks[mark.rank] or "it could not say where it is\n")
