"""Aliases of models: the append-only ``<store>/promotions.jsonl`` and the state that it implies."""

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from filelock import FileLock

from lineage.filesystem.files import append_jsonl, read_jsonl

PROMOTIONS = "promotions.jsonl"


@dataclass(frozen=True, kw_only=True)
class Event:
    """One line: a moved alias, or a person's approval or rejection of a verdict.

    Args:
        action: ``promote`` and ``rollback`` move ``alias`` to ``fingerprint``; ``approve`` and ``reject`` refer to the
            verdict ``fingerprint``.
        fingerprint, digest: of the model or verdict, and of its bytes.
        who, why: the person and the reason.
        stage: the stage that produced it.
        verdict: fingerprint of the gate's output that a promotion is based on.
        forced: promoted without a passing verdict.
        rules: what the gates asked that passed it: ``gate@digits RULE: demand``.
        eased: by which of them an earlier verdict refused it that are gone, or less strict, since the file says so.
        labels: licence and consent labels of the model and all its ancestors.
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
    rules: list[str] = field(default_factory=list)
    eased: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    commercial: bool = False
    time: float = field(default_factory=time.time)


def read_events(store: Path) -> list[Event]:
    """Every event, oldest first (ArtifactError: a line is damaged)."""
    return read_jsonl(store / PROMOTIONS, Event, "is not an event")


def append(store: Path, event: Event) -> None:
    """Appends one event atomically; the caller holds ``locked(store)``."""
    append_jsonl(store / PROMOTIONS, asdict(event))


def locked(store: Path) -> FileLock:
    """The lock that serialises decisions on aliases."""
    store.mkdir(parents=True, exist_ok=True)
    return FileLock(store / (PROMOTIONS + ".lock"))


def stacks(events: Iterable[Event]) -> dict[str, list[Event]]:
    """Alias -> its promotions, the current one last: a promotion pushes, a rollback pops."""
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


def rolled_back(events: Iterable[Event], alias: str) -> set[tuple[str | None, str]]:
    """Stage and fingerprint of the models whose promotion to an alias was rolled back and not repeated."""
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
    """The last approval or rejection of a verdict with these bytes; None: there is none."""
    decisions = [event for event in events if event.action in ("approve", "reject") and event.fingerprint == verdict]
    return next((event for event in reversed(decisions) if event.digest == digest), None)
