"""Whether a training that is killed, or gone on with by other workers, gives what it gives unbroken: tried in short."""

import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flows.declare.operation import Tracking
from flows.declare.pipeline import Pipeline
from flows.doctor.gather_gpus import gather_gpus
from flows.open_run import open_run, stoppable
from flows.planning.plan import Plan, PlannedStage
from flows.progress.board import Board
from flows.rehearsal.compare import TOLERANCES, compare
from flows.rehearsal.interruptions import kill_and_resume, other_workers
from flows.rehearsal.scratch import scratch, scratch_plan
from flows.stages.execute import execute
from flows.stages.run import Run
from flows.wording import counted
from lineage.certificate import Certificate, Comparison, basis, key_of, write_certificate
from lineage.errors import ConfigError
from lineage.manifest import Manifest
from tasks.context import Resources

NUM_STEPS = 6
SAVE_STEPS = 2
_CPUS = Path("/proc/cpuinfo")


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
            certificate = _certificate(run, planned, manifest)
            yield Certified(path=write_certificate(store, certificate), certificate=certificate)


def _certificate(run: Run, planned: PlannedStage, manifest: Manifest) -> Certificate:
    tolerance = TOLERANCES[str(manifest.recipe["precision"])]
    kind = basis(manifest, _parents(run.plan, planned))
    resources = planned.stage.resources
    return Certificate(
        key=key_of(kind), basis=kind, pipeline=run.plan.pipeline.name, stage=planned.name, num_steps=NUM_STEPS,
        save_steps=SAVE_STEPS, tolerance=tolerance, hardware=_hardware(), provenance=manifest.provenance,
        comparisons={
            "killed": _interrupted(run, planned, "killed", resources, tolerance),
            "resharded": _interrupted(run, planned, "resharded", other_workers(planned), tolerance),
        },
    )  # fmt: skip


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


def _hardware() -> dict[str, str]:
    lines = _CPUS.read_text().splitlines() if _CPUS.exists() else []
    cpus = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    gpus = gather_gpus()
    return {
        "cpu": cpus[0] if cpus else platform.machine(),
        **({"gpu": ", ".join(gpus.names)} if gpus and gpus.names else {}),
    }
