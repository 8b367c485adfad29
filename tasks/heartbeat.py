"""Marks by which each worker of a training shows that it goes on, ``work/alive/rank-R.json``: where it is.

Whoever looks at them tells a worker that hangs from one that works, and at which step one was lost.
"""

import faulthandler
import json
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

_DUMP_AT = 0.9  # of the time after which a worker is taken for hung: its stack is there before it is ended
_FRAME = re.compile(r'File "(.+)", line (\d+) in (.+)')


class Doing(StrEnum):
    """What a worker of a training does."""

    FETCHING = "fetching its inputs"  # models from a hub: takes as long as it takes, and notices by itself what hangs
    LOADING = "loading"  # model, rows, checkpoint; meets the other workers
    BETWEEN = "between steps"  # reports, measures, fetches rows
    STEPPING = "in a step"
    SAVING = "saving"  # writes and digests, or waits for who does: takes as long as it takes
    DONE = "after its last step"  # merges, writes the output: takes as long as it takes


UNWATCHED = (Doing.FETCHING, Doing.SAVING, Doing.DONE)


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Where a worker is.

    Args:
        time: in seconds since the epoch, by the clock of its host.
        thread: the one that trains, as Python counts threads.
        step: optimizer steps that are done; None: it has not begun to train.
    """

    rank: int
    host: str
    pid: int
    thread: int
    time: float
    step: int | None
    doing: Doing


class Alive:
    """Makes the marks of one worker; should it stand still, it writes its stack beside them.

    Args:
        seconds: of standing still, after which it is taken for hung; None: never.
    """

    def __init__(self, work_dir: Path, rank: int, seconds: float | None) -> None:
        self._directory = _directory(work_dir)
        self._rank, self._seconds = rank, seconds
        self._step: int | None = None
        self._stack = self._begin()

    def mark(self, step: int | None, doing: Doing) -> None:
        """Shows that it has come so far; one small file, replaced."""
        self._step = step
        mark = Mark(
            rank=self._rank, host=socket.gethostname(), pid=os.getpid(), thread=threading.get_ident(),
            time=time.time(), step=step, doing=doing,
        )  # fmt: skip
        draft = self._directory / f".rank-{self._rank}.tmp"
        draft.write_text(json.dumps(asdict(mark)))
        draft.replace(_path(self._directory, self._rank))
        if self._stack is not None and self._seconds is not None:
            if doing in UNWATCHED:
                faulthandler.cancel_dump_traceback_later()
            else:
                faulthandler.dump_traceback_later(_DUMP_AT * self._seconds, file=self._stack)

    def end(self) -> None:
        """From here on nothing is expected of it."""
        self.mark(self._step, Doing.DONE)
        if self._stack is not None:
            os.close(self._stack)
            self._stack = None

    def _begin(self) -> int | None:
        """Opens the file for its stack."""
        self._directory.mkdir(parents=True, exist_ok=True)
        if self._seconds is None:
            return None
        path = _stack_path(self._directory, self._rank)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)


def marks(work_dir: Path) -> Iterator[Mark]:
    """The last mark of every worker that has begun, by rank."""
    directory = _directory(work_dir)
    ranks = sorted(int(path.stem.removeprefix("rank-")) for path in directory.glob("rank-*.json"))
    for rank in ranks:
        fields = json.loads(_path(directory, rank).read_text())
        yield Mark(**{**fields, "doing": Doing(fields["doing"])})


def stack(work_dir: Path, rank: int) -> str:
    """What a worker that stood still was at, in all its threads; empty: it could not even say that."""
    try:
        text = _stack_path(_directory(work_dir), rank).read_text()
    except OSError:
        return ""
    return text.rpartition("Timeout (")[2].partition("\n")[2]  # the last one: it may have stood still before


def innermost_frame(stack: str, thread: int) -> str:
    """Where one thread of a stack is: ``function, file.py:line``; empty: the stack does not say."""
    for block in stack.split("\n\n"):
        head, _, frames = block.strip().partition("\n")
        match = _FRAME.search(frames.partition("\n")[0])
        if match and head.startswith(f"Thread 0x{thread:016x}"):
            return f"{match[3]}, {match[1]}:{match[2]}"
    return ""


def _directory(work_dir: Path) -> Path:
    return work_dir / "alive"


def _path(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.json"


def _stack_path(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.stack"
