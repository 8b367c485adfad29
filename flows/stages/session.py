"""The session of a stage's process: whatever it has started, in whichever process group."""

import contextlib
import os
import signal

import psutil


def kill_session(leader: int) -> None:
    """Kills every process of a session but this one: Ray's workers too, which lead groups of their own."""
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(pid) == leader and pid != os.getpid():
                os.kill(pid, signal.SIGKILL)
