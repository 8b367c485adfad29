"""Whether a training that is killed, or gone on with by other workers, gives what it gives unbroken: tried in short."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flows.declare.operation import Tracking
from flows.declare.pipeline import Pipeline
from flows.open_run import open_run, stoppable
from flows.planning.plan import Plan, PlannedStage
from flows.progress.board import Board
from flows.rehearsal.compare import TOLERANCES, compare
from flows.rehearsal.interruptions import kill_and_resume, other_workers
from flows.rehearsal.scratch import scratch, scratch_plan
from flows.stages.execute import execute
from flows.stages.given import job_inputs
from flows.stages.run import Run
from flows.wording import counted
from lineage.artifact import MODELS
from lineage.attempts import attempts, last_words
from lineage.certificate import Certificate, Comparison, basis, key_of, write_certificate
from lineage.errors import ConfigError, StageError
from lineage.manifest import Manifest
from lineage.store import Entry
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
    unrecorded = replace(pipeline, tracking=Tracking(mlflow=False, uri=None, dvc=False))
    with scratch(pipeline.store, keep=False) as place:
        plan = scratch_plan(unrecorded, place / "unbroken", num_steps=NUM_STEPS, save_steps=SAVE_STEPS)
        plan = _for_training(plan)
        names = [planned.name for planned in plan.stages]
        with (
            stoppable(),
            Board(sys.stderr, names) as board,
            open_run(plan, words, board, plan.stages, in_flow=False) as run,
        ):
            return list(_certificates(run, pipeline.store))


def _certificates(run: Run, store: Path) -> Iterator[Certified]:
    for planned in run.plan.stages:
        manifest = execute(run, planned).manifest
        if planned.stage.method.trains:
            _require_unbroken(run.plan.entry(planned), planned.name)
            certificate = _certificate(run, planned, manifest)
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


def _certificate(run: Run, planned: PlannedStage, manifest: Manifest) -> Certificate:
    tolerance = TOLERANCES[str(manifest.recipe["precision"])]
    parents = _parents(run.plan, planned)
    kind = basis(manifest, parents, run.plan.pipeline.store)
    unmoved = _unmoved(run.plan, planned, parents)
    return Certificate(
        key=key_of(kind), basis=kind, pipeline=run.plan.pipeline.name, stage=planned.name, num_steps=NUM_STEPS,
        save_steps=SAVE_STEPS, tolerance=tolerance, provenance=manifest.provenance,
        comparisons={
            "killed": _interrupted(run, planned, "killed", unmoved or planned.stage.resources, tolerance),
            "resharded": _interrupted(run, planned, "resharded", unmoved or other_workers(planned), tolerance),
        },
    )  # fmt: skip


def _unmoved(plan: Plan, planned: PlannedStage, parents: Mapping[str, Manifest]) -> str | None:
    """Why a comparison would prove nothing: what the training had lost would not show in what it ends with."""
    from tasks.weight_differences import is_unmoved  # imports torch

    given = [each for each in job_inputs(plan, planned, parents).values() if each.kind in MODELS]
    if not any(is_unmoved(each.resolve().path, plan.entry(planned).output) for each in given):
        return None
    return (
        f"the weights did not move in {NUM_STEPS} steps, so that one that forgets them ends alike; raise "
        "learning_rate, or train in precision=fp32"
    )


def _interrupted(run: Run, planned: PlannedStage, how: str, resources: Resources | str, tolerance: float) -> Comparison:
    if isinstance(resources, str):
        before = planned.stage.resources.num_workers
        return Comparison(verdict="not compared", detail=resources, num_workers=(before, before))
    goes_on = f"goes on with {counted(resources.num_workers, 'worker')}"
    run.observer.announce(f"{planned.name}  {how}: killed after step {SAVE_STEPS + 1}, {goes_on}")
    beside = replace(run, plan=_beside(run.plan, planned, how))
    entry = kill_and_resume(beside, beside.plan.stage(planned.name), resources, SAVE_STEPS + 1)
    return compare(run.plan.entry(planned), entry, tolerance)


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
