"""What the runs so far have taken in, kept over a stop: data that changes meanwhile starts a run afterwards."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from flows.declare.config import typed
from lineage.errors import ConfigError
from lineage.files import atomic_write
from lineage.fingerprint import canonical_json

LATE = timedelta(hours=1)  # by which a sender's clock may lag, or an event be delayed, without being passed over


@dataclass(frozen=True, kw_only=True, order=True)
class Arrival:
    """An event that the server has.

    Args:
        occurred: by the clock of its sender, in ISO 8601 and UTC.
    """

    id: str
    name: str
    occurred: str


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What may start a run, as one look found it.

    Args:
        digests: source -> fingerprint.
        arrivals: the events that no run has followed yet.
    """

    digests: Mapping[str, str] = field(default_factory=dict)
    arrivals: tuple[Arrival, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Started:
    """A run that takes in what was seen, unless it dies on the way.

    Args:
        at: when it was started; ISO 8601, UTC.
    """

    id: str
    at: str
    seen: Seen


@dataclass(frozen=True, kw_only=True)
class Memory:
    """``<store>/watch/<pipeline>.json``.

    Args:
        since: when the last run that has ended was started here, or watching began; ISO 8601, UTC.
        digests: source -> fingerprint, as the last run took it that has ended.
        followed: id -> when it occurred, of the events that a run has followed and that may be met again.
        started: the run of which it is not known yet how it ended.
        lost: how many runs have died, one after the other, over what is new.
    """

    since: str
    digests: Mapping[str, str] = field(default_factory=dict)
    followed: Mapping[str, str] = field(default_factory=dict)
    started: Started | None = None
    lost: int = 0

    @property
    def events_from(self) -> datetime:
        """Since when events are looked for."""
        return datetime.fromisoformat(self.since) - LATE

    def causes(self, seen: Seen) -> tuple[str, ...]:
        """Names of the sources that are not what the last run took, and of the events that no run has followed."""
        changed = [name for name, digest in seen.digests.items() if self.digests.get(name) != digest]
        return tuple(dict.fromkeys([*sorted(changed), *(each.name for each in sorted(seen.arrivals))]))

    def key(self, seen: Seen) -> str:
        """Names the run that follows: the same for two who watch one store, and for one who was killed half-way."""
        events = [each.id for each in seen.arrivals]
        content = {"since": self.since, "digests": dict(seen.digests), "events": events, "lost": self.lost}
        return hashlib.sha256(canonical_json(content).encode()).hexdigest()

    def taking(self, digests: Mapping[str, str]) -> "Memory":
        """After these sources were taken in as they are: by a run that another started, or before watching began."""
        return replace(self, digests={**self.digests, **digests})

    def following(self, seen: Seen, now: datetime) -> "Memory":
        """After a run that was started now has taken in all that was seen."""
        followed = {**self.followed, **{each.id: each.occurred for each in seen.arrivals}}
        after = Memory(since=_iso(now), digests={**self.digests, **seen.digests})
        recent = {key: when for key, when in followed.items() if datetime.fromisoformat(when) >= after.events_from}
        return replace(after, followed=recent)

    def starting(self, run_id: str, seen: Seen, now: datetime) -> "Memory":
        """While a run is under way that is to take in all that was seen."""
        return replace(self, started=Started(id=run_id, at=_iso(now), seen=seen))

    def ended(self) -> "Memory":
        """After the run that was started has taken in what it was to, or as if it had."""
        return self.following(self.started.seen, datetime.fromisoformat(self.started.at)) if self.started else self

    def losing(self) -> "Memory":
        """After the run that was started has died: what it was to take in is new once more."""
        return replace(self, started=None, lost=self.lost + 1)

    @staticmethod
    def beginning(now: datetime) -> "Memory":
        """Before the first run."""
        return Memory(since=_iso(now))

    @staticmethod
    def read(path: Path) -> "Memory | None":
        try:
            return typed(Memory, json.loads(path.read_text()), str(path))
        except (OSError, ValueError, ConfigError):  # none yet, or damaged: watching begins anew
            return None

    def write(self, path: Path) -> None:
        atomic_write(path, json.dumps(asdict(self), indent=1) + "\n")


@dataclass(frozen=True, kw_only=True)
class Rest:
    """How long all has been as it is.

    Args:
        since: seconds of the clock that the looks go by.
    """

    seen: Seen
    since: float

    def look(self, seen: Seen, now: float) -> "Rest":
        return self if seen == self.seen else Rest(seen=seen, since=now)

    def remaining(self, settle: float, now: float) -> float:
        """Seconds until it has rested long enough."""
        return max(0.0, self.since + settle - now)


def _iso(time: datetime) -> str:
    return time.astimezone(UTC).isoformat()
