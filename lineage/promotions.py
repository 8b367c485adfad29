"""Aliases of models: the append-only ``<store>/promotions.jsonl`` and what it says now."""

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from filelock import FileLock

from lineage.files import append_jsonl, read_jsonl

PROMOTIONS = "promotions.jsonl"


@dataclass(frozen=True, kw_only=True)
class Event:
    """One line: an alias moved, or a person approved or rejected a verdict.

    Args:
        action: ``promote`` and ``rollback`` move ``alias`` to ``fingerprint``; ``approve`` and ``reject`` are of the
            verdict ``fingerprint``.
        fingerprint, digest: of the model or verdict, and of its bytes.
        who, why: the person and the reason.
        stage: whose output it is.
        verdict: fingerprint of the gate's output that a promotion rests on.
        forced: no passing verdict stood behind it.
        labels: licence and consent labels of all that the model was made from.
        commercial: whether the alias was marked commercial.
        time: seconds since the epoch.
    """

    action: Literal["promote", "rollback", "approve", "reject"]
    fingerprint: str
    who: str
    why: str
    digest: str | None = None
    alias: str | None = None
    stage: str | None = None
    verdict: str | None = None
    forced: bool = False
    labels: list[str] = field(default_factory=list)
    commercial: bool = False
    time: float = field(default_factory=time.time)


def read_events(store: Path) -> list[Event]:
    """Every event, oldest first.

    Raises:
        ArtifactError: a line is damaged.
    """
    return read_jsonl(store / PROMOTIONS, Event, "is no event")


def append(store: Path, event: Event) -> None:
    """Writes one event, whole or not at all; the caller holds ``locked(store)``."""
    append_jsonl(store / PROMOTIONS, asdict(event))


def locked(store: Path) -> FileLock:
    """One process at a time decides and appends."""
    store.mkdir(parents=True, exist_ok=True)
    return FileLock(store / (PROMOTIONS + ".lock"))


def stacks(events: Iterable[Event]) -> dict[str, list[Event]]:
    """Alias -> the promotions of its holders, the present one last: a promotion pushes, a rollback pops."""
    found: dict[str, list[Event]] = {}
    for event in events:
        if event.alias is None:
            continue
        stack = found.setdefault(event.alias, [])
        if event.action == "promote":
            stack.append(event)
        elif stack:
            stack.pop()
    return found


def taken_back(events: Iterable[Event], alias: str) -> set[tuple[str | None, str]]:
    """Stage and fingerprint of the models that a rollback took an alias from, and that were not given it again."""
    held: list[tuple[str | None, str]] = []
    taken: set[tuple[str | None, str]] = set()
    for event in events:
        if event.alias == alias and event.action == "promote":
            held.append((event.stage, event.fingerprint))
            taken.discard(held[-1])
        elif event.alias == alias and held:
            taken.add(held.pop())
    return taken


def decision(events: Iterable[Event], verdict: str, digest: str) -> Event | None:
    """What a person has last said of a verdict of these bytes: its approval, its rejection, or nothing."""
    said = [event for event in events if event.action in ("approve", "reject") and event.fingerprint == verdict]
    return next((event for event in reversed(said) if event.digest == digest), None)
