"""Directories of a store's cache: built once, under a lock, atomically, and verified before each use."""

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from lineage.filesystem.digest import DigestCache, digest_files

logger = logging.getLogger(__name__)

_DIGESTS = "digests.json"  # of an entry: path below it -> SHA-256; of the folder of entries: its cache of digests
_QUIET_SECONDS = 5  # wait for another run this long before logging it


@contextmanager
def cached(entry: Path, make: Callable[[Path], None]) -> Iterator[bool]:
    """Locks an intact entry, and builds it first where it is missing or damaged; yields whether it was built now.

    Args:
        entry: may be shared by processes and machines; its parent folder is created.
        make: fills an empty directory, which is renamed to ``entry``.
    """
    entry.parent.mkdir(parents=True, exist_ok=True)
    with _locked(entry):
        is_lacking = not _is_whole(entry)
        if is_lacking:
            draft = entry.with_suffix(".draft")
            for old in (entry, draft):
                shutil.rmtree(old, ignore_errors=True)
            draft.mkdir()
            make(draft)
            (draft / _DIGESTS).write_text(json.dumps(digest_files(draft)))
            draft.rename(entry)
        with suppress(OSError):
            os.utime(entry)  # `gc` reads it as the time of last use
        yield is_lacking


@contextmanager
def _locked(entry: Path) -> Iterator[None]:
    lock = FileLock(f"{entry}.lock")
    try:
        lock.acquire(timeout=_QUIET_SECONDS)
    except Timeout:
        logger.info("cached=%s state=waiting for another run that builds it", entry)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _is_whole(entry: Path) -> bool:
    """Whether an entry exists and every file has the digest that was recorded."""
    digests = DigestCache(entry.parent / _DIGESTS)
    try:
        recorded = json.loads((entry / _DIGESTS).read_text())
        return bool(recorded) and bool(recorded == {name: digests.digest(entry / name) for name in recorded})
    except (OSError, ValueError, TypeError):
        return False
