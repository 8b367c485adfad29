"""The session of a stage's process: whatever it has started, in whichever process group."""

import contextlib
import json
import os
import signal
from dataclasses import asdict
from pathlib import Path

import psutil

from lineage.holder import Holder

_NOTE = "session.json"  # below work/


def kill_session(leader: int) -> None:
    """Kills every process of a session but this one: Ray's workers too, which lead groups of their own."""
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(pid) == leader and pid != os.getpid():
                os.kill(pid, signal.SIGKILL)


def note_session(work: Path) -> None:
    """Writes down that this process leads the session of what is done in a stage's ``work/``."""
    with contextlib.suppress(OSError):  # the disk is full, or the store away: whoever needs it says so
        (work / _NOTE).write_text(json.dumps(asdict(Holder.here())))


def end_left_session(work: Path) -> None:
    """Kills what a stage's process has left, on this host, if it was killed together with whoever would have done so.

    Those are Ray's agents: for 60 s they try to tell a head that is gone too.
    """
    with contextlib.suppress(OSError, ValueError, TypeError):  # there is no note, or half a one
        leader = Holder(**json.loads((work / _NOTE).read_text()))
        if leader.is_here() and not psutil.pid_exists(leader.pid):  # as long as a session lives nobody gets its number
            kill_session(leader.pid)
