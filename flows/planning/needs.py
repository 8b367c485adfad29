"""What of machines a stage takes: CPUs and GPUs of this one, slots of a pool."""

import os

from flows.planning.plan import PlannedStage


def needs(planned: PlannedStage) -> tuple[int, int]:
    """CPUs and GPUs of this machine that a stage takes; a cluster elsewhere admits its own work."""
    return (0, 0) if runs_elsewhere(planned) else asks(planned)


def runs_elsewhere(planned: PlannedStage) -> bool:
    """Whether its workers are on a cluster that is not started here."""
    stage = planned.stage
    return stage.method.trains and stage.resources.on_cluster and bool(os.environ.get("RAY_ADDRESS"))


def asks(planned: PlannedStage) -> tuple[int, int]:
    """CPUs and GPUs that the workers of a stage take, wherever they are."""
    method, resources = planned.stage.method, planned.stage.resources
    workers = resources.num_workers if method.trains else 1
    return workers * resources.cpus_per_worker, workers * resources.gpus_per_worker if method.uses_gpu else 0


def pool_of(planned: PlannedStage) -> tuple[str, int] | None:
    """The GPU pool that a stage draws on and how many slots of it: one too where it runs on CPUs."""
    pool = planned.stage.resources.gpu_pool
    return (pool, max(1, asks(planned)[1])) if pool and planned.stage.method.uses_gpu else None
