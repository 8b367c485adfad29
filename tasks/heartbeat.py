"""Heartbeats of the workers of a training, ``work/alive/rank-R.json``: the step and phase of each."""

import faulthandler
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

_DUMP_AT = 0.9  # of the time after which a worker counts as hung: it writes its stacks before it is killed


class Phase(StrEnum):
    """The phase of a worker."""

    FETCHING = "fetching its inputs"  # models from a hub: takes as long as it takes, and times out by itself
    LOADING = "loading"  # model, rows, checkpoint; meets the other workers
    BETWEEN = "between steps"  # reports, measures, fetches rows
    STEPPING = "in a step"
    SAVING = "saving"  # writes and digests, or waits for the worker that does: takes as long as it takes
    DONE = "after its last step"  # merges, writes the output: takes as long as it takes


UNWATCHED = (Phase.FETCHING, Phase.SAVING, Phase.DONE)


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """One heartbeat.

    Args:
        time: in seconds since the epoch, by the clock of its host.
        step: optimizer steps that are done; None: training has not begun.
        doing: its phase, under the name that the file has for it.
    """

    rank: int
    host: str
    time: float
    step: int | None
    doing: Phase


class HeartbeatFile:
    """Sends the heartbeats of one worker; a worker without progress writes the stacks of its threads beside them.

    Args:
        seconds: without progress, after which it counts as hung; None: never.
    """

    def __init__(self, work_dir: Path, rank: int, seconds: float | None) -> None:
        self._folder, self._rank, self._seconds = _folder(work_dir), rank, seconds
        self._step: int | None = None
        self._folder.mkdir(parents=True, exist_ok=True)
        self._stacks = (self._folder / f"rank-{rank}.stack").open("w") if seconds else None

    def mark(self, step: int | None, phase: Phase) -> None:
        """Sends a heartbeat: one small file, replaced."""
        self._step = step
        beat = Heartbeat(rank=self._rank, host=socket.gethostname(), time=time.time(), step=step, doing=phase)
        draft = self._folder / f".rank-{self._rank}.tmp"
        draft.write_text(json.dumps(asdict(beat)))
        draft.replace(self._folder / f"rank-{self._rank}.json")
        if self._stacks and self._seconds:
            faulthandler.cancel_dump_traceback_later()
            if phase not in UNWATCHED:
                faulthandler.dump_traceback_later(_DUMP_AT * self._seconds, file=self._stacks)

    def end(self) -> None:
        """Sends the last heartbeat."""
        self.mark(self._step, Phase.DONE)
        if self._stacks:
            self._stacks.close()
            self._stacks = None


def heartbeats(work_dir: Path) -> Iterator[Heartbeat]:
    """The last heartbeat of every worker that has started."""
    for path in sorted(_folder(work_dir).glob("rank-*.json")):
        fields = json.loads(path.read_text())
        yield Heartbeat(**{**fields, "doing": Phase(fields["doing"])})


def stacks(work_dir: Path, rank: int) -> str:
    """All that a worker wrote of its threads when it made no progress."""
    path = _folder(work_dir) / f"rank-{rank}.stack"
    return path.read_text() if path.exists() else ""


def _folder(work_dir: Path) -> Path:
    return work_dir / "alive"
