"""The end of what nobody needs: alone with each thing, crash-safe, and after a last look at its use and its users."""

import contextlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Collection
from pathlib import Path

from filelock import FileLock, Timeout

from lineage.errors import TakenOverError
from lineage.garbage import Garbage
from lineage.lease import LOCK, Lease, living_holder
from lineage.promotions import locked
from lineage.store import MANIFEST, Entry

FREED = "freed.jsonl"  # of the store: the finished outputs that were freed, so that no mirror of theirs is an orphan

_GUARD = "gc.lock"


def guard(store: Path) -> FileLock:
    """Between the last look at who needs an output and its end nobody finds that it is there, and takes it up.

    Held for as long as it takes to write a run's note; or to look, and rename one output.
    """
    store.mkdir(parents=True, exist_ok=True)
    return FileLock(store / _GUARD)


def free(store: Path, garbage: Garbage, needed: Callable[[], Collection[str]]) -> bool:
    """Deletes it, unless somebody is at work there, has used it since it was found, needs it by now, or was faster.

    Of an output the manifest goes first, so that a kill leaves an unfinished one, which the next time finds.

    Args:
        needed: looks again, at the keys of all that must stay; asks nobody over a network, since runs wait for it.

    Returns:
        Whether it was there and is gone.

    Raises:
        ArtifactError: a record cannot be read, so that nobody knows what must stay.
    """
    if garbage.lock:
        return _free_locked(garbage, garbage.lock, needed)
    entry = Entry(garbage.path)
    if not entry.path.is_dir():  # another one was faster
        return False
    lease = Lease(entry.path)
    try:
        if not lease.try_acquire():
            return False
        with lease.holding():
            gone = _set_aside(store, entry, garbage, lease, needed)
            if gone is None:
                return False
            shutil.rmtree(gone, ignore_errors=True)  # or whoever holds the lease now clears it away
            return not gone.exists()
    except TakenOverError:  # we were silent for too long
        return False
    finally:
        with contextlib.suppress(OSError):  # a run that waited for it begins there now
            entry.path.rmdir()
            entry.path.parent.rmdir()


def freed(store: Path) -> set[tuple[str, str]]:
    """Stage and fingerprint of the finished outputs that were ever freed."""
    found = set()
    with contextlib.suppress(FileNotFoundError):
        for line in (store / FREED).read_text().splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):  # cut by a kill
                told = json.loads(line)
                found.add((told["stage"], told["fingerprint"]))
    return found


def _free_locked(garbage: Garbage, lock: Path, needed: Callable[[], Collection[str]]) -> bool:
    with contextlib.suppress(Timeout), FileLock(lock, timeout=0):
        if not garbage.path.exists() or living_holder(garbage.path) or garbage.used_since() or garbage.key in needed():
            return False
        shutil.rmtree(garbage.path, ignore_errors=True)
        return not garbage.path.exists()
    return False


def _set_aside(
    store: Path, entry: Entry, garbage: Garbage, lease: Lease, needed: Callable[[], Collection[str]]
) -> Path | None:
    """Moves it where nobody looks for it; None: it has to stay.

    Who takes the lease over, from one that was silent for too long, clears that place away before anything else: then
    no later move finds it.

    Raises:
        ArtifactError: a record cannot be read.
        TakenOverError: the lease was lost.
    """
    gone = entry.path / f"work.{uuid.uuid4().hex[:8]}.gone"
    with guard(store), locked(store):
        manifest = entry.manifest()
        is_other = (manifest.fingerprint if manifest else None) != garbage.fingerprint
        if is_other or garbage.used_since() or garbage.key in needed():
            return None
        lease.require()
        gone.mkdir()
        if manifest and garbage.key:
            _note(store, manifest.stage, manifest.fingerprint)
        for path in _parts(entry, gone) if garbage.key else garbage.paths:
            lease.require()
            with contextlib.suppress(FileNotFoundError):
                path.replace(gone / path.name)
    return gone


def _parts(entry: Entry, gone: Path) -> list[Path]:
    """All that an entry holds, its manifest first: what is half deleted is unfinished."""
    below = [path for path in entry.path.iterdir() if path.name != LOCK and path != gone]
    return sorted(below, key=lambda path: path.name != MANIFEST)


def _note(store: Path, stage: str, fingerprint: str) -> None:
    with (store / FREED).open("a") as file:
        file.write(json.dumps({"time": time.time(), "stage": stage, "fingerprint": fingerprint}) + "\n")
        file.flush()
        os.fsync(file.fileno())
