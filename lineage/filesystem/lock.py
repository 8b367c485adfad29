"""Locks across the hosts that share a store; within a machine or a folder, ``filelock`` locks.

``Lock`` is that of a directory: one process writes, the others wait. It is the kernel's (``flock``) or an NFSv4
server's: it is released when its owner dies, and a suspended owner keeps it. The locked file, ``<directory>/lock``,
names the owner for messages and for workers that outlive a driver. ``take_for_work`` locks a file for a while.
"""

import contextlib
import errno
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from lineage.errors import ArtifactError, TakenOverError
from lineage.filesystem.owner import Owner

LOCK = "lock"
_POLL_SECONDS = 0.2
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
# Mount options and file systems whose locks hold on one host only.
_LOCAL_OPTIONS = {"nolock", "nobrl", "localflock", "local_lock=all", "local_lock=flock"}
_LOCAL_KINDS = {
    f"fuse.{name}" for name in ("sshfs", "s3fs", "mountpoint-s3", "gcsfuse", "goofys", "rclone", "blobfuse2")
}


class Lock:
    """The right to write one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._path = directory / LOCK
        self._me = Owner.here()
        self._descriptor: int | None = None
        directory.mkdir(parents=True, exist_ok=True)

    @property
    def token(self) -> str:
        """Identifies this lock in its file while we own it."""
        return self._me.token

    def try_acquire(self) -> bool:
        """Acquires the lock if it is free (ArtifactError: the file system does not lock files)."""
        if self._descriptor is not None:
            return True
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:  # the directory was just deleted
            self.directory.mkdir(parents=True, exist_ok=True)
            return False
        try:
            # A lock on a file that its last owner has deleted is worthless.
            if _acquire(descriptor, self._path) and os.fstat(descriptor).st_nlink:
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(asdict(self._me)).encode(), 0)
                self._descriptor = descriptor
        finally:
            if self._descriptor is None:
                os.close(descriptor)
        return self._descriptor is not None

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """Releases the acquired lock at the end of the context."""
        try:
            yield
        finally:
            self._release()

    def require(self) -> None:
        """Checks the lock before a commit: an NFS server may have expired it, or the directory was deleted.

        Raises:
            TakenOverError: another process owns the lock.
            OSError: the store is unreachable.
        """
        require_owned(self.directory, self.token)

    def _release(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        with contextlib.suppress(OSError):  # the store is unreachable: the server releases the lock
            if os.path.samestat(os.fstat(descriptor), self._path.stat()):
                self._path.unlink()
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked child may have the descriptor too
        with contextlib.suppress(OSError):
            os.close(descriptor)


def owner(directory: Path) -> Owner | None:
    """The process that owns the lock of a directory; None: the lock is free."""
    with contextlib.suppress(OSError), (directory / LOCK).open("rb") as file:
        return None if _try(file.fileno(), fcntl.LOCK_SH) else _owner(file.read())
    return None


def require_owned(directory: Path, token: str) -> None:
    """Raises once another process owns the lock of a directory.

    Raises:
        TakenOverError: another process owns or has owned it.
        OSError: the store is unreachable.
    """
    try:
        found = _owner((directory / LOCK).read_bytes())
    except FileNotFoundError:
        found = None
    if found is None or found.token != token:
        to = f"process {found.pid} on {found.host}" if found else "another process, which has finished"
        raise TakenOverError(
            f"the lock {directory / LOCK} was lost to {to}: its file was deleted, or the server of the store was "
            "unreachable for too long; this output is not committed; run again to reuse the other process's output"
        )


def acquire_or(lock: Lock, finished: Callable[[], bool], waiting: Callable[[], None]) -> bool:
    """Waits until the lock is ours (True), or until its owner has finished the work (False).

    Args:
        waiting: called after every failed poll; may raise to end the wait.
    """
    while not finished():
        if lock.try_acquire():
            return True
        waiting()
        time.sleep(_POLL_SECONDS)
    return False


def take_for_work(path: Path, held: contextlib.ExitStack, seconds: float) -> bool:
    """Takes the lock of a file, unless another process keeps it for so long; ``held`` releases it.

    A process that this one forks off, such as that of a user's metric, does not inherit it, as it would ``flock``'s.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    held.callback(os.close, descriptor)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):  # the file system locks nothing
                return True
            time.sleep(_POLL_SECONDS)
        else:
            return True
    return False


def unreliable_locks(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Why locks below a path do not hold across hosts: mount point and file system; empty: nothing is known against it.

    Args:
        path: need not exist.
    """
    lines = mounts.read_text().splitlines() if mounts.exists() else []
    found = [line.split()[1:4] for line in lines]
    above = [each for each in found if Path(os.path.realpath(path)).is_relative_to(each[0].replace("\\040", " "))]
    if not above:
        return ""
    point, kind, options = max(reversed(above), key=lambda each: len(each[0]))  # a later mount hides an earlier one
    local = sorted(_LOCAL_OPTIONS.intersection(options.split(",")))
    return f"{point} is {' '.join([kind, *local])}" if local or kind in _LOCAL_KINDS else ""


def _acquire(descriptor: int, path: Path) -> bool:
    try:
        while not _try(descriptor, fcntl.LOCK_EX):
            if not _try(descriptor, fcntl.LOCK_SH):
                return False
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # not owned: another process is only checking
            time.sleep(0.001)
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            raise ArtifactError(
                f"{path}: its file system does not support locks; put the store on one that does"
            ) from error
        raise
    return True


def _try(descriptor: int, mode: int) -> bool:
    try:
        fcntl.flock(descriptor, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _owner(record: bytes) -> Owner:
    with contextlib.suppress(ValueError, TypeError):  # the owner is writing it
        return Owner(**json.loads(record))
    return Owner(host="an unknown host", pid=-1, started=0.0, token="")
