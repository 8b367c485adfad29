"""The session of a stage's process: whatever it has started, in whichever process group."""

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import psutil

from flows.progress.run_notes import RUN_VARIABLE
from lineage.holder import Holder

_NOTE = "session.json"  # below work/


def kill_session(leader: int) -> None:
    """Kills every process of a session but this one: Ray's workers too, which lead groups of their own."""
    for pid in _session(leader):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def note_session(work: Path) -> None:
    """Writes down that this process leads the session of what a run does in a stage's ``work/``."""
    note = {"leader": asdict(Holder.here()), "run": os.environ.get(RUN_VARIABLE)}
    with contextlib.suppress(OSError):  # the disk is full, or the store away: whoever needs it says so
        (work / _NOTE).write_text(json.dumps(note))


def end_left_session(work: Path) -> None:
    """Kills what a stage's process has left, on this host, if it was killed together with whoever would have done so.

    Those are Ray's agents: for 60 s they try to tell a head that is gone too. A session that is over gives its number
    back, and the one that has it now may be a daemon's: only what bears the mark of the run is ended.
    """
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # there is no note, or half a one
        note = json.loads((work / _NOTE).read_text())
        leader, run = Holder(**note["leader"]), note["run"]
        if run is None or not leader.is_here() or not leader.is_gone():
            return
        for pid in _session(leader.pid):
            with contextlib.suppress(psutil.Error):  # it ended meanwhile, or is not ours to look at
                process = psutil.Process(pid)
                if process.environ().get(RUN_VARIABLE) == run:
                    process.kill()


def _session(leader: int) -> Iterator[int]:
    """The processes of a session, without this one."""
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(pid) == leader and pid != os.getpid():
                yield pid
