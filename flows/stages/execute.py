"""One stage, from its lock to its manifest."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from flows.planning.needs import needs, pool_of
from flows.planning.plan import PlannedStage
from flows.stages.admission import admitted
from flows.stages.attempts import begin, goes_on, last_intact
from flows.stages.ended_before import ended_before
from flows.stages.given import given_as_planned, require_unchanged
from flows.stages.job import STOP_FILE
from flows.stages.make import kept_checkpoints, make, stage_start
from flows.stages.process_ends import saving_first
from flows.stages.run import Run
from flows.stages.session import end_left_session
from flows.wording import counted
from lineage.disk import full_disk_named
from lineage.errors import PipelineError, PrunedError, StageError, StoppedError
from lineage.lock import Lock, acquire_or, owner
from lineage.manifest import Manifest
from lineage.store import Entry
from lineage.tracker import StageStart
from tasks.context import Metrics


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
    lock = Lock(entry.path)
    finished = partial(planned.is_finished, entry)
    if not acquire_or(lock, finished, partial(_waiting_for_owner, run, planned, entry)):
        return _reused(run, planned, entry)
    with lock.holding():
        end_left_session(entry.work)
        entry.fence()
        if finished():  # by a run that ended between the poll and the lock
            return _reused(run, planned, entry)
        parents = given_as_planned(run.plan, planned)
        entry.open()
        run.checks.require(run.plan, planned, run.processes, partial(_waiting, run, planned), run.observer.announce)
        start = stage_start(run, planned, entry, parents, resumes=goes_on(planned, entry))
        return _tracked(run, planned, entry, start, lock)


def _waiting_for_owner(run: Run, planned: PlannedStage, entry: Entry) -> None:
    busy = owner(entry.path)
    who = f" (process {busy.pid} on {busy.host})" if busy else ""
    _waiting(run, planned, f"another run that makes it{who}")


def _waiting(run: Run, planned: PlannedStage, reason: str) -> None:
    run.processes.raise_if_stopped()
    run.processes.raise_if_unwanted(run.plan.entry(planned).path)  # its trial was pruned
    run.observer.waiting(run.title(planned), reason)


def _reused(run: Run, planned: PlannedStage, entry: Entry) -> Result:
    manifest = entry.manifest()
    assert manifest is not None
    run.tracker.reused(run.title(planned), manifest)
    run.observer.reused(run.title(planned))
    return Result(manifest=manifest, seconds=0.0)


def _told(run: Run, planned: PlannedStage, manifest: Manifest) -> Result:
    seconds = manifest.provenance.end - manifest.provenance.start
    run.observer.done(run.title(planned), seconds, manifest.metrics)
    if "diverged_at_step" in manifest.metrics:
        at, best = (int(manifest.metrics[name]) for name in ("diverged_at_step", "best_step"))
        run.observer.announce(f"{run.title(planned)}: DIVERGED at step {at}; its output is its model of step {best}")
    for line in _notes(manifest.metrics):
        run.observer.announce(f"{run.title(planned)}: {line}")
    return Result(manifest=manifest, seconds=seconds)


def _notes(metrics: Metrics) -> Iterator[str]:
    """What a training did beside its steps."""
    if "ended_early_at_step" in metrics:
        step = int(metrics["ended_early_at_step"])
        yield f"ended early at step {step}: val/loss no longer fell (validation.patience)"
    if metrics.get("adaptive/interventions"):
        number = counted(int(metrics["adaptive/interventions"]), "intervention")
        yield f"{number} in its learning rate (schedule.adaptive), named in its log and manifest"


def _tracked(run: Run, planned: PlannedStage, entry: Entry, start: StageStart, lock: Lock) -> Result:
    """Makes and commits the artifact, with its record in the tracker from the first step to the last."""
    with _admitted(run, planned) as visible_gpus:
        require_unchanged(run.plan, planned)  # the wait may have been long
        checkpoint = None if planned.restart else last_intact(planned, entry)
        begin(planned, entry, checkpoint, lock.require, ended_before(run.plan.home, entry))
        tracked = run.tracker.stage(start)
        with saving_first(planned.stage, entry.work / STOP_FILE):
            try:
                manifest = make(run, planned, start, checkpoint, tracked, visible_gpus, lock.token)
                entry.commit(manifest, lock, kept_checkpoints(planned, entry))
            except BaseException as error:
                tracked.failed(error)
                raise
            tracked.finished(manifest)
            return _told(run, planned, manifest)


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
