"""Garbage collection of a store: unreferenced outputs and caches, their size, and their deletion."""

import contextlib
import math
import os
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock

from lineage.filesystem.digest import file_names
from lineage.filesystem.files import append_jsonl, read_jsonl
from lineage.filesystem.lock import LOCK, Lock, owner
from lineage.graph.places import node_key
from lineage.promotions import locked
from lineage.store import CACHE, COMPILED, MODELS, REFERENCE_LOGPS, REHEARSALS, Entry, Store

# Records the deleted finished outputs, so that `verify` does not report their mirrors as orphans.
DELETED = "freed.jsonl"
TOKENS = "tokens"  # the GC root of all caches: any run may read them
AGE_SECONDS = 7 * 86400.0

_GUARD = "gc.lock"
_TRASH = "deleted"  # in the cache: what was renamed, to be deleted
# Folder of the cache -> name of an entry.
_CACHES = {
    "tokens": "tokens", "scores": "scores", MODELS: "model",
    REFERENCE_LOGPS: REFERENCE_LOGPS, COMPILED: COMPILED, _TRASH: "deleted"
}  # fmt: skip
_LEFT = ("work", "*.gone", "*.tmp", f"{LOCK}.*")  # what a kill may leave beside a finished output


@dataclass(frozen=True, kw_only=True)
class Garbage:
    """One output, cache entry or leftover to delete.

    Args:
        what: its name: ``stage@`` and the first digits of its fingerprint, or a description.
        path: its directory; ``paths``: what is deleted, the directory or parts of it.
        last_used: in seconds since the epoch.
        key: the GC root that would keep it; None: no root can (leftovers of a kill).
        fingerprint: of a finished output.
    """

    what: str
    why: str
    path: Path
    paths: tuple[Path, ...]
    last_used: float
    key: str | None = None
    fingerprint: str | None = None


class Size(NamedTuple):
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
    found = [*_outputs(store, roots), *_folders(store / REHEARSALS, "rehearsals/", "left by a rehearsal", None)]
    for folder, name in _CACHES.items() if TOKENS not in roots else ():
        found += _folders(store / CACHE / folder, f"{name} ", "not used lately", TOKENS)
    latest = time.time() - older_than
    return [each for each in found if each.last_used <= latest], [each for each in found if each.last_used > latest]


def size(garbage: Iterable[Garbage]) -> Size:
    """Total size; files that two items share through hard links count once."""
    links = Counter[tuple[int, int]]()
    status: dict[tuple[int, int], os.stat_result] = {}
    for path in (path for each in garbage for path in each.paths):
        for file in [path / name for name in file_names(path)] if path.is_dir() else [path]:
            with contextlib.suppress(OSError):  # it is gone
                found = file.lstat()
                status[found.st_dev, found.st_ino] = found
                links[found.st_dev, found.st_ino] += 1
    freed = sum(found.st_size for key, found in status.items() if links[key] >= found.st_nlink)
    return Size(sum(found.st_size for found in status.values()), freed)


def guard(store: Path) -> FileLock:
    """A lock that keeps runs from reusing an output between the last check of the roots and its deletion.

    It is held while one run record is written, or one output is checked and renamed.
    """
    store.mkdir(parents=True, exist_ok=True)
    return FileLock(store / _GUARD)


def delete(store: Path, garbage: Garbage, roots: Callable[[], Collection[str]]) -> bool:
    """Deletes an item, unless a process owns it, has used it since it was found, or refers to it now.

    It is renamed first, so that a run sees all of it or nothing; after a kill the next call deletes the rest.

    Args:
        roots: returns the current roots; must not query servers, since runs wait for it.

    Returns:
        Whether it was deleted.

    Raises:
        ArtifactError: a record cannot be read, so that the roots are unknown.
    """
    trash = store / CACHE / _TRASH / uuid.uuid4().hex[:16]
    with guard(store), locked(store), contextlib.suppress(FileNotFoundError):  # another `gc` has deleted it
        manifest = Entry(garbage.path).manifest()
        is_other = (manifest.fingerprint if manifest else None) != garbage.fingerprint
        if is_other or _last_used(garbage.path) > garbage.last_used or garbage.key in roots():
            return False
        lock = Lock(garbage.path)
        if not lock.try_acquire():
            return False
        with lock.holding():
            if manifest and garbage.key:
                record_deleted(store, manifest.stage, manifest.fingerprint)
            trash.mkdir(parents=True)
            for path in garbage.paths:
                path.replace(trash / path.name)
    is_moved = trash.exists()
    shutil.rmtree(trash, ignore_errors=True)
    for folder in (garbage.path.parent, trash.parent, store / CACHE):
        with contextlib.suppress(OSError):  # not empty
            folder.rmdir()
    return is_moved and not trash.exists()


def record_deleted(store: Path, stage: str, fingerprint: str) -> None:
    """Records that an output was deleted."""
    append_jsonl(store / DELETED, {"time": time.time(), "stage": stage, "fingerprint": fingerprint})


def deleted(store: Path) -> set[tuple[str, str]]:
    """Stage and fingerprint of all finished outputs that were deleted so far."""
    return set(read_jsonl(store / DELETED, lambda stage, fingerprint, **_: (stage, fingerprint)))


def _outputs(store: Path, roots: Collection[str]) -> Iterator[Garbage]:
    """Unreferenced outputs, newest first, and leftovers of kills beside others."""
    found = []
    for stage, entry in Store(store).entries():
        with contextlib.suppress(FileNotFoundError):  # another `gc` has deleted it
            manifest, node = entry.manifest(), node_key(stage, entry.path.name)
            last_used, newest = _last_used(entry.path), entry.checkpoints.newest()
            paths, key = [entry.path], None if node in roots else node
            why = "nothing refers to it" if manifest else "unfinished, without a checkpoint"
            if newest and not manifest:
                why = f"unfinished, with a checkpoint of step {newest.step}"
            if key is None:
                keeps = bool(manifest and manifest.provenance.resources.get("keep_best"))
                patterns = (*_LEFT, "checkpoints/.*" if keeps else "checkpoints") if manifest else ()
                paths = [path for pattern in patterns for path in sorted(entry.path.glob(pattern))]
                why = f"left by a kill beside a finished output: {', '.join(path.name for path in paths)}"
            if paths and not owner(entry.path):
                garbage = Garbage(
                    what=node, why=why, path=entry.path, paths=tuple(paths), last_used=last_used, key=key,
                    fingerprint=manifest.fingerprint if manifest else None,
                )  # fmt: skip
                found.append((manifest.provenance.end if manifest else math.inf, garbage))
    yield from (garbage for _, garbage in sorted(found, key=lambda each: each[0], reverse=True))


def _folders(parent: Path, prefix: str, why: str, key: str | None) -> Iterator[Garbage]:
    for path in sorted(parent.iterdir()) if parent.is_dir() else ():
        with contextlib.suppress(FileNotFoundError):
            if path.is_dir() and not owner(path):
                last_used = _last_used(path)
                yield Garbage(what=prefix + path.name, why=why, path=path, paths=(path,), last_used=last_used, key=key)


def _last_used(directory: Path) -> float:
    """When a run last used it or wrote to it: a heartbeat, a report, a checkpoint, its manifest."""
    times = [directory.stat().st_mtime]
    for path in directory.iterdir():
        with contextlib.suppress(FileNotFoundError):
            times.append(path.stat().st_mtime)
    return max(times)
