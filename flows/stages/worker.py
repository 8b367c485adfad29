"""A worker of a stage: sets up what execution decides, then runs the method."""

import contextlib
import logging
import os
import sys
import time

from flows.stages.job import Job
from lineage.disk import explain_full_disk
from lineage.errors import ArtifactError
from lineage.files import append_jsonl
from tasks.check_rows import POLICY
from tasks.context import Metrics, TrainContext
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
    start = time.perf_counter()
    with explain_full_disk(job.directory), contextlib.ExitStack() as stack:
        heartbeat = None
        if job.method.trains:
            minutes = job.resources.hang_minutes
            heartbeat = HeartbeatFile(job.entry.work, rank, 60 * minutes if minutes else None)
            stack.callback(heartbeat.end)
        context = context_of(job, rank, world_size, heartbeat)
        context.mark(None, Phase.FETCHING)
        inputs = job.resolve_inputs()
        context.mark(None, Phase.LOADING)
        if isinstance(job.method, Training) and POLICY in inputs and rank == 0:
            model, _ = base_and_adapters(inputs[POLICY].path)
            require_disk(job.stage, job.method, job.resources, model, job.entry)
        metrics = job.method.run(inputs, context)
    logger.info("stage=%s rank=%s state=done seconds=%.1f", job.stage, rank, time.perf_counter() - start)
    return metrics


def context_of(job: Job, rank: int = 0, world_size: int = 1, heartbeat: HeartbeatFile | None = None) -> TrainContext:
    """The method's view of the job."""

    def report(step: int, metrics: Metrics) -> None:
        """Appends a line to ``metrics.jsonl``; also where a worker ends that outlived its driver and its lock."""
        if heartbeat:
            heartbeat.mark(step, Phase.BETWEEN)
        if rank == 0:
            job.require_lease()
            record = {"step": step, "time": time.time(), "metrics": dict(metrics)}
            append_jsonl(job.entry.metrics, record, flush=False)

    entry = job.entry
    return TrainContext(
        output_dir=entry.output, work_dir=entry.work, resources=job.resources, rank=rank, world_size=world_size,
        report=report, cache_dir=job.cache, checkpoint_dir=entry.checkpoints.directory,
        require_lease=job.require_lease, resume_from=job.resume_from, should_stop=job.is_asked_to_stop,
        **({"mark": heartbeat.mark} if heartbeat else {}),
    )  # fmt: skip


def pin_threads(count: int) -> None:
    """Fixes the threads of every library: sums over other splits differ in their last bits."""
    os.environ["OMP_NUM_THREADS"] = os.environ["RAYON_NUM_THREADS"] = str(count)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if count > 1 else "false"
    if "torch" in sys.modules:  # else it will read the variables: a stage that only reads rows needs no torch
        import torch

        torch.set_num_threads(count)
