"""The inside of a worker: sets up what execution decides, then runs the method."""

import json
import logging
import os
import shutil
import sys
import time
from pathlib import Path

from flows.stages.job import CheckJob, Job
from lineage.errors import ArtifactError
from lineage.store import CACHE, Entry
from tasks.context import Metrics, Report, TrainContext
from tasks.method import Training

logger = logging.getLogger(__name__)


def run_worker(job: Job, rank: int = 0, world_size: int = 1) -> Metrics:
    """Runs a job's method as one of ``world_size`` workers.

    Raises:
        ArtifactError: this worker does not see the store.
    """
    if not job.directory.is_dir():
        raise ArtifactError(
            f"rank {rank} does not see {job.directory}: the workers of a cluster write to the store themselves; "
            "give a `store` that every node mounts"
        )
    pin_threads(job.resources.cpus_per_worker)
    context = _context(job, rank, world_size)
    start = time.perf_counter()
    metrics = job.method.run(job.resolve_inputs(), context)
    logger.info("stage=%s rank=%s state=done seconds=%.1f", job.stage, rank, time.perf_counter() - start)
    return metrics


def run_check(job: CheckJob) -> Metrics:
    """Looks at the rows of a stage that is yet to be trained."""
    from tasks.check_rows import check_rows, leaked, rows_slot

    pin_threads(job.resources.cpus_per_worker)
    context, inputs = _context(job), job.resolve_inputs()
    assert isinstance(job.method, Training)
    check_rows(
        job.method, inputs, context, stage=job.stage, chat_template=job.chat_template,
        previous_percent=job.previous_percent,
    )  # fmt: skip
    found = leaked(inputs[rows_slot(job.method)], job.held_out, context)
    if found is None:
        return {"leaked_rows": 0}
    import pyarrow.parquet as pq

    shutil.copyfile(found, job.leakage)
    return {"leaked_rows": pq.read_metadata(found).num_rows}


def _context(job: Job, rank: int = 0, world_size: int = 1) -> TrainContext:
    return TrainContext(
        output_dir=job.directory / "output",
        work_dir=job.directory / "work",
        resources=job.resources,
        rank=rank,
        world_size=world_size,
        report=_reporter(job.directory / "metrics.jsonl", rank),
        cache_dir=job.directory.parents[1] / CACHE,
        checkpoint_dir=Entry(job.directory).checkpoints.directory,
        resume_from=job.resume_from,
        should_stop=job.stop_file.exists,
    )


def pin_threads(count: int) -> None:
    """Fixes the threads of every library: sums over other splits differ in their last bits."""
    os.environ["OMP_NUM_THREADS"] = os.environ["RAYON_NUM_THREADS"] = str(count)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if count > 1 else "false"
    if "torch" in sys.modules:  # else it will read the variables: a stage that only reads rows needs no torch
        import torch

        torch.set_num_threads(count)


def _reporter(path: Path, rank: int) -> Report:
    """Appends one JSON object per report to the stage's ``metrics.jsonl``: on rank 0 alone."""

    def record(step: int, metrics: Metrics) -> None:
        if rank == 0:
            line = json.dumps({"step": step, "time": time.time(), "metrics": dict(metrics)})
            with path.open("a") as file:
                file.write(line + "\n")

    return record
