"""Certification: whether a killed or resharded training gives the same result as an unbroken one."""

import contextlib
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd, isfinite, isnan
from pathlib import Path

from flows.declare.operation import Tracking
from flows.declare.pipeline import Pipeline, Stage
from flows.operate.rehearsal import WEIGHTS, delete_others, scratch, scratch_plan
from flows.planning.plan import Plan, PlannedStage
from flows.progress.screen import Screen
from flows.reports.wording import counted
from flows.run import check_machine, open_run
from flows.stages.execute import execute
from flows.stages.resources import require_gpus
from flows.stages.run import Run, job_inputs
from flows.stages.stops import stoppable
from lineage.artifact import MODELS
from lineage.errors import ConfigError, LostError, StageError
from lineage.record.attempts import attempts, describe_last_attempt
from lineage.record.certificate import Certificate, Comparison, Tolerance, basis, key_of, write_certificate
from lineage.record.metrics_file import ReportFile, headline_metric, is_of_machine, read_reports
from lineage.store import CACHE, Entry, Manifest
from tasks.context import Launcher, Resources
from tasks.method import Training

NUM_STEPS = 6
SAVE_STEPS = 2
# Differences by another order of summation, with a margin over the measurements of bench/resume_differences.py, and far
# below the differences that lost steps, other rows or lost moments of Adam cause there.
TOLERANCES = {
    "fp32": Tolerance(losses=1e-4, weights=1e-2),
    "bf16": Tolerance(losses=2e-2, weights=0.1),
    "fp16": Tolerance(losses=2e-2, weights=0.1),
    "fp8": Tolerance(losses=2e-2, weights=0.1),
}
_POLL_SECONDS = 0.005
_TRIES = 5  # a training of few quick steps may end before it is killed


@dataclass(frozen=True, kw_only=True)
class Certified:
    """A certificate and its file."""

    path: Path
    certificate: Certificate


def certify(pipeline: Pipeline, cli_args: Sequence[str], workers: int | None = None) -> list[Certified]:
    """Trains each stage for a few steps: unbroken, killed and resumed, and resumed with other workers; compares them.

    Args:
        cli_args: arguments of the command, for the record.
        workers: of the resume with other workers; None: half as many, or two instead of one.

    Raises:
        ConfigError: the pipeline is refused, or trains nothing.
        StageError: a stage failed by itself.
        KeyboardInterrupt: the command was stopped.
    """
    if workers is not None and workers < 1:
        raise ConfigError(f"--workers={workers}: a number of workers of 1 or more is accepted; give one")
    stages = {name: _deterministic(stage) for name, stage in pipeline.stages.items()}
    unrecorded = replace(pipeline, stages=stages, tracking=Tracking(mlflow=False, uri=None, dvc=False))
    with scratch(pipeline.store, keep=False) as place:
        plan = scratch_plan(unrecorded, place / "unbroken", num_steps=NUM_STEPS, save_steps=SAVE_STEPS)
        plan = _for_training(plan)
        check_machine(plan.stages)
        delete_others(place)
        names = [planned.name for planned in plan.stages]
        with (
            stoppable(),
            Screen(sys.stderr, names) as screen,
            open_run(plan, cli_args, screen.on, plan.stages, in_flow=False, command="certify") as run,
        ):
            return list(_certificates(run, pipeline.store, workers))


def _deterministic(stage: Stage) -> Stage:
    """Sets deterministic kernels, also on a GPU, unless the stage sets them: without them equal runs differ."""
    if stage.resources.deterministic != "auto":
        return stage
    return replace(stage, resources=replace(stage.resources, deterministic=True))


def _for_training(plan: Plan) -> Plan:
    """The plan without stages that no training depends on (ConfigError: nothing trains)."""
    required = {planned.name for planned in plan.stages if planned.stage.method.trains}
    if not required:
        raise ConfigError("no stage of this pipeline trains: there is nothing to certify; name one that trains")
    for planned in reversed(plan.stages):
        required.update(planned.upstream if planned.name in required else ())
    return replace(plan, stages=[planned for planned in plan.stages if planned.name in required])


def _certificates(run: Run, store: Path, workers: int | None) -> Iterator[Certified]:
    for planned in run.plan.stages:
        manifest = execute(run, planned).manifest
        if planned.stage.method.trains:
            entry = run.plan.entry(planned)
            tried = attempts(entry.path)
            if len(tried) > 1:  # a resume that loses something would equal the other
                raise StageError(
                    planned.name, f"the uninterrupted training was interrupted ({describe_last_attempt(tried)}): "
                    "nothing can be compared with it; certify again", str(entry.logs),
                )  # fmt: skip
            certificate = _certificate(run, planned, manifest, store, other_workers(planned, workers))
            yield Certified(path=write_certificate(store, certificate), certificate=certificate)


def _certificate(
    run: Run, planned: PlannedStage, manifest: Manifest, store: Path, other: Resources | str
) -> Certificate:
    plan = run.plan
    tolerance = TOLERANCES[str(manifest.recipe["precision"])]
    entries = {name: plan.entry(plan.stage(name)) for name in planned.upstream}
    entries |= {each.name: each.entry for each in planned.inputs.values() if each.entry}
    parents = {name: made for name, entry in entries.items() if (made := entry.manifest())}
    holds_for = basis(manifest, parents, plan.pipeline.store, store)
    moved = _moved(plan, planned, parents)
    return Certificate(
        key=key_of(holds_for), basis=holds_for, pipeline=plan.pipeline.name, stage=planned.name, num_steps=NUM_STEPS,
        save_steps=SAVE_STEPS, tolerance=tolerance, provenance=manifest.provenance,
        comparisons={
            "killed": _interrupted(run, planned, "killed", planned.stage.resources, moved, None),
            "resharded": _interrupted(run, planned, "resharded", other, moved, tolerance),
        },
    )  # fmt: skip


def _moved(plan: Plan, planned: PlannedStage, parents: Mapping[str, Manifest]) -> float:
    """Norm of the weight update of the unbroken training; of all weights for a training from scratch."""
    from tasks.model.weight_differences import length, movement  # imports torch

    output, cache = plan.entry(planned).output, plan.pipeline.store / CACHE
    inputs = job_inputs(plan, planned, parents).values()
    models = [each.resolve(cache).path for each in inputs if each.planned.kind in MODELS]
    known = [moved for path in models if (moved := movement(path, output)) is not None]
    return min(known) if known else length(output)  # of several models the nearest is its start


def _interrupted(
    run: Run, planned: PlannedStage, how: str, resources: Resources | str, moved: float, tolerance: Tolerance | None
) -> Comparison:
    """Interrupts and resumes a training, and compares the result.

    Args:
        resources: resources of the resume, or why the training cannot be compared.
    """
    if moved == 0:
        resources = (
            f"the weights did not move in {NUM_STEPS} steps, so that losing them would not show; raise "
            "learning_rate, or train in precision=fp32"
        )
    if isinstance(resources, str):
        before = planned.stage.resources.num_workers
        return Comparison(verdict="not compared", detail=resources, num_workers=(before, before))
    resumes = f"resumes with {counted(resources.num_workers, 'worker')}"
    run.announce(f"{planned.name}  {how}: killed after step {SAVE_STEPS + 1}, {resumes}")
    plan = run.plan  # the interrupted training runs in a second store, with the inputs of the first
    inputs = {
        slot: each if each.pinned else replace(each, entry=plan.entry(plan.stage(each.name)))
        for slot, each in planned.inputs.items()
    }
    own = replace(planned, inputs=inputs)
    beside = replace(
        plan, pipeline=replace(plan.pipeline, store=plan.pipeline.store.with_name(how)),
        stages=[own if each is planned else each for each in plan.stages],
    )  # fmt: skip
    entry = _kill_and_resume(replace(run, plan=beside), own, resources, SAVE_STEPS + 1)
    return compare(plan.entry(planned), entry, moved, tolerance)


def other_workers(planned: PlannedStage, workers: int | None = None) -> Resources | str:
    """Resources of a resume with another number of workers, or why there are none.

    Args:
        workers: how many; None: half as many, or two instead of one.
    """
    method, resources = planned.stage.method, planned.stage.resources
    assert isinstance(method, Training)
    if resources.sharding.startswith("zero"):
        return f"sharding={resources.sharding}: resumes with {resources.num_workers} workers only"
    if method.adapter and method.adapter.dropout:
        return f"adapter.dropout={method.adapter.dropout}: drawn by each worker, so that other workers drop others"
    if method.neftune_alpha:
        return f"neftune_alpha={method.neftune_alpha:g}: drawn by each worker, so that other workers draw other noise"
    num_workers = workers or (2 if resources.num_workers == 1 else resources.num_workers // 2)
    if num_workers == resources.num_workers:
        return f"num_workers={num_workers} is that of the stage already"
    if num_workers % method.num_islands:
        return f"num_workers={num_workers} is no multiple of num_islands={method.num_islands}"
    if method.diloco and resources.sharding == "fsdp_hybrid" and not method.adapter:
        return f"sharding=fsdp_hybrid in islands: resumes with {resources.num_workers} workers only"
    if num_workers == 1 and method.has_own_loop and resources.sharding != "none":
        return f"sharding={resources.sharding}: a method with a loop of its own resumes with divided weights only"
    if num_workers == 1:  # which divides nothing
        resources = replace(resources, sharding="none", offload=False, wrap=None, prefetch=0, reduce_dtype="fp32")
    changed = replace(
        resources, num_workers=num_workers, num_nodes=1,
        micro_batch_size=(
            "auto"
            if resources.micro_batch_size == "auto"
            else gcd(resources.micro_batch_size, method.global_batch_size // num_workers)
        ),
        launcher=Launcher.AUTO if resources.launcher == Launcher.PROCESS else resources.launcher,
    )  # fmt: skip
    try:
        changed.accumulation_steps(method.global_batch_size)
        require_gpus(planned.name, num_workers * resources.gpus_per_worker)
    except ConfigError as error:
        return str(error)
    return changed


def _kill_and_resume(run: Run, planned: PlannedStage, resources: Resources, after: int) -> Entry:
    """Kills a stage's process after a step and resumes the stage, on the code path of a real failure.

    Args:
        resources: of the resume. With the stage's own, the same run resumes it, as after the loss of a worker; with
            others, a second run does, as after a change of the configuration.

    Raises:
        StageError: it failed, or finished before it could be killed.
    """
    is_same = resources == planned.stage.resources
    entry = run.plan.entry(planned)
    quiet = replace(run, emit=lambda event: None)  # the intended failure is not reported
    for _ in range(_TRIES):
        shutil.rmtree(entry.path, ignore_errors=True)
        with _killed(after, entry, lambda: run.processes.end(entry.path, None)):
            if is_same:
                execute(quiet, planned)
            else:
                with contextlib.suppress(LostError):
                    execute(quiet, _with(planned, replace(planned.stage.resources, max_failures=0)))
        if not is_same:
            execute(quiet, _with(planned, resources))
        manifest = entry.manifest()
        if manifest and manifest.provenance.resumed_at:
            return entry
    raise StageError(
        planned.name, f"it ended before it could be killed, {_TRIES} times, so that no resume was tested; "
        "certify a larger model or batch", str(entry.logs),
    )  # fmt: skip


@contextlib.contextmanager
def _killed(after: int, entry: Entry, kill: Callable[[], None]) -> Iterator[None]:
    """Calls ``kill`` once ``after`` is reported and a checkpoint is published, which may take longer than steps do."""
    ended = threading.Event()

    def watch() -> None:
        reports, is_reported = ReportFile(entry.metrics), False
        while not ended.wait(_POLL_SECONDS):
            is_reported = is_reported or any(report.step >= after for report in reports.read())
            if is_reported and entry.checkpoints.steps():
                kill()
                return

    thread = threading.Thread(target=watch, daemon=True, name="kill-on-purpose")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _with(planned: PlannedStage, resources: Resources) -> PlannedStage:
    return replace(planned, stage=replace(planned.stage, resources=resources))


# --- comparison of an interrupted training with the unbroken one


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first difference as text, its step, and the largest relative difference."""

    first: str = ""
    step: int | None = None
    largest: float = 0.0


def compare(unbroken: Entry, other: Entry, moved: float, tolerance: Tolerance | None) -> Comparison:
    """Compares an interrupted training with the unbroken one: steps, final metrics, weights, files.

    Args:
        moved: norm of the weight update of the unbroken one; relative to the norm of the weights, a few lost steps with
            a small learning rate would not show.
        tolerance: None: the results must be bit-identical.
    """
    whole, parts = unbroken.manifest(), other.manifest()
    assert whole and parts
    resumed_at = tuple(parts.provenance.resumed_at)
    steps = _step_difference(unbroken.metrics, other.metrics)
    end = _changed("at the end", None, whole.metrics, parts.metrics)
    weights = _weight_difference(unbroken.output, other.output, whole, parts, moved)
    changed = _changed_files(whole, parts, is_weights=False)
    files = f"other bytes in {', '.join(changed[:3])}" if changed else ""
    early = ""
    if steps.step is not None and resumed_at and steps.step <= resumed_at[0]:
        early = (
            f"no interruption had come by then (the checkpoint is of step {resumed_at[0]}): on this machine two equal "
            "trainings differ, as where a kernel is not deterministic, and nothing is known of the resume"
        )
    found = [each for each in (steps.first or end.first, weights.first, files, early) if each]
    numbers = max(steps.largest, end.largest)
    within = tolerance and numbers <= tolerance.losses and weights.largest <= tolerance.weights and not files
    return Comparison(
        verdict="bit-identical" if not found else "within tolerance" if within else "differs",
        detail="; ".join(found),
        num_workers=(_num_workers(whole), _num_workers(parts)),
        resumed_at=resumed_at,
        loss_difference=numbers if isfinite(numbers) else None,
        weight_difference=weights.largest if isfinite(weights.largest) else None,
    )


def _step_difference(unbroken: Path, other: Path) -> Difference:
    """The first step with a different report; the loss is compared first."""
    one, two = read_reports(unbroken), read_reports(other)
    whole, parts = Counter(report.step for report in one), Counter(report.step for report in two)
    for step in sorted(whole.keys() | parts.keys()):
        if whole[step] != parts[step]:
            return Difference(first=f"step {step} is reported {parts[step]} times", largest=float("inf"))
    pairs = zip(one, two, strict=True)
    changed = [_changed(f"first at step {a.step}", a.step, a.metrics, b.metrics) for a, b in pairs]
    largest = max((each.largest for each in changed), default=0.0)
    first = next((each for each in changed if each.first), Difference())
    return replace(first, largest=largest)


def _changed(where: str, step: int | None, one: Mapping[str, float], two: Mapping[str, float]) -> Difference:
    """Compares the metrics of one step or of the end, without those that depend on the machine's speed."""
    left, right = ({name: value for name, value in each.items() if not is_of_machine(name)} for each in (one, two))
    names = sorted(left.keys() | right.keys(), key=lambda name: (name != "loss", name))
    changed = [name for name in names if not _is_same(left.get(name), right.get(name))]
    if not changed:
        return Difference()
    shown = ("none" if value is None else f"{value:.9g}" for value in (left.get(changed[0]), right.get(changed[0])))
    # Other metrics may be small differences of large numbers: only reported. So is the loss where there are rewards.
    judged_names = (headline_metric(left), "num_tokens")
    judged = [_relative(left.get(name), right.get(name)) for name in changed if name in judged_names]
    first = "{} in {} ({}, unbroken, and {})".format(where, changed[0], *shown)
    return Difference(first=first, step=step, largest=max(judged, default=0.0))


def _weight_difference(unbroken: Path, other: Path, whole: Manifest, parts: Manifest, moved: float) -> Difference:
    names = _changed_files(whole, parts, is_weights=True)
    if not names:
        return Difference()
    from tasks.model.weight_differences import weight_difference  # imports torch

    found = weight_difference(unbroken, other)
    if not found.tensors:
        return Difference(first=f"the bytes of {names[0]}, in no number")
    largest = found.distance / moved if moved > 0 else float("inf")
    return Difference(first=f"{found.tensors[0]} is the first of {len(found.tensors)} tensors", largest=largest)


def _changed_files(whole: Manifest, parts: Manifest, *, is_weights: bool) -> list[str]:
    names = [name for name in whole.files.keys() | parts.files.keys() if name.endswith(WEIGHTS) == is_weights]
    return sorted(name for name in names if whole.files.get(name) != parts.files.get(name))


def _is_same(left: float | None, right: float | None) -> bool:
    """Exact equality; NaN equals NaN."""
    return left == right or (left is not None and right is not None and isnan(left) and isnan(right))


def _relative(left: float | None, right: float | None) -> float:
    """Relative difference; infinite if a value is missing or non-finite."""
    if left is None or right is None or not (isfinite(left) and isfinite(right)):
        return float("inf")
    return abs(left - right) / max(abs(left), abs(right))


def _num_workers(manifest: Manifest) -> int:
    return int(str(manifest.provenance.resources["num_workers"]))
