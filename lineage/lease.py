"""A lock with a heartbeat: one process makes an artifact, the others wait, a dead holder is replaced."""

import contextlib
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from filelock import FileLock

from lineage.errors import ArtifactError

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 5.0
# A holder on another host that has not touched its lock for this long is taken for dead.
EXPIRY_SECONDS = 60.0
_POLL_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Who holds a lease. ``started`` tells a process from a later one with the same pid."""

    host: str
    pid: int
    started: float
    token: str

    @staticmethod
    def here() -> "Holder":
        process = psutil.Process()
        return Holder(host=socket.gethostname(), pid=process.pid, started=process.create_time(), token=uuid.uuid4().hex)

    def is_dead(self, silent_seconds: float) -> bool:
        """Of a process of this host the kernel knows; of another's only its silence tells."""
        if self.host != socket.gethostname():
            return silent_seconds > EXPIRY_SECONDS
        try:
            process = psutil.Process(self.pid)
            gone = process.status() == psutil.STATUS_ZOMBIE  # killed, and not yet reaped by its parent
            return gone or abs(process.create_time() - self.started) > 1.0
        except psutil.NoSuchProcess:
            return True


class Lease:
    """The right to write one directory.

    The lock is the file ``<directory>/lock``, which names the holder; its modification time is the
    heartbeat. A ``FileLock`` guards only the moment in which the file is judged and replaced.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / "lock"
        self._guard = FileLock(directory / "lock.guard")
        self._me = Holder.here()

    def try_acquire(self) -> bool:
        """Takes the lease if it is free, or its holder is dead."""
        with self._guard:
            holder = self._holder()
            if holder and not self._is_dead(holder):
                return holder.token == self._me.token
            if holder:
                logger.warning("lock=%s state=taken_over from=%s:%s", self._path, holder.host, holder.pid)
            self._path.write_text(json.dumps(asdict(self._me)))
            return True

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """Keeps an acquired lease alive with a heartbeat, and gives it back at the end."""
        done = threading.Event()
        thread = threading.Thread(target=self._beat, args=(done,), daemon=True, name="lease-heartbeat")
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            self._release()

    @contextlib.contextmanager
    def still_mine(self) -> Iterator[None]:
        """Holds the guard, for a commit that must not race a takeover.

        Raises:
            ArtifactError: another process has taken the lease over.
        """
        with self._guard:
            holder = self._holder()
            if holder is None or holder.token != self._me.token:
                raise ArtifactError(
                    f"the lock {self._path} was lost to {holder or 'nobody'}: this process was silent for longer than "
                    f"{EXPIRY_SECONDS:.0f} s; its output is not committed; run again to reuse the other one's"
                )
            yield

    def _holder(self) -> Holder | None:
        try:
            return Holder(**json.loads(self._path.read_text()))
        except FileNotFoundError:
            return None
        except (json.JSONDecodeError, TypeError):  # its holder died while it wrote the file
            return Holder(host=socket.gethostname(), pid=-1, started=0.0, token="")

    def _is_dead(self, holder: Holder) -> bool:
        return holder.pid < 0 or holder.is_dead(time.time() - self._path.stat().st_mtime)

    def _beat(self, done: threading.Event) -> None:
        while not done.wait(HEARTBEAT_SECONDS):
            with self._guard:
                holder = self._holder()
                if holder and holder.token == self._me.token:
                    os.utime(self._path)

    def _release(self) -> None:
        with self._guard:
            holder = self._holder()
            if holder and holder.token == self._me.token:
                self._path.unlink()


def living_holder(directory: Path) -> Holder | None:
    """Who is making a directory's artifact now, if anybody is."""
    path = directory / "lock"
    try:
        holder = Holder(**json.loads(path.read_text()))
        return None if holder.is_dead(time.time() - path.stat().st_mtime) else holder
    except (OSError, ValueError, TypeError):
        return None


def acquire_or(lease: Lease, finished: Callable[[], bool], waiting: Callable[[], None]) -> bool:
    """Waits until the lease is ours (True), or until the work is finished by its holder (False).

    Args:
        waiting: called at every look that was in vain; may raise, to end the wait.
    """
    while not finished():
        if lease.try_acquire():
            return True
        waiting()
        time.sleep(_POLL_SECONDS)
    return False
