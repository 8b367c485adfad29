"""Directories of a store's cache: made once, under a lock, whole or not there, and checked before they are read."""

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from lineage.digest import DigestCache, digest_files

logger = logging.getLogger(__name__)

_DIGESTS = "digests.json"  # of an entry: path below it -> SHA-256; of the folder of entries: its cache of digests
_QUIET_SECONDS = 5  # of waiting for another run, before it is logged


@contextmanager
def cached(entry: Path, make: Callable[[Path], None]) -> Iterator[bool]:
    """Locks an entry that is whole, after making it where it is lacking or damaged; yields whether it was made now.

    Args:
        entry: may be shared by processes and machines; the folder above it is created.
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
            os.utime(entry)  # by which `gc` knows that it is still read
        yield is_lacking


@contextmanager
def _locked(entry: Path) -> Iterator[None]:
    lock = FileLock(f"{entry}.lock")
    try:
        lock.acquire(timeout=_QUIET_SECONDS)
    except Timeout:
        logger.info("cached=%s state=waiting for another run that makes it", entry)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _is_whole(entry: Path) -> bool:
    """Whether an entry is there, and every file of it as it was written."""
    digests = DigestCache(entry.parent / _DIGESTS)
    try:
        recorded = json.loads((entry / _DIGESTS).read_text())
        return bool(recorded) and bool(recorded == {name: digests.digest(entry / name) for name in recorded})
    except (OSError, ValueError, TypeError):
        return False
