"""Labels of sources as each run declares them: the append-only ``<store>/labels.jsonl``.

A manifest holds the labels declared when it was written; this file holds labels declared for the same bytes later.
"""

import getpass
import os
import socket
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from filelock import FileLock

from lineage.filesystem.files import append_jsonl, read_jsonl
from lineage.fingerprint import short

LABELS = "labels.jsonl"


def user() -> str:
    """The account that runs this process."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # the user of a container may have no name
        return str(os.getuid())


def who() -> str:
    """The account and its machine."""
    return f"{user()}@{socket.gethostname()}"


@dataclass(frozen=True, kw_only=True)
class Statement:
    """One line: the labels that a run declared for a source.

    Args:
        fingerprint: of the source; the labels apply to these bytes, under any name.
        source: its name at that time.
        time: seconds since the epoch.
    """

    fingerprint: str
    source: str
    labels: list[str]
    who: str = field(default_factory=who)
    time: float = field(default_factory=time.time)


def recorded_labels(store: Path) -> dict[str, set[str]]:
    """First 16 digits of a source's fingerprint -> all labels that runs have declared for it.

    Raises:
        ArtifactError: a line is damaged.
    """
    found: dict[str, set[str]] = {}
    for statement in read_jsonl(store / LABELS, Statement, "does not contain labels"):
        found.setdefault(short(statement.fingerprint), set()).update(statement.labels)
    return found


def record_labels(store: Path, statements: Iterable[Statement]) -> None:
    """Appends the statements with new labels; creates no file if there are none."""
    labelled = [each for each in statements if each.labels]
    if not _new(store, labelled):
        return
    store.mkdir(parents=True, exist_ok=True)
    with FileLock(store / (LABELS + ".lock")):
        new = _new(store, labelled)  # another process may have appended them meanwhile
        append_jsonl(store / LABELS, *map(asdict, new))


def _new(store: Path, statements: list[Statement]) -> list[Statement]:
    known = recorded_labels(store) if statements else {}
    return [each for each in statements if not set(each.labels) <= known.get(short(each.fingerprint), set())]
