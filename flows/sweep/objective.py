"""The numbers that a finished trial is judged by; and what of a sweep is refused before any trial starts."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import cast

from flows.declare.config import dotted
from flows.declare.pipeline import nearest
from flows.declare.sweep import Objective, Sweep
from flows.sweep.dimension import Dimension
from flows.sweep.trial import Outcome
from lineage.errors import ArtifactError, ConfigError, PipelineError
from lineage.manifest import Manifest

Judge = Callable[[Mapping[str, Manifest]], float]


def judged(sweep: Sweep, outcome: Outcome) -> Outcome:
    """A complete trial with its objectives; a failed one where they cannot be had. Others stay what they are."""
    if outcome.state != "complete":
        return outcome
    try:
        values = {name: _value(name, each, outcome.manifests) for name, each in sweep.objectives.items()}
    except PipelineError as error:
        return replace(outcome, state="failed", cause=str(error))
    return replace(outcome, values=values)


def function_of(name: str, path: str) -> Judge:
    """The function that a dotted path names.

    Raises:
        ConfigError: there is none.
    """
    where = f"sweep.objectives.{name}.function"
    found = dotted(path, where)
    if not callable(found):
        raise ConfigError(
            f"{where}={path}: is no function; give one of the trial's manifests, by stage: it returns a number"
        )
    return cast(Judge, found)


def check_sweep(sweep: Sweep, space: Mapping[str, Dimension], stages: Sequence[str]) -> None:
    """Refuses what a sweep asks of trials that have only these stages.

    Raises:
        ConfigError: an objective or the pruning names another stage, an objective's function cannot be imported, or
            the sampler or the pruner cannot be built or draws from no such space.
    """
    for name, objective in sweep.objectives.items():
        if objective.function:
            function_of(name, objective.function)
        else:
            stage, slash, _ = str(objective.metric).partition("/")
            where = f"sweep.objectives.{name}.metric={objective.metric}"
            if not slash:
                raise ConfigError(f"{where}: is no metric of a stage; state STAGE/METRIC")
            _require_stage(where, stage, stages)
    if sweep.pruning:
        _require_stage(f"sweep.pruning.stage={sweep.pruning.stage}", sweep.pruning.stage, stages)
    if sweep.sampler is not None:
        from flows.sweep.sampling import try_out  # the import of optuna

        try_out(sweep, space)


def _require_stage(where: str, stage: str, stages: Sequence[str]) -> None:
    if stage not in stages:
        raise ConfigError(
            f"{where}: no trial runs a stage {stage}; they run: {', '.join(stages)}{nearest(stage, list(stages))}"
        )


def _value(name: str, objective: Objective, manifests: Mapping[str, Manifest]) -> float:
    if objective.function:
        value = _called(name, objective.function, manifests)
    else:
        value = _metric(str(objective.metric), manifests)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ArtifactError(f"objective {name} ({objective.metric or objective.function}) is {value}, no finite number")
    return float(value)


def _metric(metric: str, manifests: Mapping[str, Manifest]) -> float:
    stage = metric.partition("/")[0]
    found = {
        f"{made}/{each}": value for made, manifest in manifests.items() for each, value in manifest.metrics.items()
    }
    if metric not in found:
        of_stage = sorted(each for each in found if each.startswith(f"{stage}/")) or sorted(found)
        raise ArtifactError(
            f"no metric {metric}; there are: {', '.join(of_stage) or 'none'}{nearest(metric, of_stage)} "
            "(state one as sweep.objectives.NAME.metric)"
        )
    return found[metric]


def _called(name: str, path: str, manifests: Mapping[str, Manifest]) -> float:
    try:
        return function_of(name, path)(manifests)
    except Exception as error:  # whatever a function of the user's raises
        raise ArtifactError(f"objective {name} ({path}) raised {type(error).__name__}: {error}") from error
