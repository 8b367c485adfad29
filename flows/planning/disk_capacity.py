"""Checks that the disk has space for all trainings of a plan whose models are known."""

from collections.abc import Sequence
from pathlib import Path

from flows.planning.adapter_choice import local_model
from flows.planning.plan import Plan, PlannedStage
from lineage.artifact import Kind
from lineage.errors import ConfigError
from lineage.store import Store
from tasks.check_rows import POLICY
from tasks.disk_need import model_shapes, percent_trained, require_disk
from tasks.method import Training


def require_plan_disk(plan: Plan, stages: Sequence[PlannedStage]) -> None:
    """Refuses trainings that do not fit on the disk; a stage with an unknown model is checked when it starts.

    Args:
        stages: in order of execution: outputs of earlier stages stay, their checkpoints do not.

    Raises:
        ConfigError: names the stage, what it needs, what is free, and what to do.
    """
    before = 0
    for planned in stages:
        method, resources = planned.stage.method, planned.stage.resources
        if isinstance(method, Training):
            before += require_disk(
                planned.name, method, resources, model_of(plan, planned), plan.entry(planned), before=before
            )  # fmt: skip


def share_notes(plan: Plan, stages: Sequence[PlannedStage]) -> list[str]:
    """Notes on the share of parameters that each stage with an adapter or ``freeze`` trains.

    Raises:
        ConfigError: a name in ``adapter`` or ``freeze`` matches nothing in the model.
    """
    notes = []
    for planned in stages:
        method = planned.stage.method
        if not isinstance(method, Training) or not (method.adapter or method.freeze):
            continue
        model = model_of(plan, planned)
        try:
            percent = percent_trained(method, model_shapes(model)) if model else None
        except ConfigError as error:
            raise ConfigError(f"stages.{planned.name}: {error}") from error
        if percent is not None:
            what = f"adapter.type={method.adapter.type}" if method.adapter else "freeze"
            notes.append(f"stages.{planned.name} trains {percent:.3g} % of the parameters ({what})")
    return notes


def model_of(plan: Plan, planned: PlannedStage) -> Path | None:
    """Directory of a model with the shapes of a stage's policy; training keeps the shapes. None: not known yet."""
    given = planned.inputs.get(POLICY)
    if given is None:
        return None
    if given.entry:
        return given.entry.output
    if given.pinned:
        return local_model(given.source)
    parent = next((each for each in plan.stages if each.fingerprint == given.fingerprint), None)
    if parent and isinstance(parent.stage.method, Training) and parent.stage.method.produces == Kind.CHECKPOINT:
        return model_of(plan, parent)
    entry = Store(plan.pipeline.store).entry(given.name, given.fingerprint)
    return entry.output if entry.is_finished() else None
