"""One stage, from its lock to its manifest."""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from flows.planning.adapter_choice import capacity
from flows.planning.estimates import Estimate, Estimator, History
from flows.planning.plan import PlannedStage
from flows.progress.run_record import kill_left, runs_of
from flows.reports.wording import counted
from flows.stages.job import Job
from flows.stages.launch import saving_first
from flows.stages.resources import admitted, ask_cluster, count_cpus, pool_slots
from flows.stages.run import Run, input_records, inputs_as_planned, job_inputs, require_unchanged
from lineage.checkpoints import Checkpoint, Mirror, not_sent
from lineage.errors import ArtifactError, AskedError, ConfigError, LostError, ShortError, StageError
from lineage.filesystem.digest import digest_files, digest_of
from lineage.filesystem.disk import explain_full_disk
from lineage.filesystem.lock import Lock, acquire_or, owner
from lineage.record.attempts import (
    attempts,
    changed_at,
    describe_last_attempt,
    other_code_digests,
    record_attempt,
    resumed_at,
)
from lineage.record.certificate import certificate_of
from lineage.record.environment import current_signature, hardware, provenance_here
from lineage.record.metrics_file import last_step
from lineage.record.tracker import Event, StageStart, end_event
from lineage.secrets import first_line
from lineage.store import Entry, Manifest, Provenance
from tasks.context import Metrics, Resources
from tasks.data.preparing.options import Prepare
from tasks.data.preparing.report import REPORT, DataReport
from tasks.method import Training
from tasks.train.evaluation import failed_scores, failure_lines
from tasks.train.loop.heartbeat import heartbeats

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Result:
    """The outcome of one stage in this run."""

    manifest: Manifest
    seconds: float  # in this run; 0: nothing was done


def execute(run: Run, planned: PlannedStage) -> Result:
    """Produces one stage's artifact, or waits for another run that produces it.

    Raises:
        PipelineError: the stage failed; nothing is committed.
    """
    entry = run.plan.entry(planned)
    try:
        with explain_full_disk(entry.path):
            return _execute(run, planned, entry)
    except BaseException as error:
        run.emit(end_event(run.title(planned), error))
        if isinstance(error, OSError):  # of the store: read-only, gone
            raise StageError(planned.name, f"the store: {error}", str(entry.logs)) from error
        raise


def _execute(run: Run, planned: PlannedStage, entry: Entry) -> Result:
    lock = Lock(entry.path)
    finished = partial(planned.is_finished, entry)

    def waiting() -> None:
        busy = owner(entry.path)
        who = f" (process {busy.pid} on {busy.host})" if busy else ""
        run.wait(planned, f"another run that makes it{who}")

    if not acquire_or(lock, finished, waiting):
        return _report_end(run, planned, "reused", entry.manifest())
    with lock.holding():
        cause = settle_last_run(run.plan.home, entry)
        entry.fence()
        if finished():  # by a run that ended between the poll and the lock
            return _report_end(run, planned, "reused", entry.manifest())
        parents = inputs_as_planned(run.plan, planned)
        entry.open()
        run.checks.require(run, planned)
        method, before = planned.stage.method, attempts(entry.path)
        # Of the same code: then this attempt only resumes it, also from step 0.
        resumes = bool(before) and before[-1].code_digest == planned.code_digest and not planned.restart
        estimator = Estimator(run.plan, History.of(run.plan.home))
        predicted = estimator.estimate(planned)
        with _admitted(run, planned, predicted) as visible_gpus:
            require_unchanged(run.plan, planned)  # the wait may have been long
            mirror = mirror_of(planned, entry)
            if mirror:
                mirror.require_writable()
                if planned.restart:
                    mirror.keep(())
            checkpoint = None if planned.restart else last_intact(planned, entry)
            resources = fitting(planned, planned.resources, run.announce)
            begin(planned, entry, checkpoint, lock.require, cause, resources)
            job = Job(
                stage=planned.name, method=method, resources=resources, directory=entry.path,
                inputs=job_inputs(run.plan, planned, parents), visible_gpus=visible_gpus, token=lock.token,
                row_processes=planned.row_processes,
            )  # fmt: skip
            with saving_first(job):
                known = _known_at_start(run, planned, parents)
                start = StageStart(manifest=known, directory=entry.path, parents=parents, resumes=resumes)
                num_steps = run.checks.num_steps(planned, method)
                run.emit(Event(title=run.title(planned), state="running", start=start, num_steps=num_steps))
                manifest = _make(run, planned, start, job, checkpoint)
                estimator.record(planned, manifest, predicted)
                best = planned.stage.resources.keep_best
                kept = [each.step for each in best.best(entry.checkpoints.records(), best.n)] if best else []
                entry.commit(manifest, lock, kept)
                if mirror:
                    clear_mirror(mirror, kept, lambda line: run.announce(f"{run.title(planned)}: {line}"))
                return _report_end(run, planned, "done", manifest)


def _known_at_start(run: Run, planned: PlannedStage, parents: Mapping[str, Manifest]) -> Manifest:
    """The part of its manifest that is known at the start."""
    method = planned.stage.method
    return Manifest(
        pipeline=run.plan.pipeline.name, stage=planned.name,
        method=f"{type(method).__module__}.{type(method).__qualname__}", recipe=method.recipe(),
        fingerprint=planned.fingerprint, inputs=input_records(planned, parents), files={}, output_digest="",
        metrics={}, provenance=Provenance(start=time.time()), produces=method.produces,
    )  # fmt: skip


def _report_end(run: Run, planned: PlannedStage, state: Literal["reused", "done"], manifest: Manifest | None) -> Result:
    assert manifest is not None
    end = Event(title=run.title(planned), state=state, manifest=manifest)
    run.emit(end)
    notes = [*notes_on(planned.stage.method, manifest.metrics), *_unused(run, planned)] if state == "done" else []
    notes += failure_lines(manifest.failed_scores) if state == "done" else []
    for line in notes:
        run.announce(f"{run.title(planned)}: {line}")
    return Result(manifest=manifest, seconds=end.seconds)


def notes_on(method: object, metrics: Metrics) -> Iterator[str]:
    """What a training did in addition to its steps."""
    if "diverged_at_step" in metrics:
        at, best = (int(metrics[name]) for name in ("diverged_at_step", "best_step"))
        yield f"DIVERGED at step {at}; its output is its model of step {best}"
    if "weights_unchanged" in metrics:
        yield "UNCHANGED: no step moved a weight, so that its output is its start; see learning_rate and grad_norm"
    if metrics.get("completions/clipped_ratio") == 1:
        yield "CUT: no completion of the last steps ended within max_completion_length; see its log at step 1"
    if "ended_early_at_step" in metrics:
        step, reasons = int(metrics["ended_early_at_step"]), []
        for name, reason in (("validation", "val/loss no longer fell"), ("evaluation", "its score was no better")):
            if getattr(getattr(method, name, None), "patience", None):
                reasons.append(f"{reason} ({name}.patience)")
        yield f"ended early at step {step}: {' or '.join(reasons)}"
    if metrics.get("adaptive/interventions"):
        number = counted(int(metrics["adaptive/interventions"]), "intervention")
        yield f"{number} in its learning rate (schedule.adaptive), named in its log and manifest"


def _unused(run: Run, planned: PlannedStage) -> Iterator[str]:
    """The columns of its sources that a data stage has not read, and the rows that it could not use."""
    output = run.plan.entry(planned).output
    if isinstance(planned.stage.method, Prepare) and (output / REPORT).exists():
        for source in DataReport.read(output).sources.values():
            if source.left_out:
                yield f"not used of {source.path}: {source.left_out}"
            if source.unread:
                yield f"columns of {source.path} that are not read: {source.unread}"


@contextlib.contextmanager
def _admitted(run: Run, planned: PlannedStage, need: Estimate | None) -> Iterator[tuple[str, ...]]:
    """Waits for the CPUs and GPUs that a stage takes, and holds them."""
    cpus, gpus = cpus_for(planned, need), planned.needs[1]
    asked = counted(cpus, "CPU") + (f" and {counted(gpus, 'GPU')}" if gpus else "")
    with contextlib.ExitStack() as held:
        if planned.pool:  # before the machine, which would be idle during that longer wait
            pool, slots = planned.pool
            waiting = partial(run.wait, planned, f"{slots} of the GPU pool {pool}")
            held.enter_context(pool_slots(pool, slots, waiting))
        waiting = partial(run.wait_for_capacity, planned, asked)
        yield held.enter_context(admitted(cpus, gpus, waiting, run.user(planned)))


def cpus_for(planned: PlannedStage, need: Estimate | None) -> int:
    """The CPUs that a stage takes on this machine: no smaller share of them than of the memory.

    So stages run side by side only where they fit into memory together.

    Args:
        need: None: unknown.
    """
    cpus, gpus = planned.needs
    memory = 0 if gpus else capacity(planned.stage.resources)
    if need is None or not (cpus and memory):
        return cpus
    return max(cpus, min(count_cpus(), math.ceil(count_cpus() * (need.memory + need.shared) / memory)))


def _make(run: Run, planned: PlannedStage, start: StageStart, job: Job, checkpoint: Checkpoint | None) -> Manifest:
    """Runs a stage to its end, and describes its output.

    Args:
        checkpoint: that it resumes from; None: from step 0.

    Raises:
        PipelineError: it failed, wrote nothing, or a source changed meanwhile.
    """
    entry = run.plan.entry(planned)
    metrics = run_attempts(planned, entry, job, checkpoint, run.processes.run, run.announce)
    tried = attempts(entry.path)
    made_by = replace(
        provenance_here(start.manifest.provenance.start), end=time.time(), code_digest=planned.code_digest,
        nodes=nodes_used(entry),
        seed=asdict(job.method).get("seed"), resources=asdict(job.resources), hardware=workers_hardware(planned),
        kernels=planned.kernels, resumed_at=resumed_at(tried), changed_at=changed_at(tried),
        earlier_code_digests=other_code_digests(tried, None, planned.code_digest),
        because=run.plan.pipeline.because.get(planned.name, ""),
    )  # fmt: skip
    _require_known_inputs(run, planned, job)
    files = digest_files(entry.output)
    if not files:
        raise StageError(planned.name, "it ended without writing any output", str(entry.log))
    run_ids = run.tracker.run_ids(run.title(planned))
    manifest = replace(
        start.manifest, files=files, output_digest=digest_of(files), metrics=dict(metrics),
        provenance=made_by, mlflow_run_id=run_ids.stage, execution_run_id=run_ids.execution,
        parent_run_ids=list(run_ids.parents), failed_scores=failed_scores(entry.path),
    )  # fmt: skip
    return replace(manifest, certificate=certificate_of(manifest, start.parents, run.plan.pipeline.store))


def _require_known_inputs(run: Run, planned: PlannedStage, job: Job) -> None:
    """Requires that sources were not changed while they were read; a model that changed after it was loaded is named.

    Raises:
        StageError: it is unknown what the stage read.
    """
    loaded = job.loaded_models()
    for each in dict.fromkeys(job.changed_models(*sorted(loaded)).values()) if loaded else ():
        run.announce(
            f"{run.title(planned)}: {each} has changed since the stage loaded it; the manifest names the bytes that "
            "were loaded, and the next plan sees the new ones"
        )
    require_unchanged(run.plan, planned, code=False, loaded=loaded)


def begin(
    planned: PlannedStage, entry: Entry, checkpoint: Checkpoint | None, require_lease: Callable[[], None],
    cause: str = "", resources: Resources | None = None,
) -> None:  # fmt: skip
    """Prepares a stage's directory for an attempt; what was written after its checkpoint goes.

    Args:
        resources: of the attempt; None: those of the plan.
        checkpoint: that it resumes from; None: from step 0.
        require_lease: raises where the directory is another run's by now: the wait before may have been long.
        cause: what ended the attempt before, where that is known.

    Raises:
        ArtifactError: it is another run's.
    """
    require_lease()
    reached, step = last_step(entry.metrics), checkpoint.step if checkpoint else 0
    entry.begin(step)
    signature = current_signature(asdict(resources or planned.resources), workers_hardware(planned))
    record_attempt(entry.path, step, planned.code_digest, cause, signature, reached)
    if restart := describe_last_attempt(attempts(entry.path)):
        with entry.log.open("a") as log:
            log.write(f"--- {restart}\n")


def workers_hardware(planned: PlannedStage) -> dict[str, str]:
    """The processors that a stage's workers run on; empty: unknown, on the hosts of a cluster."""
    return {} if planned.runs_elsewhere else dict(hardware())


def nodes_used(entry: Entry) -> list[dict[str, object]]:
    """The nodes that the workers of the last attempt ran on, by their heartbeats."""
    beats = sorted(heartbeats(entry.work).values(), key=lambda beat: beat.rank)
    nodes = {(beat.host, beat.node): beat.gpu for beat in beats}
    return [
        {
            "host": host,
            "node": node,
            "workers": sum((each.host, each.node) == (host, node) for each in beats),
            "gpu": gpu,
        }
        for (host, node), gpu in nodes.items()
    ]


def fitting(planned: PlannedStage, resources: Resources, announce: Callable[[str], None]) -> Resources:
    """The resources of the next attempt: with ``min_workers`` as many workers as the nodes of its cluster hold.

    Args:
        resources: of the attempt before.
    """
    asked, method = planned.resources, planned.stage.method
    if not (planned.runs_elsewhere and asked.min_workers):
        return resources
    wanted = replace(resources, num_workers=asked.num_workers, num_nodes=asked.num_nodes, launcher=asked.launcher)
    try:
        cluster = ask_cluster()
    except ConfigError as error:  # the attempt says it too, and is tried again
        logger.warning("stage=%s cluster=unknown: %s", planned.name, error)
        return wanted
    batch, islands = (method.global_batch_size, method.num_islands) if isinstance(method, Training) else (None, 1)
    found = cluster.reduced(wanted, batch, islands)
    if found is None or (found.num_workers, found.num_nodes) == (wanted.num_workers, wanted.num_nodes):
        return wanted
    divides = f" and divide global_batch_size={batch}, which stays" if batch else ""
    divides += f", over {islands} islands" if islands > 1 else ""
    divides += f" (accumulation {found.accumulation_steps(batch)})" if batch else ""
    announce(
        f"{planned.name}: runs with {found.num_workers} of {wanted.num_workers} workers, on "
        f"{counted(found.num_nodes, 'node')}, the most that fit{divides}: the cluster has {cluster}"
    )
    return found


def run_attempts(
    planned: PlannedStage, entry: Entry, job: Job, checkpoint: Checkpoint | None, run: Callable[[Job], Metrics],
    announce: Callable[[str], None],
) -> Metrics:  # fmt: skip
    """Runs a stage, and resumes it from its last checkpoint each time that a worker is lost.

    That ends when it was lost more than ``max_failures`` times since it last committed a checkpoint. The loss of one
    that saved because it was asked to end is no failure, nor is one without memory, which gets smaller forward passes.

    Args:
        checkpoint: that the first attempt resumes from, which has begun; None: from step 0.
        job: as it would begin at step 0.
        run: starts it, and waits for its end.
        announce: reports to the listeners.

    Raises:
        LostError: once too often.
        PipelineError: it failed.
    """
    failures = 0
    while True:
        step = checkpoint.step if checkpoint else 0
        try:
            return run(replace(job, resume_from=entry.checkpoints.path(step) if checkpoint else None))
        except StageError as lost:
            lost.add(not_sent(entry.work))
            if not isinstance(lost, LostError):
                raise
            job.require_lease()  # else another run may be using the directory now
            checkpoint = last_intact(planned, entry)
            has_resumed = checkpoint is not None and checkpoint.step > step
            is_expected = isinstance(lost, ShortError) or (has_resumed and isinstance(lost, AskedError))
            failures = (0 if has_resumed else failures) + (not is_expected)
            if failures > job.resources.max_failures:
                raise
            notes: list[str] = []
            job = replace(job, resources=fitting(planned, job.resources, notes.append))
            begin(planned, entry, checkpoint, job.require_lease, lost.cause, job.resources)
            how = f"resumes from its checkpoint of step {checkpoint.step}" if checkpoint else "starts again from step 0"
            if isinstance(lost, ShortError):
                job = replace(job, most_rows=lost.rows)
                how += f" with micro_batch_size={lost.rows}"
            for line in (f"{lost}; it {how}", *notes):
                announce(line)


def last_intact(planned: PlannedStage, entry: Entry) -> Checkpoint | None:
    """The checkpoint that a stage can resume from, whose every byte was read; None: it has none.

    Raises:
        StageError: there are checkpoints and all are damaged: a restart loses their steps, so the user asks for it.
    """
    found, damaged = entry.checkpoints.newest_intact()
    if mirror := mirror_of(planned, entry):
        try:
            mirrored = adopted(mirror, entry, found.step if found else 0)
        except ConfigError as error:  # it was there when the stage started
            if found is None:
                raise
            mirrored = None
            logger.warning("stage=%s checkpoint=step-%d of the store: %s", planned.name, found.step, error)
        if mirrored:
            logger.warning("stage=%s checkpoint=step-%d from=%s", planned.name, mirrored.step, mirror.url)
            return mirrored
    if found is None and damaged:
        with entry.log.open("a") as log:
            log.writelines(f"--- checkpoint damaged: {damage}\n" for damage in damaged)
        first, more = damaged[0].removeprefix(f"{entry.checkpoints.directory}/"), len(damaged) - 1
        raise StageError(
            planned.name,
            f"none of its checkpoints is what was committed: {first}{f', and {more} more' if more else ''}; restore "
            f"the files, or lose their steps and start again with restart=[{planned.name}]",
            str(entry.log),
        )
    for damage in damaged:
        logger.warning("stage=%s checkpoint damaged: %s", planned.name, damage)
    return found


def mirror_of(planned: PlannedStage, entry: Entry) -> Mirror | None:
    """The mirror of a training's checkpoints; None: it has none."""
    url = planned.stage.resources.checkpoint_mirror
    return Mirror(url, entry.path) if url and isinstance(planned.stage.method, Training) else None


def adopted(mirror: Mirror, entry: Entry, after: int) -> Checkpoint | None:
    """Copies the newest intact checkpoint of a mirror after a step; None: it has none."""
    for step in reversed(mirror.steps()):
        if step <= after:
            return None
        try:
            return entry.checkpoints.adopt(mirror, step)
        except (ArtifactError, OSError) as error:
            logger.warning("mirror=%s step=%d state=not used: %s", mirror.url, step, error)
    return None


def clear_mirror(mirror: Mirror, kept: Collection[int], announce: Callable[[str], None]) -> None:
    """Deletes the checkpoints of a finished stage; a mirror that refuses is announced, and costs the stage nothing."""
    try:
        mirror.require_writable()  # what is not there is listed as nothing
        mirror.keep(kept)
    except Exception as error:  # of a file system's own library: no common base
        why = str(error) if isinstance(error, ConfigError) else first_line(error)
        announce(
            f"{why}; the output is whole, and its mirror may lack checkpoints, which the stage's log "
            "names, or still have some"
        )


def settle_last_run(store: Path, entry: Entry) -> str:
    """Says what ended the last attempt at an artifact, and kills what its driver left on this host if it was killed.

    Those are Ray's agents: for 60 s they try to reach a head that is gone too.

    Args:
        store: where runs leave their records.

    Returns:
        The cause; empty: there was no attempt, or it left no record.
    """
    for record, stage in runs_of(store, entry.path) if attempts(entry.path) else ():
        if stage.state in ("running", "failed") and not record.is_live(store):
            if record.outcome is None:
                kill_left(record)
            if stage.state == "failed":
                return stage.reason.partition("\n")[0]
            what, how = ("driver", "killed") if record.outcome is None else ("run", "stopped")
            reached = last_step(entry.metrics)
            return f"its {what} on {record.driver.host} was {how}{f' at step {reached}' if reached else ''}"
    return ""
