"""The attempts to make one artifact, ``attempts.jsonl`` beside it: when, where, by which code, from which step."""

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from lineage.files import append_jsonl, read_jsonl

FILE = "attempts.jsonl"


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One attempt.

    Args:
        time: when it began, in seconds since the epoch.
        host, pid: of the process that began it.
        step: of the checkpoint that it went on from; 0: from the beginning.
        code_digest: of the method's source files.
        cause: what ended the attempt before it, where that is known.
        kind: of machine and workers; empty: of an earlier version, which did not note it.
        reached: the last step that the attempt before reported.
    """

    time: float
    host: str
    pid: int
    step: int
    code_digest: str
    cause: str = ""
    kind: str = ""
    reached: int = 0


def attempts(directory: Path) -> list[Attempt]:
    """Of an artifact's directory, in order; what a kill cut is left out."""
    return read_jsonl(directory / FILE, Attempt)


def earlier_codes(made: Sequence[Attempt], step: int | None, code_digest: str) -> list[str]:
    """The other code that some steps were trained by: digests, the first first.

    A checkpoint was written by the last attempt that began before it, which went on from one of an attempt before.

    Args:
        step: of a checkpoint; None: as far as the last attempt came.
        code_digest: of the code that is no other.
    """
    codes = dict.fromkeys(attempt.code_digest for attempt in _counted(made, step))
    return [digest for digest in codes if digest != code_digest]


def resumed_at(made: Sequence[Attempt]) -> list[int]:
    """Steps of the checkpoints that what was made was gone on from, in order."""
    return [attempt.step for attempt in _counted(made, None) if attempt.step]


def changed_at(made: Sequence[Attempt]) -> list[int]:
    """Of those steps the ones from which on it ran on another kind of machine, or with other workers."""
    counted = _counted(made, None)
    return [after.step for before, after in pairwise(counted) if after.kind != before.kind]


def _counted(made: Sequence[Attempt], step: int | None) -> list[Attempt]:
    """The attempts of whose steps something is left."""
    found: list[Attempt] = []
    for attempt in reversed(made):
        if step is None or attempt.step < step:
            found.append(attempt)
            step = attempt.step
    return found[::-1]


def last_words(made: Sequence[Attempt]) -> str:
    """The last of some attempts: ``attempt 3, from step 10: its process was killed``; empty: it is the first."""
    if len(made) < 2:
        return ""
    last = made[-1]
    return f"attempt {len(made)}, from step {last.step}{f': {last.cause}' if last.cause else ''}"


def note_attempt(
    directory: Path, step: int, code_digest: str, cause: str = "", kind: str = "", reached: int = 0
) -> None:  # fmt: skip
    """Writes down that this process begins one."""
    attempt = Attempt(
        time=time.time(), host=socket.gethostname(), pid=os.getpid(), step=step, code_digest=code_digest, cause=cause,
        kind=kind, reached=reached,
    )  # fmt: skip
    append_jsonl(directory / FILE, asdict(attempt), flush=False)
