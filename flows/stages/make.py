"""Makes one stage's artifact, and says what it is: from its job to its manifest."""

import time
from collections.abc import Mapping
from dataclasses import asdict

from flows.planning.plan import Plan, PlannedStage
from flows.stages.attempts import run_attempts, workers_hardware
from flows.stages.given import input_records, job_inputs, require_unchanged_sources
from flows.stages.job import Job
from flows.stages.run import Run
from lineage.attempts import attempts, changed_at, earlier_codes, resumed_at
from lineage.certificates.files import certified
from lineage.checkpoints import Checkpoint
from lineage.digest import digest_files, digest_of
from lineage.errors import StageError
from lineage.manifest import Manifest, Provenance, provenance
from lineage.store import Entry
from lineage.tracker import RunIds, StageStart, StageTracker
from tasks.context import Metrics


def stage_start(
    run: Run, planned: PlannedStage, entry: Entry, parents: Mapping[str, Manifest], *, resumes: bool
) -> StageStart:
    """What is known of a stage before it runs, for its record."""
    method = planned.stage.method
    return StageStart(
        stage=planned.name, method=f"{type(method).__module__}.{type(method).__qualname__}",
        produces=method.produces, fingerprint=planned.fingerprint,
        recipe=method.recipe(), inputs=input_records(planned, parents), directory=entry.path, parents=parents,
        title=run.title(planned), resumes=resumes,
    )  # fmt: skip


def make(
    run: Run,
    planned: PlannedStage,
    start: StageStart,
    checkpoint: Checkpoint | None,
    tracked: StageTracker,
    visible_gpus: tuple[str, ...],
    token: str,
) -> Manifest:
    """Runs a stage to its end, and describes what it made.

    Args:
        checkpoint: that it goes on from; None: from the beginning.
        visible_gpus: that it was admitted to.
        token: of the lock under which it is made.

    Raises:
        PipelineError: it failed, made nothing, or a source changed meanwhile.
    """
    entry, method, resources = run.plan.entry(planned), planned.stage.method, planned.stage.resources
    run.observer.running(run.title(planned), entry.metrics, run.checks.num_steps(planned, method))
    begin = time.time()
    job = Job(
        stage=planned.name, method=method, resources=resources, directory=entry.path, visible_gpus=visible_gpus,
        inputs=job_inputs(run.plan, planned, start.parents), token=token,
    )  # fmt: skip
    metrics = run_attempts(planned, entry, job, checkpoint, run.processes.run, run.observer.announce)
    tried = attempts(entry.path)
    made_by = provenance(
        start=begin, end=time.time(), code_digest=planned.code_digest, seed=asdict(method).get("seed"),
        resources=asdict(resources), hardware=workers_hardware(planned), resumed_at=resumed_at(tried),
        changed_at=changed_at(tried), earlier_code_digests=earlier_codes(tried, None, planned.code_digest),
    )  # fmt: skip
    require_unchanged_sources(run.plan, planned)  # nor while it was read
    files = digest_files(entry.output)
    if not files:
        raise StageError(planned.name, "it ended without writing any output", str(job.log))
    store = run.plan.pipeline.store
    return certified(_manifest(run.plan, start, tracked.run_ids(), files, metrics, made_by), start.parents, store)


def _manifest(
    plan: Plan, start: StageStart, run_ids: RunIds, files: Mapping[str, str], metrics: Metrics, made_by: Provenance
) -> Manifest:
    return Manifest(
        pipeline=plan.pipeline.name,
        stage=start.stage,
        method=start.method,
        recipe=dict(start.recipe),
        fingerprint=start.fingerprint,
        inputs=dict(start.inputs),
        files=dict(files),
        output_digest=digest_of(files),
        metrics=dict(metrics),
        provenance=made_by,
        produces=start.produces,
        mlflow_run_id=run_ids.stage,
        execution_run_id=run_ids.execution,
        parent_run_ids=list(run_ids.parents),
    )


def kept_checkpoints(planned: PlannedStage, entry: Entry) -> list[int]:
    """The steps of the checkpoints that stay when the stage is finished."""
    keep_best = planned.stage.resources.keep_best
    return [each.step for each in keep_best.best(entry.checkpoints.records(), keep_best.n)] if keep_best else []
