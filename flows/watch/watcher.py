"""Starts a run of a deployment when its data has changed or an event has arrived."""

import logging
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Literal, Protocol

from flows.declare.operation import Trigger
from flows.declare.pipeline import Pipeline
from flows.planning.plan import make_plan
from flows.planning.verdicts import may_ask
from flows.promotion.retrain import promotion_due
from flows.watch.digests import SourceDigests, last_taken
from flows.watch.memory import Arrival, Memory, Rest, Seen
from lineage.errors import PipelineError

logger = logging.getLogger(__name__)

Fate = Literal["open", "over", "lost"]
_TRIES = 5  # of runs that die over the same data: what kills them may be the run itself


class Runs(Protocol):
    """The runs of deployments, and the events, of a Prefect server."""

    def under_way(self, deployment: str) -> str | None:
        """The name of a run that waits or runs, or None; one that a schedule has set for later is none."""

    def arrivals(self, names: tuple[str, ...], since: datetime) -> tuple[Arrival, ...]:
        """The events of these names."""

    def start(self, deployment: str, causes: tuple[str, ...], key: str) -> tuple[str, str]:
        """Creates a run, unless there is one of this key, and returns its id and name."""

    def fate(self, run_id: str) -> tuple[Fate, str]:
        """Of a run, and its name: "lost" where it died or its server stopped, "over" where it ended otherwise."""


class Watcher:
    """Watches for one deployment of a pipeline.

    A run is due when a source is not what the last run took, or an event has arrived, and all has rested for
    ``settle`` seconds. While a run waits or is under way none is created: what changes meanwhile is taken by the next.
    A run counts as having taken something only when it is over; one that dies is followed by another.

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
        taken = memory.ended()
        seen = Seen(digests=digests, arrivals=self._arrivals(taken))
        now = self._clock()
        self._rest = self._rest.look(seen, now) if self._rest else Rest(seen=seen, since=now)
        causes = taken.causes(seen)
        if not causes:
            self._said = ""
            return self._trigger.poll
        remaining = self._rest.remaining(self._trigger.settle, now)
        if remaining:
            self._say(logging.INFO, f"new: {', '.join(causes)}; waits until it rests")
            return min(remaining, self._trigger.poll)
        self._say(logging.INFO, f"new: {', '.join(causes)}; {self._follow(memory, seen, causes)}")
        return self._trigger.poll

    def _follow(self, memory: Memory, seen: Seen, causes: tuple[str, ...]) -> str:
        """Starts a run where one is due and none is under way; says what became of it."""
        other = self._runs.under_way(self._deployment)
        if other or memory.started:
            return f"waits for the run {other or 'that was started last'}"
        if not seen.arrivals and self._is_made():
            memory.following(seen, _now()).write(self._path)
            return "another run has taken it"
        run_id, name = self._runs.start(self._deployment, causes, memory.key(seen))
        memory.starting(run_id, seen, _now()).write(self._path)
        return f"started the run {name}"

    def _is_made(self) -> bool:
        """Whether a run would find nothing to do."""
        try:
            plan = make_plan(self._pipeline)
            return not (plan.stale or may_ask(plan) or promotion_due(plan))
        except PipelineError:  # a run says so to more people
            return False

    def _memory(self, digests: Mapping[str, str]) -> Memory:
        """What the runs so far have taken in.

        A source that was never watched counts as taken as the pipeline's last output has it, or without one as it is;
        events that have arrived before watching began count as followed.
        """
        stored = Memory.read(self._path)
        before = self._judged(stored) if stored else self._beginning()
        unknown = digests.keys() - before.ended().digests.keys()
        memory = before.taking({name: last_taken(self._pipeline, name) or digests[name] for name in unknown})
        if memory != stored:
            memory.write(self._path)
        return memory

    def _judged(self, memory: Memory) -> Memory:
        """With the end, if there is one by now, of the run that was started last."""
        if memory.started is None:
            return memory
        fate, name = self._runs.fate(memory.started.id)
        if fate == "lost" and memory.lost + 1 < _TRIES:
            self._say(logging.WARNING, f"the run {name} was stopped or died; what it was to take in is new again")
            return memory.losing()
        if fate == "lost":
            self._say(logging.WARNING, f"the run {name} died, as {memory.lost} before it; start the next yourself")
        return memory if fate == "open" else memory.ended()

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
