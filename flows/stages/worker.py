"""The inside of a worker: sets up what execution decides, then runs the method."""

import json
import logging
import os
import shutil
import sys
import time
from dataclasses import replace

from flows.stages.job import CheckJob, Job
from lineage.disk import full_disk_named
from lineage.errors import ArtifactError
from lineage.store import Entry
from tasks.check_rows import POLICY
from tasks.context import Metrics, Report, TrainContext
from tasks.disk_need import require_disk
from tasks.heartbeat import HeartbeatFile, Phase
from tasks.method import Training
from tasks.train.adapter_files import base_and_adapters

logger = logging.getLogger(__name__)


def run_worker(job: Job, rank: int = 0, world_size: int = 1) -> Metrics:
    """Runs a job's method as one of ``world_size`` workers.

    Raises:
        ArtifactError: this worker does not see the store.
        PipelineError: the method's own, or the disk is full.
    """
    if not job.directory.is_dir():
        raise ArtifactError(
            f"rank {rank} does not see {job.directory}: the workers of a cluster write to the store themselves; "
            "give a `store` that every node mounts"
        )
    pin_threads(job.resources.cpus_per_worker)
    minutes = job.resources.hang_minutes
    start = time.perf_counter()
    with full_disk_named(job.directory):
        heartbeat = (
            HeartbeatFile(job.directory / "work", rank, 60 * minutes if minutes else None)
            if job.method.trains
            else None
        )
        context = _context(job, rank, world_size, heartbeat)
        try:
            context.mark(None, Phase.FETCHING)
            inputs = job.resolve_inputs()
            context.mark(None, Phase.LOADING)
            if isinstance(job.method, Training) and POLICY in inputs and rank == 0:
                model, _ = base_and_adapters(inputs[POLICY].path)
                require_disk(job.stage, job.method, job.resources, model, Entry(job.directory))
            metrics = job.method.run(inputs, context)
        finally:
            if heartbeat:
                heartbeat.end()
    logger.info("stage=%s rank=%s state=done seconds=%.1f", job.stage, rank, time.perf_counter() - start)
    return metrics


def run_check(job: CheckJob) -> Metrics:
    """Checks the rows of a stage that is yet to be trained, and counts the examples that they make."""
    from tasks.check_rows import EXAMPLES, check_rows, leaked, rows_slot

    pin_threads(job.resources.cpus_per_worker)
    context, inputs = _context(job), job.resolve_inputs()
    assert isinstance(job.method, Training)
    checked = check_rows(
        job.method, inputs, context, stage=job.stage, chat_template=job.chat_template,
        previous_percent=job.previous_percent,
    )  # fmt: skip
    examples = {EXAMPLES: checked[EXAMPLES]}
    found = leaked(inputs[rows_slot(job.method)], job.held_out, context)
    if found is None:
        return {"leaked_rows": 0, **examples}
    import pyarrow.parquet as pq

    shutil.copyfile(found, job.leakage)
    return {"leaked_rows": pq.read_metadata(found).num_rows, **examples}


def _context(job: Job, rank: int = 0, world_size: int = 1, heartbeat: HeartbeatFile | None = None) -> TrainContext:
    context = TrainContext(
        output_dir=job.directory / "output",
        work_dir=job.directory / "work",
        resources=job.resources,
        rank=rank,
        world_size=world_size,
        report=_reporter(job, rank, heartbeat),
        cache_dir=job.cache,
        checkpoint_dir=Entry(job.directory).checkpoints.directory,
        require_lease=job.require_lease,
        resume_from=job.resume_from,
        should_stop=job.is_asked_to_stop,
    )
    return replace(context, mark=heartbeat.mark) if heartbeat else context


def pin_threads(count: int) -> None:
    """Fixes the threads of every library: sums over other splits differ in their last bits."""
    os.environ["OMP_NUM_THREADS"] = os.environ["RAYON_NUM_THREADS"] = str(count)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if count > 1 else "false"
    if "torch" in sys.modules:  # else it will read the variables: a stage that only reads rows needs no torch
        import torch

        torch.set_num_threads(count)


def _reporter(job: Job, rank: int, heartbeat: HeartbeatFile | None) -> Report:
    """Appends one JSON object per report to the stage's ``metrics.jsonl``, on rank 0 alone.

    It is also where a worker ends that outlived its driver, once another one owns the lock.
    """
    path = job.directory / "metrics.jsonl"

    def record(step: int, metrics: Metrics) -> None:
        if heartbeat:
            heartbeat.mark(step, Phase.BETWEEN)
        if rank == 0:
            job.require_lease()
            line = json.dumps({"step": step, "time": time.time(), "metrics": dict(metrics)})
            with path.open("a") as file:
                file.write(line + "\n")

    return record
