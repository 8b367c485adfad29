"""What of a sweep may run at once: the CPUs and GPUs of this machine, and those of a cluster that is joined.

``flows/stages/admission.py`` has the last word on this machine, where other runs are too. This keeps a sweep from
asking it for everything at once: what is asked first is then what comes first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from flows.planning.needs import asks, runs_elsewhere
from flows.planning.plan import PlannedStage
from flows.stages.admission import count_cpus, visible_gpus
from flows.stages.cluster_capacity import ask_cluster
from lineage.errors import ConfigError

_ASK_SECONDS = 120.0


@dataclass
class _Pool:
    """Where workers run; None: without bound."""

    cpus: float | None
    gpus: float | None
    used_cpus: float = 0.0
    used_gpus: float = 0.0

    def asked(self, planned: PlannedStage) -> tuple[float, float]:
        """Who asks for more than there is waits for all of it."""
        cpus, gpus = asks(planned)
        return min(cpus, self.cpus or cpus), min(gpus, gpus if self.gpus is None else self.gpus)

    def has_room(self, planned: PlannedStage) -> bool:
        cpus, gpus = self.asked(planned)
        enough_cpus = self.cpus is None or self.used_cpus + cpus <= self.cpus
        return enough_cpus and (self.gpus is None or self.used_gpus + gpus <= self.gpus)


class Room:
    """Counts what the stages of a sweep take."""

    def __init__(self, here: tuple[float, float], cluster: tuple[float, float] | None = None) -> None:
        self._here = _Pool(*here)
        self._cluster = _Pool(*(cluster or (None, None)))

    def place(self, planned: PlannedStage) -> Literal["here", "cluster"]:
        """Where a stage runs: what is full there keeps nothing from running elsewhere."""
        return "cluster" if runs_elsewhere(planned) else "here"

    def take(self, planned: PlannedStage) -> bool:
        """Whether there is room for a stage, which then has it."""
        pool = self._pool(planned)
        if not pool.has_room(planned):
            return False
        cpus, gpus = pool.asked(planned)
        pool.used_cpus, pool.used_gpus = pool.used_cpus + cpus, pool.used_gpus + gpus
        return True

    def give_back(self, planned: PlannedStage) -> None:
        pool = self._pool(planned)
        cpus, gpus = pool.asked(planned)
        pool.used_cpus, pool.used_gpus = pool.used_cpus - cpus, pool.used_gpus - gpus

    def times(self, planned: PlannedStage) -> int:
        """How often a stage has room at once, with nothing else there."""
        pool = self._pool(planned)
        cpus, gpus = pool.asked(planned)
        counts = [
            int(total // asked)
            for total, asked in ((pool.cpus, cpus), (pool.gpus, gpus))
            if total is not None and asked
        ]
        return max(1, min(counts, default=1))

    def _pool(self, planned: PlannedStage) -> _Pool:
        return self._cluster if self.place(planned) == "cluster" else self._here


def make_room(stages: Sequence[PlannedStage], parallel: int | None) -> Room:
    """The room for a sweep of such stages.

    Args:
        parallel: trials at once; where it is stated, a cluster that grows with what is asked of it is not asked.

    Raises:
        ConfigError: there is no cluster at ``RAY_ADDRESS``.
    """
    here = float(count_cpus()), float(len(visible_gpus()))
    if parallel is not None or not any(map(runs_elsewhere, stages)):
        return Room(here)
    return Room(here, _cluster())


def _cluster() -> tuple[float, float]:
    """CPUs and GPUs of the cluster at ``RAY_ADDRESS``."""
    try:
        return ask_cluster(_ASK_SECONDS)
    except ConfigError as error:
        raise ConfigError(
            f"the cluster does not say what it holds ({error}); "
            "or state sweep.parallel, how many trials may be under way at once"
        ) from error
