"""Aliases of models: the append-only ``<store>/promotions.jsonl`` and what it says now."""

import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from filelock import FileLock

from lineage.errors import ArtifactError

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
    path = store / PROMOTIONS
    if not path.exists():
        return []
    events = []
    for number, line in enumerate(_whole_lines(path.read_bytes()).splitlines(), start=1):
        try:
            events.append(Event(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise ArtifactError(f"{path}:{number}: is no event ({error}); mend or delete that line") from error
    return events


def append(store: Path, event: Event) -> None:
    """Writes one event, whole or not at all; the caller holds ``locked(store)``."""
    line = json.dumps(asdict(event), ensure_ascii=False) + "\n"
    with (store / PROMOTIONS).open("a+b") as file:
        file.seek(0)
        file.truncate(len(_whole_lines(file.read())))
        file.write(line.encode())
        file.flush()
        os.fsync(file.fileno())


def _whole_lines(content: bytes) -> bytes:
    """Without a last line that has no end: whoever wrote it was killed meanwhile, so that nobody was told of it."""
    return content[: content.rfind(b"\n") + 1]


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
