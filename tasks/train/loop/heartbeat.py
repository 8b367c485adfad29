"""Heartbeats of the workers of a training, ``work/alive/rank-R.json``: the step and phase of each."""

import contextlib
import faulthandler
import json
import socket
import time
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from lineage.filesystem.files import atomic_write

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
        phase: what it does now.
        node: address and id of its node, where it is on a cluster that was joined.
        gpu: the model of its GPU; empty: it has none.
    """

    rank: int
    host: str
    time: float
    step: int | None
    phase: Phase
    node: str = ""
    gpu: str = ""

    @property
    def where(self) -> str:
        """Its host and node, for messages."""
        return f"{self.host} ({self.node})" if self.node else self.host


class HeartbeatFile:
    """Sends the heartbeats of one worker; a worker without progress writes the stacks of its threads beside them.

    Args:
        seconds: without progress, after which it counts as hung; None: never.
        node, gpu: as in ``Heartbeat``.
    """

    def __init__(self, work_dir: Path, rank: int, seconds: float | None, node: str = "", gpu: str = "") -> None:
        self._path, self._rank, self._seconds = work_dir / "alive" / f"rank-{rank}.json", rank, seconds
        self._node, self._gpu = node, gpu
        self._step: int | None = None
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._stacks = self._path.with_suffix(".stack").open("w")

    def mark(self, step: int | None, phase: Phase) -> None:
        """Sends a heartbeat: one small file, replaced."""
        self._step = step
        beat = Heartbeat(
            rank=self._rank, host=socket.gethostname(), time=time.time(), step=step, phase=phase, node=self._node,
            gpu=self._gpu,
        )  # fmt: skip
        atomic_write(self._path, json.dumps(asdict(beat)))
        faulthandler.cancel_dump_traceback_later()
        if self._seconds and phase not in UNWATCHED:
            faulthandler.dump_traceback_later(_DUMP_AT * self._seconds, file=self._stacks)

    def end(self) -> None:
        """Sends the last heartbeat."""
        self.mark(self._step, Phase.DONE)
        self._stacks.close()


def heartbeats(work_dir: Path) -> dict[int, Heartbeat]:
    """Rank -> last heartbeat, of every worker that has started; empty while the store is unreachable."""
    with contextlib.suppress(OSError, ValueError):
        found = [json.loads(path.read_text()) for path in (work_dir / "alive").glob("rank-*.json")]
        for fields in found:  # earlier versions wrote "doing"
            fields["phase"] = Phase(fields.pop("doing", None) or fields["phase"])
        return {fields["rank"]: Heartbeat(**fields) for fields in found}
    return {}


def stacks(work_dir: Path, rank: int) -> str:
    """All that a worker wrote of its threads when it made no progress; empty: nothing."""
    path = work_dir / "alive" / f"rank-{rank}.stack"
    return path.read_text() if path.exists() else ""
