"""The process that owns a lock or a run, and whether it is alive: on this machine, in a container, on another one."""

import contextlib
import os
import socket
import uuid
from dataclasses import dataclass
from pathlib import Path

import psutil

HEARTBEAT_SECONDS = 5.0  # between two writes of a run record
# Heartbeat timeout of an owner on another machine.
EXPIRY_SECONDS = 60.0
# Largest difference between the clocks of two machines, for a check that reads the heartbeat only once.
SKEW_SECONDS = 240.0
_SAME_SECONDS = 1.0  # largest difference of two readings of a process's start time


@dataclass(frozen=True, kw_only=True)
class Owner:
    """A process.

    Args:
        started: its start, in seconds since the epoch; a later process may have the same pid.
        booted: boot time of its machine, which moves with ``started`` when the clock is set; None: unknown.
        machine: boot id and pid namespace; empty: unknown.
        token: identifies one lock or one run.
    """

    host: str
    pid: int
    started: float
    token: str
    booted: float | None = None
    machine: str = ""

    @staticmethod
    def here() -> "Owner":
        """This process, with a new unique token."""
        process = psutil.Process()
        return Owner(
            host=host(), pid=process.pid, started=process.create_time(), booted=psutil.boot_time(), machine=machine(),
            token=uuid.uuid4().hex,
        )  # fmt: skip

    def is_process(self, other: "Owner") -> bool:
        """Whether both are one process; their tokens may differ."""
        return (self.host, self.pid) == (other.host, other.pid) and abs(self.started - other.started) <= _SAME_SECONDS

    def is_here(self) -> bool:
        """Whether this process sees its pid: containers may share a host name, and have their own pids."""
        return self.host == host() and self.machine in ("", machine())

    def is_dead(self, silent_seconds: float) -> bool:
        """Whether the process has ended: known for this machine, decided by the heartbeat timeout for others.

        Args:
            silent_seconds: time since its last heartbeat, by this machine's clock and the store's time stamps.
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
    """Boot id and pid namespace: differs between containers of one host name and between boots; empty: unknown."""
    found = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        found = f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    return found
