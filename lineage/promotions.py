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
        fingerprint: of the model or verdict; None: the alias has no holder any more.
        who, why: the person and the reason.
        forced: no passing verdict stood behind it.
        time: seconds since the epoch.
    """

    action: Literal["promote", "rollback", "approve", "reject"]
    fingerprint: str | None
    who: str
    why: str
    alias: str | None = None
    stage: str | None = None
    verdict: str | None = None  # fingerprint of the gate's output that it rests on
    forced: bool = False
    labels: list[str] = field(default_factory=list)
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
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            events.append(Event(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise ArtifactError(f"{path}:{number}: is no event ({error}); mend or delete that line") from error
    return events


def append(store: Path, event: Event) -> None:
    """Writes one event, whole or not at all; the caller holds ``locked(store)`` where it depends on earlier ones."""
    store.mkdir(parents=True, exist_ok=True)
    line = json.dumps(asdict(event), ensure_ascii=False) + "\n"
    with (store / PROMOTIONS).open("a", encoding="utf-8") as file:
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def locked(store: Path) -> FileLock:
    """One process at a time decides and appends."""
    store.mkdir(parents=True, exist_ok=True)
    return FileLock(store / (PROMOTIONS + ".lock"))


def histories(events: Iterable[Event]) -> dict[str, list[str]]:
    """Alias -> fingerprints of its holders, the present one last: a promotion pushes, a rollback pops."""
    stacks: dict[str, list[str]] = {}
    for event in events:
        if event.alias is None:
            continue
        stack = stacks.setdefault(event.alias, [])
        if event.action == "promote" and event.fingerprint:
            stack.append(event.fingerprint)
        elif event.action == "rollback" and stack:
            stack.pop()
    return stacks


def holders(store: Path) -> dict[str, str]:
    """Alias -> fingerprint of the model that it names now."""
    return {alias: stack[-1] for alias, stack in histories(read_events(store)).items() if stack}
