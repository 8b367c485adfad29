"""Whether a training that is killed, or gone on with by other workers, gives what it gives unbroken: tried in short."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flows.declare.operation import Tracking
from flows.declare.pipeline import Pipeline, Stage
from flows.open_run import check_machine, open_run
from flows.planning.plan import Plan, PlannedStage
from flows.progress.board import Board
from flows.rehearsal.compare import TOLERANCES, compare
from flows.rehearsal.interruptions import kill_and_resume, other_workers
from flows.rehearsal.scratch import free_left, scratch, scratch_plan
from flows.stages.execute import execute
from flows.stages.given import job_inputs
from flows.stages.run import Run
from flows.stops import stoppable
from flows.wording import counted
from lineage.artifact import MODELS
from lineage.attempts import attempts, last_words
from lineage.certificates.basis import basis, key_of
from lineage.certificates.certificate import Certificate, Comparison, Tolerance
from lineage.certificates.files import write_certificate
from lineage.errors import ConfigError, StageError
from lineage.manifest import Manifest
from lineage.store import CACHE, Entry
from tasks.context import Resources

NUM_STEPS = 6
SAVE_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Certified:
    """A certificate, and where it lies."""

    path: Path
    certificate: Certificate


def certify(pipeline: Pipeline, words: Sequence[str]) -> list[Certified]:
    """Trains each stage in short: unbroken, killed and resumed, and resumed with other workers; writes what differed.

    Args:
        words: the options and overrides of the command, for the record.

    Raises:
        ConfigError: the pipeline cannot work, or trains nothing.
        StageError: a stage failed, apart from being killed.
        KeyboardInterrupt: it was stopped.
    """
    stages = {name: _deterministic(stage) for name, stage in pipeline.stages.items()}
    unrecorded = replace(pipeline, stages=stages, tracking=Tracking(mlflow=False, uri=None, dvc=False))
    with scratch(pipeline.store, keep=False) as place:
        plan = scratch_plan(unrecorded, place / "unbroken", num_steps=NUM_STEPS, save_steps=SAVE_STEPS)
        plan = _for_training(plan)
        check_machine(plan.stages)
        free_left(place)
        names = [planned.name for planned in plan.stages]
        with (
            stoppable(),
            Board(sys.stderr, names) as board,
            open_run(plan, words, board, plan.stages, in_flow=False, command="certify") as run,
        ):
            return list(_certificates(run, pipeline.store))


def _deterministic(stage: Stage) -> Stage:
    """With deterministic kernels on a GPU too, unless the stage sets otherwise: else nothing can be compared."""
    if stage.resources.deterministic != "auto":
        return stage
    return replace(stage, resources=replace(stage.resources, deterministic=True))


def _certificates(run: Run, store: Path) -> Iterator[Certified]:
    for planned in run.plan.stages:
        manifest = execute(run, planned).manifest
        if planned.stage.method.trains:
            _require_unbroken(run.plan.entry(planned), planned.name)
            certificate = _certificate(run, planned, manifest, store)
            yield Certified(path=write_certificate(store, certificate), certificate=certificate)


def _require_unbroken(entry: Entry, stage: str) -> None:
    """That what all is compared with did not go on from a checkpoint itself: what forgets would be the same as it.

    Raises:
        StageError: it lost a worker.
    """
    tried = attempts(entry.path)
    if len(tried) > 1:
        raise StageError(
            stage, f"the training that is to be unbroken was not ({last_words(tried)}): nothing can be compared with "
            "it; certify again", str(entry.logs),
        )  # fmt: skip


def _certificate(run: Run, planned: PlannedStage, manifest: Manifest, store: Path) -> Certificate:
    tolerance = TOLERANCES[str(manifest.recipe["precision"])]
    parents = _parents(run.plan, planned)
    kind = basis(manifest, parents, run.plan.pipeline.store, store)
    moved = _moved(run.plan, planned, parents)
    other = other_workers(planned)
    return Certificate(
        key=key_of(kind), basis=kind, pipeline=run.plan.pipeline.name, stage=planned.name, num_steps=NUM_STEPS,
        save_steps=SAVE_STEPS, tolerance=tolerance, provenance=manifest.provenance,
        comparisons={
            "killed": _interrupted(run, planned, "killed", planned.stage.resources, moved, None),
            "resharded": _interrupted(run, planned, "resharded", other, moved, tolerance),
        },
    )  # fmt: skip


def _moved(plan: Plan, planned: PlannedStage, parents: Mapping[str, Manifest]) -> float:
    """Norm of what the unbroken training added to the model that it was given; of one from nothing, of all weights."""
    from tasks.weight_differences import length, movement  # imports torch

    output = plan.entry(planned).output
    cache = plan.pipeline.store / CACHE
    given = [each.resolve(cache).path for each in job_inputs(plan, planned, parents).values() if each.kind in MODELS]
    known = [moved for path in given if (moved := movement(path, output)) is not None]
    return min(known) if known else length(output)  # of several models the nearest is what it began with


def _interrupted(
    run: Run, planned: PlannedStage, how: str, resources: Resources | str, moved: float, tolerance: Tolerance | None
) -> Comparison:
    """What an interruption does, or why that cannot be seen."""
    if moved == 0:  # what the training had lost would not show in what it ends with
        resources = (
            f"the weights did not move in {NUM_STEPS} steps, so that one that forgets them ends alike; raise "
            "learning_rate, or train in precision=fp32"
        )
    if isinstance(resources, str):
        before = planned.stage.resources.num_workers
        return Comparison(verdict="not compared", detail=resources, num_workers=(before, before))
    goes_on = f"goes on with {counted(resources.num_workers, 'worker')}"
    run.observer.announce(f"{planned.name}  {how}: killed after step {SAVE_STEPS + 1}, {goes_on}")
    beside = replace(run, plan=_beside(run.plan, planned, how))
    entry = kill_and_resume(beside, beside.plan.stage(planned.name), resources, SAVE_STEPS + 1)
    return compare(run.plan.entry(planned), entry, moved, tolerance)


def _beside(plan: Plan, planned: PlannedStage, how: str) -> Plan:
    """The plan with one of its stages to be made in a further store, out of what was made in the first."""
    inputs = {
        slot: given if given.pinned else replace(given, entry=plan.entry(plan.stage(given.name)))
        for slot, given in planned.inputs.items()
    }
    own = replace(planned, inputs=inputs)
    store = plan.pipeline.store.with_name(how)
    stages = [own if each is planned else each for each in plan.stages]
    return replace(plan, pipeline=replace(plan.pipeline, store=store), stages=stages)


def _for_training(plan: Plan) -> Plan:
    """The plan without what no training needs.

    Raises:
        ConfigError: nothing trains.
    """
    needed = {planned.name for planned in plan.stages if planned.stage.method.trains}
    if not needed:
        raise ConfigError("no stage of this pipeline trains: there is nothing to certify; name one that trains")
    for planned in reversed(plan.stages):
        needed.update(planned.upstream if planned.name in needed else ())
    return replace(plan, stages=[planned for planned in plan.stages if planned.name in needed])


def _parents(plan: Plan, planned: PlannedStage) -> dict[str, Manifest]:
    entries = {given.name: given.entry for given in planned.inputs.values() if given.entry}
    made = {name: plan.entry(plan.stage(name)) for name in planned.upstream if name not in entries}
    manifests = {name: entry.manifest() for name, entry in {**entries, **made}.items()}
    return {name: manifest for name, manifest in manifests.items() if manifest}
