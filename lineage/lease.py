"""A lock with a heartbeat: one process makes an artifact, the others wait, a dead holder is replaced.

It needs of a file system what NFS has too: a creation that fails where the name is taken, a rename, and that an opened
file is as the server has it. It trusts no clock but the waiter's own.
"""

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from lineage.errors import TakenOverError
from lineage.holder import EXPIRY_SECONDS, SKEW_SECONDS, Holder
from lineage.silence import Silence

__all__ = ["EXPIRY_SECONDS", "SKEW_SECONDS", "Holder", "Lease", "acquire_or", "living_holder", "require_held"]

logger = logging.getLogger(__name__)

LOCK = "lock"
HEARTBEAT_SECONDS = 5.0
_POLL_SECONDS = 0.2


class Lease:
    """The right to write one directory.

    The lock is the file ``<directory>/lock``, which names the holder; its modification time is the heartbeat, of which
    a waiter of another machine only asks whether it changes. Who finds a holder dead makes itself its heir, in the
    file ``lock.<token of the dead>``, and then moves that file over the lock: a holder has one heir, and an heir that
    died has an heir again.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._path = directory / LOCK
        self._me = Holder.here()
        self._watched: dict[str, Silence] = {}  # by the token of the holder
        directory.mkdir(parents=True, exist_ok=True)

    @property
    def token(self) -> str:
        """What the lock says as long as the lease is ours."""
        return self._me.token

    def try_acquire(self) -> bool:
        """Takes the lease if it is free, or its holder is dead: one of another machine only after some looks."""
        with contextlib.suppress(FileNotFoundError):  # the directory was freed meanwhile: it is made again
            if not self._take(self._path):
                return False
            for rest in self.directory.glob(f"{LOCK}.*"):  # of contenders that were killed
                rest.unlink(missing_ok=True)
            return True
        self.directory.mkdir(parents=True, exist_ok=True)
        return False

    @contextlib.contextmanager
    def holding(self, lost: Callable[[TakenOverError], None] = logger.warning) -> Iterator[None]:
        """Keeps an acquired lease alive with a heartbeat, and gives it back at the end.

        Args:
            lost: called from the heartbeat's thread, once another process has taken it over: this one was suspended.
        """
        done = threading.Event()
        thread = threading.Thread(target=self._beat, args=(done, lost), daemon=True, name="lease-heartbeat")
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            self._release()

    def require(self) -> None:
        """For who is about to commit.

        Raises:
            TakenOverError: another process has taken the lease over.
            OSError: the store is away.
        """
        require_held(self.directory, self.token)

    def _take(self, path: Path) -> bool:
        """Makes ours a file that names a holder, if there is none, or that holder is dead."""
        holder = read_holder(path)
        if holder is None:
            self._create(path)
            holder = read_holder(path)
        if holder is None or holder.token == self.token:
            return holder is not None
        heir = path.with_name(f"{LOCK}.{holder.token}")
        if not (self._is_dead(path, holder) and self._take(heir)):
            return False
        with contextlib.suppress(FileNotFoundError):  # we were silent for too long ourselves, and have an heir
            if read_holder(path) == holder:
                heir.replace(path)
                logger.info("lock=%s state=taken_over from=%s:%s", path, holder.host, holder.pid)
            else:
                heir.unlink()
        now = read_holder(path)
        return now is not None and now.token == self.token

    def _create(self, path: Path) -> None:
        """Makes a file that names us, unless its name is taken."""
        with contextlib.suppress(FileExistsError), path.open("x") as file:
            file.write(json.dumps(asdict(self._me)))

    def _is_dead(self, path: Path, holder: Holder) -> bool:
        if holder.is_here():
            return holder.is_gone()
        try:
            beat = _heartbeat(path)
        except FileNotFoundError:
            return False
        if holder.token not in self._watched:
            self._watched[holder.token] = Silence(beat)
            return holder.is_dead(time.time() - beat / 1e9)
        return self._watched[holder.token].seconds(beat, HEARTBEAT_SECONDS) > EXPIRY_SECONDS

    def _beat(self, done: threading.Event, lost: Callable[[TakenOverError], None]) -> None:
        while not done.wait(HEARTBEAT_SECONDS):
            try:
                self.require()
                os.utime(self._path)
            except TakenOverError as error:
                lost(error)
                return
            except OSError as error:  # the store is away: others do not hear us, and may take over
                logger.warning("lock=%s state=unreachable: %s", self._path, error)

    def _release(self) -> None:
        """Nobody takes over meanwhile: we are alive, or were taken over, and then the lock is not ours."""
        with contextlib.suppress(OSError, TakenOverError):  # a store that is away: the lock expires
            self.require()
            self._path.unlink()


def read_holder(path: Path) -> Holder | None:
    """Whom a lock names; None: there is none.

    Raises:
        OSError: other than that there is none.
    """
    try:
        return Holder(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):  # being written now; of one that was killed then, only silence tells
        return Holder(host="", pid=-1, started=0.0, token=f"unreadable-{path.name}")


def require_held(directory: Path, token: str) -> None:
    """That a directory's lease is still the one of this token.

    Raises:
        TakenOverError: another process has taken it over.
        OSError: the store is away.
    """
    holder = read_holder(directory / LOCK)
    if holder is None or holder.token != token:
        to = f"process {holder.pid} on {holder.host}" if holder else "another process, which is done"
        raise TakenOverError(
            f"the lock {directory / LOCK} was lost to {to}: this process was silent for longer than "
            f"{EXPIRY_SECONDS:.0f} s; its output is not committed; run again to reuse the other one's"
        )


def living_holder(directory: Path) -> Holder | None:
    """Who is making a directory's artifact now, if anybody is."""
    path = directory / LOCK
    try:
        holder = read_holder(path)
        return None if holder is None or holder.is_dead(time.time() - _heartbeat(path) / 1e9) else holder
    except OSError:
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


def _heartbeat(path: Path) -> int:
    """When a holder was last heard, in nanoseconds of the store's clock; an opened file, which no client caches."""
    with path.open("rb") as file:
        return os.fstat(file.fileno()).st_mtime_ns
