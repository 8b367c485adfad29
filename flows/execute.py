"""One stage, from its lock to its manifest."""

import os
import time
from dataclasses import asdict, dataclass
from functools import partial

from flows.admission import admitted
from flows.board import Board
from flows.job import Job, JobInput
from flows.launch import StageProcesses
from flows.plan import Plan, PlannedInput, PlannedStage
from lineage.digest import digest_files, digest_of
from lineage.errors import PipelineError, StageError, StoppedError
from lineage.lease import Lease, acquire_or
from lineage.manifest import InputRecord, Manifest, provenance
from lineage.store import Entry
from tasks.method import Training


@dataclass(frozen=True, kw_only=True)
class Result:
    """What became of one stage in this run."""

    manifest: Manifest
    seconds: float  # of this run; 0 where nothing was done


def execute(plan: Plan, planned: PlannedStage, processes: StageProcesses, board: Board) -> Result:
    """Makes one stage's artifact, or waits for another run that is making it.

    Raises:
        PipelineError: the stage failed; nothing is committed.
    """
    try:
        return _execute(plan, planned, processes, board)
    except StoppedError:
        raise
    except PipelineError as error:
        board.failed(planned.name, str(error))
        raise
    except OSError as error:  # of the store: full, read-only, gone
        board.failed(planned.name, str(error))
        raise StageError(planned.name, f"the store: {error}", str(plan.entry(planned).logs)) from error


def _execute(plan: Plan, planned: PlannedStage, processes: StageProcesses, board: Board) -> Result:
    entry = plan.entry(planned)
    lease = Lease(entry.path)
    finished = partial(planned.is_finished, entry)
    if not acquire_or(lease, finished, partial(_waiting, planned, "another run that makes it", processes, board)):
        return _reused(planned, entry, board)
    with lease.holding():
        if finished():  # by a run that ended between the look and the lock
            return _reused(planned, entry, board)
        entry.begin()
        manifest, seconds = _make(plan, planned, entry, processes, board)
        entry.commit(manifest, lease)
    board.done(planned.name, seconds, manifest.metrics)
    return Result(manifest=manifest, seconds=seconds)


def _waiting(planned: PlannedStage, reason: str, processes: StageProcesses, board: Board) -> None:
    processes.raise_if_stopped()
    board.waiting(planned.name, reason)


def needs(planned: PlannedStage) -> tuple[int, int]:
    """CPUs and GPUs of this machine that a stage takes; a cluster elsewhere admits its own work."""
    method, resources = planned.stage.method, planned.stage.resources
    if method.trains and resources.on_cluster and os.environ.get("RAY_ADDRESS"):
        return 0, 0
    workers = resources.num_workers if method.trains else 1
    return workers * resources.cpus_per_worker, workers * resources.gpus_per_worker if method.uses_gpu else 0


def _reused(planned: PlannedStage, entry: Entry, board: Board) -> Result:
    manifest = entry.manifest()
    assert manifest is not None
    board.reused(planned.name)
    return Result(manifest=manifest, seconds=0.0)


def _make(
    plan: Plan, planned: PlannedStage, entry: Entry, processes: StageProcesses, board: Board
) -> tuple[Manifest, float]:
    resources = planned.stage.resources
    method = planned.stage.method
    cpus, gpus = needs(planned)
    room = f"{cpus} CPUs" + (f" and {gpus} GPUs" if gpus else "")
    with admitted(cpus, gpus, partial(_waiting, planned, room, processes, board)) as visible_gpus:
        board.running(planned.name, entry.metrics, method.num_steps if isinstance(method, Training) else None)
        start = time.time()
        job = Job(
            stage=planned.name, method=method, resources=resources, directory=entry.path, visible_gpus=visible_gpus,
            inputs={slot: _job_input(plan, planned, slot, given) for slot, given in planned.inputs.items()},
        )  # fmt: skip
        metrics = processes.run(job)
        end = time.time()
    files = digest_files(entry.output)
    if not files:
        raise StageError(planned.name, "it ended without writing any output", str(job.log))
    seed = asdict(method).get("seed")
    return Manifest(
        pipeline=plan.pipeline.name,
        stage=planned.name,
        method=f"{type(method).__module__}.{type(method).__qualname__}",
        recipe=dict(method.recipe()),
        fingerprint=planned.fingerprint,
        inputs={slot: _record(plan, given) for slot, given in planned.inputs.items()},
        files=files,
        output_digest=digest_of(files),
        metrics=dict(metrics),
        provenance=provenance(
            start=start, end=end, code_digest=planned.code_digest, seed=seed, resources=asdict(resources)
        ),
    ), end - start


def _job_input(plan: Plan, planned: PlannedStage, slot: str, given: PlannedInput) -> JobInput:
    consumes = planned.stage.method.consumes
    kind = consumes[slot] if slot in consumes else consumes["*"]
    return JobInput(
        name=given.name, kind=kind, fingerprint=given.fingerprint, path=plan.path_of(given), source=given.source
    )


def _record(plan: Plan, given: PlannedInput) -> InputRecord:
    digest = None
    if given.source is None:
        manifest = plan.entry(plan.stage(given.name)).manifest()
        digest = manifest.output_digest if manifest else None
    return InputRecord(artifact=given.name, fingerprint=given.fingerprint, digest=digest)
