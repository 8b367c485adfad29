"""One stage, from its lock to its manifest."""

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial

from flows.planning.needs import needs, pool_of
from flows.planning.plan import Plan, PlannedStage
from flows.progress.observer import Observer
from flows.stages.admission import admitted
from flows.stages.attempts import begin, goes_on, run_attempts
from flows.stages.data_checks import DataChecks
from flows.stages.given import given_as_planned, input_records, job_inputs, require_unchanged_sources
from flows.stages.job import Job
from flows.stages.launch import StageProcesses
from flows.wording import counted
from lineage.attempts import attempts
from lineage.certificate import certified
from lineage.checkpoints import Checkpoint
from lineage.digest import digest_files, digest_of
from lineage.disk import full_disk_named
from lineage.errors import ArtifactError, PipelineError, PrunedError, StageError, StoppedError
from lineage.lease import Lease, acquire_or
from lineage.manifest import Manifest, provenance
from lineage.store import Entry
from lineage.tracker import StageStart, StageTracker, Tracker
from tasks.method import Method, Training


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a plan: what its stages share.

    Args:
        titles: stage -> what its observer is told that it is called, where not by its name.
    """

    plan: Plan
    processes: StageProcesses
    observer: Observer
    tracker: Tracker
    titles: Mapping[str, str] = field(default_factory=dict)
    checks: DataChecks = field(default_factory=DataChecks)

    def title(self, planned: PlannedStage) -> str:
        return self.titles.get(planned.name, planned.name)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What became of one stage in this run."""

    manifest: Manifest
    seconds: float  # of this run; 0 where nothing was done


def execute(run: Run, planned: PlannedStage) -> Result:
    """Makes one stage's artifact, or waits for another run that is making it.

    Raises:
        PipelineError: the stage failed; nothing is committed.
    """
    try:
        with full_disk_named(run.plan.entry(planned).path):
            return _execute(run, planned)
    except StoppedError:
        raise
    except PrunedError as error:
        run.observer.pruned(run.title(planned), str(error))
        raise
    except PipelineError as error:
        run.observer.failed(run.title(planned), str(error))
        raise
    except OSError as error:  # of the store: read-only, gone
        run.observer.failed(run.title(planned), str(error))
        raise StageError(planned.name, f"the store: {error}", str(run.plan.entry(planned).logs)) from error


def _execute(run: Run, planned: PlannedStage) -> Result:
    entry = run.plan.entry(planned)
    lease = Lease(entry.path)
    finished = partial(planned.is_finished, entry)
    if not acquire_or(lease, finished, partial(_waiting, run, planned, "another run that makes it")):
        return _reused(run, planned, entry)
    with lease.holding(lambda why: run.processes.end(entry.path, ArtifactError(why))):
        entry.fence()
        if finished():  # by a run that ended between the look and the lock
            return _reused(run, planned, entry)
        parents = given_as_planned(run.plan, planned)
        resumes = goes_on(planned, entry)
        checkpoint = begin(planned, entry)
        run.checks.require(run.plan, planned, run.processes, partial(_waiting, run, planned), run.observer.announce)
        start = _stage_start(run, planned, entry, parents, resumes=resumes)
        manifest, seconds = _tracked(run, planned, entry, start, checkpoint, lease)
    run.observer.done(run.title(planned), seconds, manifest.metrics)
    if "diverged_at_step" in manifest.metrics:
        at, best = (int(manifest.metrics[name]) for name in ("diverged_at_step", "best_step"))
        run.observer.announce(f"{run.title(planned)}: DIVERGED at step {at}; its output is its model of step {best}")
    return Result(manifest=manifest, seconds=seconds)


def _waiting(run: Run, planned: PlannedStage, reason: str) -> None:
    run.processes.raise_if_stopped()
    run.observer.waiting(run.title(planned), reason)


def _reused(run: Run, planned: PlannedStage, entry: Entry) -> Result:
    manifest = entry.manifest()
    assert manifest is not None
    run.tracker.reused(run.title(planned), manifest)
    run.observer.reused(run.title(planned))
    return Result(manifest=manifest, seconds=0.0)


def _tracked(
    run: Run, planned: PlannedStage, entry: Entry, start: StageStart, checkpoint: Checkpoint | None, lease: Lease
) -> tuple[Manifest, float]:
    """Makes and commits the artifact, with its record in the tracker from the first step to the last."""
    with _admitted(run, planned) as visible_gpus:
        tracked = run.tracker.stage(start)
        try:
            manifest, seconds = _make(
                run, planned, entry, start.parents, checkpoint, tracked, visible_gpus, lease.token
            )
            manifest = certified(manifest, start.parents, run.plan.pipeline.store)
            entry.commit(manifest, lease, _kept(planned, entry))
        except BaseException as error:
            tracked.failed(error)
            raise
    tracked.finished(manifest)
    return manifest, seconds


@contextlib.contextmanager
def _admitted(run: Run, planned: PlannedStage) -> Iterator[tuple[str, ...]]:
    """Waits for the CPUs and GPUs that a stage takes, and holds them."""
    cpus, gpus = needs(planned)
    room = counted(cpus, "CPU") + (f" and {counted(gpus, 'GPU')}" if gpus else "")
    with _in_pool(run, planned), admitted(cpus, gpus, partial(_waiting, run, planned, room)) as visible_gpus:
        yield visible_gpus


def _in_pool(run: Run, planned: PlannedStage) -> contextlib.AbstractContextManager[None]:
    """The wait for a pool is long: it comes before that for the machine, which would stand idle meanwhile."""
    drawn = pool_of(planned)
    if drawn is None:
        return contextlib.nullcontext()
    from flows.stages.gpu_pool import pool_slots  # imports prefect

    pool, slots = drawn
    return pool_slots(pool, slots, partial(_waiting, run, planned, f"{slots} of the GPU pool {pool}"))


def _stage_start(
    run: Run, planned: PlannedStage, entry: Entry, parents: Mapping[str, Manifest], *, resumes: bool
) -> StageStart:
    method = planned.stage.method
    return StageStart(
        stage=planned.name, method=_class_name(method), produces=method.produces, fingerprint=planned.fingerprint,
        recipe=method.recipe(), inputs=input_records(planned, parents), directory=entry.path, parents=parents,
        title=run.title(planned), resumes=resumes,
    )  # fmt: skip


def _make(
    run: Run,
    planned: PlannedStage,
    entry: Entry,
    parents: Mapping[str, Manifest],
    checkpoint: Checkpoint | None,
    tracked: StageTracker,
    visible_gpus: tuple[str, ...],
    token: str,
) -> tuple[Manifest, float]:
    resources = planned.stage.resources
    method = planned.stage.method
    run.observer.running(run.title(planned), entry.metrics, method.num_steps if isinstance(method, Training) else None)
    start = time.time()
    job = Job(
        stage=planned.name, method=method, resources=resources, directory=entry.path, visible_gpus=visible_gpus,
        inputs=job_inputs(run.plan, planned, parents), token=token,
    )  # fmt: skip
    metrics = run_attempts(planned, entry, job, checkpoint, run.processes.run, run.observer.announce)
    end = time.time()
    require_unchanged_sources(run.plan, planned)  # nor while it was read
    files = digest_files(entry.output)
    if not files:
        raise StageError(planned.name, "it ended without writing any output", str(job.log))
    run_ids = tracked.run_ids()
    return Manifest(
        pipeline=run.plan.pipeline.name,
        stage=planned.name,
        method=_class_name(method),
        recipe=dict(method.recipe()),
        fingerprint=planned.fingerprint,
        inputs=input_records(planned, parents),
        files=files,
        output_digest=digest_of(files),
        metrics=dict(metrics),
        provenance=provenance(
            start=start, end=end, code_digest=planned.code_digest, seed=asdict(method).get("seed"),
            resources=asdict(resources), resumed_at=[each.step for each in attempts(entry.path) if each.step],
        ),
        produces=method.produces,
        mlflow_run_id=run_ids.stage,
        execution_run_id=run_ids.execution,
        parent_run_ids=list(run_ids.parents),
    ), end - start  # fmt: skip


def _kept(planned: PlannedStage, entry: Entry) -> list[int]:
    """The steps of the checkpoints that stay when the stage is finished."""
    keep_best = planned.stage.resources.keep_best
    return [each.step for each in keep_best.best(entry.checkpoints.records(), keep_best.n)] if keep_best else []


def _class_name(method: Method) -> str:
    return f"{type(method).__module__}.{type(method).__qualname__}"
