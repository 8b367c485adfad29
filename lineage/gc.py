"""Garbage collection of a store: unreferenced outputs and caches, their size, and their deletion."""

import contextlib
import math
import os
import shutil
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from lineage.digest import file_names
from lineage.errors import TakenOverError
from lineage.files import append_jsonl, read_jsonl
from lineage.graph.places import node_key
from lineage.lock import LOCK, Lock, owner
from lineage.manifest import Manifest
from lineage.promotions import locked
from lineage.store import CACHE, ENTRY_NAME, MANIFEST, MODELS, REFERENCE_LOGPS, REHEARSALS, Entry, Store

DELETED = (
    "freed.jsonl"  # records the deleted finished outputs, so that `verify` does not report their mirrors as orphans
)
TOKENS = "tokens"  # the GC root of all caches: any run may read them
AGE_SECONDS = 7 * 86400.0

_GUARD = "gc.lock"
_CACHES = {"tokens": "tokens", MODELS: "model", REFERENCE_LOGPS: REFERENCE_LOGPS}  # folder -> name of an entry
_LEFT = ("work", "*.gone", "*.tmp", f"{LOCK}.*")  # what a kill may leave beside a finished output


@dataclass(frozen=True, kw_only=True)
class Garbage:
    """One output, cache entry or leftover to delete.

    Args:
        what: its name: ``stage@`` and the first digits of its fingerprint, or a description.
        path: its directory; ``paths``: the parts that are deleted.
        last_used: in seconds since the epoch.
        key: the GC root that would keep it; None: no root can (leftovers of a kill).
        fingerprint: of a finished output.
        lock: lock file of an item that is not an artifact.
    """

    what: str
    why: str
    path: Path
    paths: tuple[Path, ...]
    last_used: float
    key: str | None = None
    fingerprint: str | None = None
    lock: Path | None = None

    def used_since(self) -> bool:
        """Whether a run has used or written it since it was found; acquiring its lock does not count."""
        below = [path for path in self.path.iterdir() if path.name != LOCK]
        return _newest([*below, self.path] if self.lock else below) > self.last_used


@dataclass(frozen=True, kw_only=True)
class Size:
    """Size of files in bytes; ``freed`` counts only files without hard links from elsewhere."""

    num_bytes: int
    freed: int


def find(store: Path, roots: Collection[str], older_than: float = AGE_SECONDS) -> tuple[list[Garbage], list[Garbage]]:
    """Unreferenced items, children before parents: those old enough to be deleted, and those too young.

    Args:
        roots: nodes of artifacts with all their ancestors; may include ``TOKENS``.
        older_than: seconds since its last use.

    Raises:
        ArtifactError: a manifest cannot be read, so that the ancestors of its output are unknown.
    """
    found = [*_outputs(store, roots), *_folders(store / REHEARSALS, "rehearsals/", store / REHEARSALS / "guard")]
    if TOKENS not in roots:
        for folder, name in _CACHES.items():
            found += _folders(store / CACHE / folder, f"{name} ", None)
    now = time.time()
    old = [each for each in found if now - each.last_used >= older_than]
    return old, [each for each in found if now - each.last_used < older_than]


def size(garbage: Iterable[Garbage]) -> Size:
    """Total size; files that two items share through hard links count once."""
    links: dict[tuple[int, int], int] = {}
    status: dict[tuple[int, int], os.stat_result] = {}
    for path in (path for each in garbage for path in each.paths):
        for file in [path / name for name in file_names(path)] if path.is_dir() else [path]:
            with contextlib.suppress(OSError):  # it is gone
                found = file.lstat()
                key = found.st_dev, found.st_ino
                links[key] = links.get(key, 0) + 1
                status[key] = found
    freed = sum(found.st_size for key, found in status.items() if links[key] >= found.st_nlink)
    return Size(num_bytes=sum(found.st_size for found in status.values()), freed=freed)


def guard(store: Path) -> FileLock:
    """A lock that keeps runs from reusing an output between the last check of the roots and its deletion.

    It is held while one run record is written, or one output is checked and renamed.
    """
    store.mkdir(parents=True, exist_ok=True)
    return FileLock(store / _GUARD)


def delete(store: Path, garbage: Garbage, roots: Callable[[], Collection[str]]) -> bool:
    """Deletes an item, unless a process owns it, has used it since it was found, or refers to it now.

    The manifest goes first, so that a kill leaves an unfinished output, which the next call finds.

    Args:
        roots: returns the current roots; must not query servers, since runs wait for it.

    Returns:
        Whether it was deleted.

    Raises:
        ArtifactError: a record cannot be read, so that the roots are unknown.
    """
    if garbage.lock:
        with contextlib.suppress(Timeout), FileLock(garbage.lock, timeout=0):
            path = garbage.path
            if path.exists() and not (owner(path) or garbage.used_since() or garbage.key in roots()):
                shutil.rmtree(path, ignore_errors=True)
                return not path.exists()
        return False
    if not garbage.path.is_dir():
        return False
    lock = Lock(garbage.path)
    try:
        if not lock.try_acquire():
            return False
        with lock.holding():
            trash = _set_aside(store, garbage, lock, roots)
            if trash:
                shutil.rmtree(trash, ignore_errors=True)
            return trash is not None and not trash.exists()
    except TakenOverError:
        return False
    finally:
        with contextlib.suppress(OSError):  # not empty: a run that waited for the lock has started there
            garbage.path.rmdir()
            garbage.path.parent.rmdir()


def deleted(store: Path) -> set[tuple[str, str]]:
    """Stage and fingerprint of all finished outputs that were deleted so far."""
    return set(read_jsonl(store / DELETED, lambda stage, fingerprint, **_: (stage, fingerprint)))


def _set_aside(store: Path, garbage: Garbage, lock: Lock, roots: Callable[[], Collection[str]]) -> Path | None:
    """Moves an item into a trash folder; None: it must be kept."""
    entry, trash = Entry(garbage.path), garbage.path / f"work.{uuid.uuid4().hex[:8]}.gone"
    with guard(store), locked(store):
        manifest = entry.manifest()
        is_other = (manifest.fingerprint if manifest else None) != garbage.fingerprint
        if is_other or garbage.used_since() or garbage.key in roots():
            return None
        lock.require()
        trash.mkdir()
        paths = garbage.paths
        if garbage.key:
            below = [path for path in entry.path.iterdir() if path.name != LOCK and path != trash]
            paths = tuple(sorted(below, key=lambda path: path.name != MANIFEST))
        if manifest and garbage.key:
            record = {"time": time.time(), "stage": manifest.stage, "fingerprint": manifest.fingerprint}
            append_jsonl(store / DELETED, record)
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                path.replace(trash / path.name)
    return trash


def _outputs(store: Path, roots: Collection[str]) -> list[Garbage]:
    found = []
    for stage, entry in Store(store).entries():
        with contextlib.suppress(FileNotFoundError):  # another `gc` has deleted it
            manifest, node = entry.manifest(), node_key(stage, entry.path.name)
            last_used = _last_used(entry.path)
            paths: tuple[Path, ...] = (entry.path,)
            why = "nothing refers to it" if manifest else _unfinished(entry)
            if node in roots:
                paths = tuple(_left_by_kill(entry, manifest)) if manifest else ()
                why = f"left by a kill beside a finished output: {', '.join(path.name for path in paths)}"
            if paths and not owner(entry.path):
                garbage = Garbage(
                    what=node, why=why, path=entry.path, paths=paths, last_used=last_used,
                    key=None if node in roots else node, fingerprint=manifest.fingerprint if manifest else None,
                )  # fmt: skip
                found.append((manifest.provenance.end if manifest else math.inf, garbage))
    return [garbage for _, garbage in sorted(found, key=lambda each: each[0], reverse=True)]


def _left_by_kill(entry: Entry, manifest: Manifest) -> Iterator[Path]:
    """Leftovers of a kill in the directory of a finished output; checkpoints kept by ``keep_best`` are not."""
    checkpoints = "checkpoints/.*" if manifest.provenance.resources.get("keep_best") else "checkpoints"
    for pattern in (*_LEFT, checkpoints):
        yield from sorted(entry.path.glob(pattern))


def _unfinished(entry: Entry) -> str:
    newest = entry.checkpoints.newest()
    return f"unfinished, with a checkpoint of step {newest.step}" if newest else "unfinished, without a checkpoint"


def _folders(parent: Path, prefix: str, lock: Path | None) -> Iterator[Garbage]:
    """Rehearsals, which share one lock; or cached tokens, models and log-probabilities, which have a lock each."""
    for path in sorted(parent.iterdir()) if parent.is_dir() else ():
        is_one = path.is_dir() and not owner(path) if lock else ENTRY_NAME.fullmatch(path.stem) and path.is_dir()
        if is_one:
            with contextlib.suppress(FileNotFoundError):
                yield Garbage(
                    what=f"{prefix}{path.name}", why="left by a rehearsal" if lock else "not used lately", path=path,
                    paths=(path,), last_used=_last_used(path), key=None if lock else TOKENS,
                    lock=lock or path.with_suffix(".lock"),
                )  # fmt: skip


def _last_used(directory: Path) -> float:
    """When a run last used it or wrote to it: a heartbeat, a report, a checkpoint, its manifest."""
    return _newest([directory, *directory.iterdir()])


def _newest(paths: Iterable[Path]) -> float:
    times = [0.0]
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            times.append(path.stat().st_mtime)
    return max(times)
