"""Checks that what runs fits into the memory of its workers; proposes the cheapest change that makes a training fit."""

import logging
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from flows.planning.adapter_choice import NO_GPU, PLAN_FOR, capacity
from flows.planning.estimates import Estimate, Estimator
from flows.planning.plan import Plan, PlannedStage
from flows.reports.wording import gib
from lineage.errors import ConfigError
from lineage.filesystem.files import atomic_write, refuse_edited
from tasks.context import Resources
from tasks.judgement.estimate import describe
from tasks.method import Adapter, Quantization, Training
from tasks.train.compatibility import check_compatible
from tasks.train.evaluation import asked_beside

logger = logging.getLogger(__name__)

_RECOMPUTED: Mapping[str, object] = {"gradient_checkpointing": "on"}
# Dividing state costs little traffic; recomputing costs a fifth of the time; gathering weights costs the most traffic.
_CHEAPEST_FIRST: tuple[Mapping[str, object], ...] = (
    {}, {"sharding": "zero1"}, {"sharding": "zero2"}, _RECOMPUTED, {**_RECOMPUTED, "sharding": "zero2"},
    {"sharding": "fsdp"}, {**_RECOMPUTED, "sharding": "fsdp"}, {**_RECOMPUTED, "sharding": "fsdp", "offload": True},
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change that makes a stage fit.

    Args:
        overrides: empty: no known change suffices.
        memory: memory of a worker in bytes with the change; of no known change, with the one that needs least.
        terms: what holds that memory.
    """

    stage: str
    overrides: list[str]
    memory: int
    terms: str


def require_fits(plan: Plan, found: Mapping[str, Estimate], estimator: Estimator, suggest: Path | None = None) -> None:
    """Refuses stages that do not fit into memory if ``check_memory`` is set; warns of those that may not fit.

    Args:
        found: estimates of the trainings that would run.
        suggest: file for the overrides that make all stages fit.
    """
    changes, lines, refused = list[Change](), list[str](), list[str]()
    for planned in plan.stale:
        if planned.name not in found or planned.runs_elsewhere:
            continue
        held, need = capacity(planned.stage.resources), found[planned.name]
        if apart := _scoring_apart(planned, need):
            (refused if planned.stage.resources.check_memory else lines).append(apart)
        if not held or need.memory <= held - need.shared:
            continue
        held -= need.shared
        change = cheapest(estimator, planned, held)
        longest = "" if need.by_bytes else ", if its rows are as long as max_length allows,"
        verb = "needs" if need.least > held else f"may need{longest}"
        what = "a GPU has" if planned.stage.resources.gpus_per_worker else "the machine has for it"
        lines.append(
            f"stages.{planned.name} {verb} {gib(need.memory)} per worker ({need.basis}: {describe(need.terms)}), and "
            f"{what} {gib(max(held, 0))}{f' beside {gib(need.shared)} of its evaluation' if need.shared else ''}; "
            f"{_remedy(change, planned)}"
        )
        changes.append(change)
        off = need.error[0] if need.error else 0.0  # what earlier predictions were wrong by
        if planned.stage.resources.check_memory and need.least / (1 + off) > held:
            refused.append(lines.pop())
    for line, is_refused in _scored(plan, estimator):
        (refused if is_refused else lines).append(line)
    if suggest:
        _write(suggest, [planned for planned in plan.stale if planned.name in found], changes)
    for line in lines:
        logger.warning("%s", line)
    if refused:
        raise ConfigError("\n".join(refused))


def _scoring_apart(planned: PlannedStage, need: Estimate) -> str:
    """Why the process that scores checkpoints does not fit into memory of its own; empty: it fits."""
    if not need.scoring or need.shared:
        return ""
    cpus, gpus = asked_beside(planned.stage.method)
    held = capacity(Resources(cpus_per_worker=cpus, gpus_per_worker=gpus))
    if not held or need.scoring <= held:
        return ""
    where, what = f"stages.{planned.name}.method.evaluation", "a GPU" if gpus else "the machine"
    instead = f"{where}.gpus=0, or {where}=null" if gpus else f"{where}=null"
    return f"{where} needs {gib(need.scoring)} by formula, and {what} has {gib(held)}; set {instead}"


def _scored(plan: Plan, estimator: Estimator) -> Iterator[tuple[str, bool]]:
    """Why an evaluation does not fit, or may not, and whether that refuses it."""
    for name, need in estimator.scorings([each for each in plan.stale if not each.runs_elsewhere]).items():
        resources, where = plan.stage(name).stage.resources, f"stages.{name}.resources"
        held, on_gpu = capacity(resources), bool(resources.gpus_per_worker)
        if not held or need.memory <= held:
            continue
        has = f"{'a GPU has' if on_gpu else 'the machine has for it'} {gib(held)}"
        if need.least > held:
            instead = "a GPU with more memory" if on_gpu else "a GPU: resources=gpu"
            yield (
                f"stages.{name} needs {gib(need.least)} for the weights of its largest model, and {has}; take "
                f"{instead}, or a smaller model; {where}.check_memory=false runs it anyway", resources.check_memory,
            )  # fmt: skip
        else:
            yield (
                f"stages.{name} may need, if its rows are as long as max_length allows, {gib(need.memory)} per worker "
                f"by formula, and {has}; with {where}.micro_batch_size=1 it needs less", False,
            )  # fmt: skip


def _remedy(change: Change, planned: PlannedStage) -> str:
    if not change.overrides:
        instead = (
            "more GPUs: resources=fsdp resources.num_workers=8"
            if planned.stage.resources.gpus_per_worker
            else "a GPU: resources=gpu"
        )
        return (
            "no smaller micro batch, adapter or sharding makes it fit: at the least it needs "
            f"{gib(change.memory)} ({change.terms}); take {instead}, weights in 4 bits (adapter=qlora), or a smaller "
            f"model; stages.{change.stage}.resources.check_memory=false runs it anyway"
        )
    return f"with {shlex.join(change.overrides)} it needs {gib(change.memory)}"


def _write(path: Path, estimated: Sequence[PlannedStage], changes: Sequence[Change]) -> None:
    unknown = [each.name for each in estimated if not each.runs_elsewhere and not capacity(each.stage.resources)]
    if unknown:
        raise ConfigError(f"--suggest: {', '.join(unknown)}: {NO_GPU}, whose memory decides; {PLAN_FOR}")
    if not changes:
        logger.warning("--suggest %s: every stage fits as it is, so it has no overrides", path)
    overrides = [word for change in changes for word in change.overrides]
    text = yaml.safe_dump({"overrides": overrides}, width=10_000)
    text = f"# posttrain run --overrides-from THIS_FILE\n{text}"
    refuse_edited(path, text)
    atomic_write(path, text)


def cheapest(estimator: Estimator, planned: PlannedStage, held: int) -> Change:
    """The first change that fits; changes that keep the model come before those that train fewer weights."""
    needs = [estimator.estimate(planned)]
    for overrides, changed in _changes(planned):
        need = estimator.estimate(changed)
        if need and need.memory <= held:
            return Change(stage=planned.name, overrides=overrides, memory=need.memory, terms=describe(need.terms))
        needs.append(need)
    least = min(filter(None, needs), key=lambda need: need.memory)
    return Change(stage=planned.name, overrides=[], memory=least.memory, terms=describe(least.terms))


def _changes(planned: PlannedStage) -> Iterator[tuple[list[str], PlannedStage]]:
    """Overrides and the changed stage, cheapest first; changes that the plan would refuse are left out."""
    method, resources = planned.stage.method, planned.stage.resources
    assert isinstance(method, Training)
    where, runs = f"stages.{planned.name}", list(_smaller(planned))
    found = [(cli_args, method, changed) for cli_args, changed in runs]
    if method.quantization is None and method.freeze is None:
        lora = method if method.adapter else replace(method, adapter=Adapter(type="lora"))
        overrides = [] if method.adapter else [f"{where}.method.adapter={{type: lora}}"]
        variants = [(overrides, lora)] if overrides else []
        if resources.gpus_per_worker:
            few_bits = f"{where}.method.quantization={{format: nf4}}"
            variants.append(([*overrides, few_bits], replace(lora, quantization=Quantization(format="nf4"))))
        runs = [([], resources), *runs]
        found += [([*own, *cli_args], changed, run) for own, changed in variants for cli_args, run in runs]
    for cli_args, own, changed in found:
        try:
            check_compatible(where, own, changed)
        except ConfigError:
            continue
        yield cli_args, replace(planned, stage=replace(planned.stage, method=own, resources=changed))


def _smaller(planned: PlannedStage) -> Iterator[tuple[list[str], Resources]]:
    """Resources that need less memory and train the same model."""
    resources, where = planned.stage.resources, f"stages.{planned.name}.resources"
    for settings in _CHEAPEST_FIRST:
        for size in (resources.micro_batch_size, *_sizes(planned)):
            changed = {**({"micro_batch_size": size} if size != resources.micro_batch_size else {}), **settings}
            if changed and ("sharding" not in changed or resources.num_workers > 1):
                if "sharding" in changed and resources.zero_stage:
                    changed["zero_stage"] = 0
                cli_args = [f"{where}.{name}={str(value).lower()}" for name, value in changed.items()]
                yield cli_args, replace(resources, **changed)  # type: ignore[arg-type]


def _sizes(planned: PlannedStage) -> list[int]:
    """Smaller micro batches that divide the global batch, the largest first."""
    method, resources = planned.stage.method, planned.stage.resources
    assert isinstance(method, Training)
    per_worker, rest = divmod(method.global_batch_size, resources.num_workers)
    if rest or resources.micro_batch_size == "auto":
        return []
    return [size for size in range(resources.micro_batch_size - 1, 0, -1) if per_worker % size == 0]
