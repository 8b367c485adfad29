"""Starts a run of a deployment when its data has changed or an event has arrived."""

import logging
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Protocol

from flows.operation import Trigger
from flows.pipeline import Pipeline
from flows.watch.digests import SourceDigests, last_taken
from flows.watch.memory import Arrival, Memory, Rest, Seen

logger = logging.getLogger(__name__)


class Runs(Protocol):
    """The runs of deployments, and the events, of a Prefect server."""

    def under_way(self, deployment: str) -> str | None:
        """The name of a run that waits or runs, or None; one that a schedule has set for later is none."""

    def arrivals(self, names: tuple[str, ...], since: datetime) -> tuple[Arrival, ...]:
        """The events of these names."""

    def start(self, deployment: str, causes: tuple[str, ...], key: str) -> str:
        """Creates a run, unless there is one of this key, and returns its name."""


class Watcher:
    """Watches for one deployment of a pipeline.

    A run is due when a source is not what the last run took, or an event has arrived, and all has rested for
    ``settle`` seconds. While a run waits or is under way none is created: what changes meanwhile is taken by the next.

    Args:
        deployment: ``FLOW/DEPLOYMENT``.
        clock: seconds that only grow.
    """

    def __init__(
        self, pipeline: Pipeline, trigger: Trigger, deployment: str, runs: Runs,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._pipeline = pipeline
        self._trigger = trigger
        self._deployment = deployment
        self._runs = runs
        self._clock = clock
        self._digests = SourceDigests(pipeline)
        self._path = pipeline.store / "watch" / f"{pipeline.name}.json"
        self._rest: Rest | None = None
        self._said = ""

    def watched(self) -> tuple[str, ...]:
        """Names of the sources and the events."""
        return (*self._trigger.sources, *self._trigger.events)

    def look(self) -> float:
        """Looks once, and returns the seconds until the next look."""
        try:
            return self._look()
        except Exception as error:  # of the store, the hub, a bucket, the server: the next look may do better
            self._say(logging.WARNING, f"cannot look: {type(error).__name__}: {error}")
            return self._trigger.poll

    def _look(self) -> float:
        digests = {name: self._digests.fingerprint(name) for name in self._trigger.sources}
        memory = self._memory(digests)
        seen = Seen(digests=digests, arrivals=self._arrivals(memory))
        now = self._clock()
        self._rest = self._rest.look(seen, now) if self._rest else Rest(seen=seen, since=now)
        causes = memory.causes(seen)
        if not causes:
            self._said = ""
            return self._trigger.poll
        remaining = self._rest.remaining(self._trigger.settle, now)
        if remaining:
            return min(remaining, self._trigger.poll)
        other = self._runs.under_way(self._deployment)
        if other:
            self._say(logging.INFO, f"new: {', '.join(causes)}; waits for the run {other}")
            return self._trigger.poll
        run = self._runs.start(self._deployment, causes, memory.key(seen))
        memory.following(seen, _now()).write(self._path)
        self._say(logging.INFO, f"new: {', '.join(causes)}; started the run {run}")
        return self._trigger.poll

    def _memory(self, digests: Mapping[str, str]) -> Memory:
        """What the runs so far have taken in: those that were started here, and those that others have started.

        A source that was never watched counts as taken as the pipeline's last output has it, or without one as it is;
        events that have arrived before watching began count as followed.
        """
        stored = Memory.read(self._path)
        before = stored or self._beginning()
        taken = {}
        for name, digest in digests.items():
            if before.digests.get(name) != digest:
                last = last_taken(self._pipeline, name)
                if last == digest or name not in before.digests:
                    taken[name] = last or digest
        memory = before.taking(taken)
        if memory != stored:
            memory.write(self._path)
        return memory

    def _beginning(self) -> Memory:
        memory = Memory.beginning(_now())
        return memory.following(Seen(arrivals=self._arrivals(memory)), _now())

    def _arrivals(self, memory: Memory) -> tuple[Arrival, ...]:
        if not self._trigger.events:
            return ()
        found = self._runs.arrivals(self._trigger.events, memory.events_from)
        return tuple(sorted({each for each in found if each.id not in memory.followed}))

    def _say(self, level: int, what: str) -> None:
        """Logs a change of state, once."""
        if what != self._said:
            self._said = what
            logger.log(level, "%s: %s", self._deployment, what)


def _now() -> datetime:
    return datetime.now(UTC)
