"""The attempts to produce one artifact, in ``attempts.jsonl``: when, where, with which code, from which step."""

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from lineage.filesystem.files import append_jsonl, read_jsonl

FILE = "attempts.jsonl"


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One attempt.

    Args:
        time: its start, in seconds since the epoch.
        host, pid: the process that started it.
        step: the checkpoint that it resumed from; 0: none.
        code_digest: digest of the method's source files.
        cause: why the previous attempt failed; empty: unknown.
        kind: environment signature; empty: written by a version that did not record it.
        reached: the last step that the previous attempt reported.
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
    """All attempts of an artifact's directory, in order; a line cut by a kill is skipped."""
    return read_jsonl(directory / FILE, Attempt)


def other_code_digests(made: Sequence[Attempt], step: int | None, code_digest: str) -> list[str]:
    """Digests of the other code that trained some of the steps, oldest first.

    A checkpoint was written by the last attempt that started below its step, which resumed from an earlier attempt's.

    Args:
        step: of a checkpoint; None: the end of the last attempt.
        code_digest: digest of the current code, which is left out.
    """
    codes = dict.fromkeys(attempt.code_digest for attempt in _counted(made, step))
    return [digest for digest in codes if digest != code_digest]


def resumed_at(made: Sequence[Attempt]) -> list[int]:
    """Steps of the checkpoints that the training was resumed from, in order."""
    return [attempt.step for attempt in _counted(made, None) if attempt.step]


def changed_at(made: Sequence[Attempt]) -> list[int]:
    """The steps of ``resumed_at`` at which the environment signature changed."""
    counted = _counted(made, None)
    return [after.step for before, after in pairwise(counted) if after.kind != before.kind]


def _counted(made: Sequence[Attempt], step: int | None) -> list[Attempt]:
    """The attempts that contributed steps to the result: later restarts discard what they repeated."""
    found: list[Attempt] = []
    for attempt in reversed(made):
        if step is None or attempt.step < step:
            found.append(attempt)
            step = attempt.step
    return found[::-1]


def describe_last_attempt(made: Sequence[Attempt]) -> str:
    """The last attempt: ``attempt 3, from step 10: its process was killed``; empty: there is at most one."""
    if len(made) < 2:
        return ""
    last = made[-1]
    return f"attempt {len(made)}, from step {last.step}{f': {last.cause}' if last.cause else ''}"


def record_attempt(
    directory: Path, step: int, code_digest: str, cause: str = "", kind: str = "", reached: int = 0
) -> None:  # fmt: skip
    """Records that this process starts an attempt."""
    attempt = Attempt(
        time=time.time(), host=socket.gethostname(), pid=os.getpid(), step=step, code_digest=code_digest, cause=cause,
        kind=kind, reached=reached,
    )  # fmt: skip
    append_jsonl(directory / FILE, asdict(attempt), flush=False)
