"""What a run's note says of stages that have not begun."""

from collections.abc import Sequence
from dataclasses import replace

from flows.planning.needs import asks
from flows.planning.plan import Plan, PlannedStage
from flows.progress.run_notes import StageNote


def expected(plan: Plan, stages: Sequence[PlannedStage], own: Sequence[str], now: float) -> dict[str, StageNote]:
    """Of the stages that a run is to make, each with those that come before it.

    Args:
        own: names of those that trials own, which are shown when they begin.
        now: in seconds since the epoch.
    """
    names = list(dict.fromkeys(planned.name for planned in stages))
    before = {planned.name: plan.waits(planned) for planned in stages if planned.name not in own}
    return {
        name: replace(blank(plan, name, now), after=[other for other in names if other in waits])
        for name, waits in before.items()
    }


def blank(plan: Plan, title: str, now: float) -> StageNote:
    """What the plan says of a stage; of one that only a trial of a sweep has, by the stage's name."""
    name = title.partition("#")[0]
    planned = next((each for each in plan.stages if each.name == name), None)
    if planned is None:
        return StageNote(state="pending", since=now, directory="")
    cpus, gpus = asks(planned)
    workers = planned.stage.resources.num_workers if planned.stage.method.trains else 1
    directory = str(plan.entry(planned).path) if title == name else ""
    return StageNote(state="pending", since=now, workers=workers, cpus=cpus, gpus=gpus, directory=directory)
