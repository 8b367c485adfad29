"""Who holds something of a store, told from every other process: of this machine, of a container on it, of another."""

import contextlib
import os
import socket
import uuid
from dataclasses import dataclass
from pathlib import Path

import psutil

HEARTBEAT_SECONDS = 5.0  # from one write of a run's note to the next
# A holder that is not of this machine, and that nothing was heard of for this long, is taken for dead.
EXPIRY_SECONDS = 60.0
# By how much the clocks of two machines may differ. Only who asks once, and cannot watch, has to rely on them.
SKEW_SECONDS = 240.0
_SAME_SECONDS = 1.0  # by how much two looks at when a process started may differ


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A process.

    Args:
        started: when it did, in seconds since the epoch; tells it from a later process of the same pid.
        booted: when its machine did, by the same clock: if that is set, both move; None: unknown.
        machine: this boot of it and the namespace of its pids; empty: unknown.
        token: of one lock, or one run.
    """

    host: str
    pid: int
    started: float
    token: str
    booted: float | None = None
    machine: str = ""

    @staticmethod
    def here() -> "Holder":
        """This process, with a token that no other call gives."""
        process = psutil.Process()
        return Holder(
            host=host(), pid=process.pid, started=process.create_time(), booted=psutil.boot_time(), machine=machine(),
            token=uuid.uuid4().hex,
        )  # fmt: skip

    def is_process(self, other: "Holder") -> bool:
        """Whether both are one process, by whatever token each was noted."""
        return (self.host, self.pid) == (other.host, other.pid) and abs(self.started - other.started) <= _SAME_SECONDS

    def is_here(self) -> bool:
        """Whether its pid is one that this process sees: containers may share a name, and have pids of their own."""
        return self.host == host() and self.machine in ("", machine())

    def is_dead(self, silent_seconds: float) -> bool:
        """Of a process of this machine the kernel knows; of another only its silence tells.

        Args:
            silent_seconds: since its last heartbeat, as this machine's clock and the store's have it.
        """
        return self.is_gone() if self.is_here() else silent_seconds > EXPIRY_SECONDS + SKEW_SECONDS

    def is_gone(self) -> bool:
        """Whether a process of this machine has ended."""
        try:
            process = psutil.Process(self.pid)
            if process.status() == psutil.STATUS_ZOMBIE:  # killed, and not yet reaped by its parent
                return True
            started = process.create_time()
        except psutil.NoSuchProcess:
            return True
        was_set = 0.0 if self.booted is None else psutil.boot_time() - self.booted
        return abs(started - was_set - self.started) > _SAME_SECONDS


def host() -> str:
    """The name of this machine."""
    return socket.gethostname()


def machine() -> str:
    """What tells it from others of its name, as containers are, and from itself before a restart; empty: unknown."""
    found = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        found = f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    return found
