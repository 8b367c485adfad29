"""Looks for what the store holds and the index does not: by the times of directories and manifests, reading none."""

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from lineage.store import ENTRY_NAME, MANIFEST, RESERVED

# A directory that changed this short a time ago may change again without its time telling.
_SETTLED_NS = 2 * 10**9
# Up to as many, every manifest is looked at each time, so that one that was made again is seen as well.
LOOK_AT_ALL = 10_000


@dataclass
class Changes:
    """What is not as the index has it.

    Args:
        read: stage, directory and stamp of each manifest to read; no stamp where there is none yet.
        gone: stage and directory of each entry that is there no more.
        stages: name and time of each stage's directory that changed; 0: it may change again unseen.
    """

    read: list[tuple[str, str, str | None]] = field(default_factory=list)
    gone: list[tuple[str, str]] = field(default_factory=list)
    stages: list[tuple[str, int]] = field(default_factory=list)
    gone_stages: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.read or self.gone or self.stages or self.gone_stages)


def changes(database: sqlite3.Connection, root: Path) -> Changes:
    """What changed in the store since the index was written."""
    found = Changes()
    times: dict[str, int] = dict(database.execute("SELECT name, mtime_ns FROM stage"))
    (count,) = database.execute("SELECT count(*) FROM (SELECT 1 FROM entry LIMIT ?)", (LOOK_AT_ALL + 1,)).fetchone()
    for name, mtime_ns in _stages(root):
        known = times.pop(name, None)
        settled = mtime_ns if time.time_ns() - mtime_ns > _SETTLED_NS else 0
        if settled != known:
            found.stages.append((name, settled))
        if not settled or settled != known or count <= LOOK_AT_ALL:
            _look_at_all(database, root, name, found)
        else:
            _look_at_unfinished(database, root, name, found)
    for name in times:
        found.gone_stages.append(name)
        found.gone += database.execute("SELECT stage, directory FROM entry WHERE stage = ?", (name,))
    return found


def _stages(root: Path) -> Iterator[tuple[str, int]]:
    """The stages' directories and when they last changed, read before they are looked into."""
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(root) as found:
        for each in found:
            if each.name not in RESERVED and each.is_dir():
                yield each.name, each.stat().st_mtime_ns


def _look_at_all(database: sqlite3.Connection, root: Path, stage: str, found: Changes) -> None:
    known: dict[str, str | None] = dict(
        database.execute("SELECT directory, stamp FROM entry WHERE stage = ?", (stage,)).fetchall()
    )
    with suppress(FileNotFoundError), os.scandir(root / stage) as directories:
        for each in directories:
            if not ENTRY_NAME.fullmatch(each.name):
                continue
            stamp = _stamp(each.path)
            if known.pop(each.name, "") != stamp:
                found.read.append((stage, each.name, stamp))
    found.gone += [(stage, directory) for directory in known]


def _look_at_unfinished(database: sqlite3.Connection, root: Path, stage: str, found: Changes) -> None:
    """A manifest that appears in a known directory does not change the time of the stage's."""
    rows = database.execute("SELECT directory, stamp FROM entry WHERE state != 'finished' AND stage = ?", (stage,))
    for directory, known in rows:
        stamp = _stamp(f"{root}/{stage}/{directory}")
        if stamp != known:
            found.read.append((stage, directory, stamp))


def _stamp(directory: str) -> str | None:
    """Tells one manifest from the next in its place; None: there is none yet."""
    try:
        status = os.stat(f"{directory}/{MANIFEST}")
    except OSError:
        return None
    return f"{status.st_mtime_ns}-{status.st_size}-{status.st_ino}"
