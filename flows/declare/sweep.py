"""What ``sweep:`` in the configuration states: which fields vary, what is to be best, who proposes the next trial."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge

from lineage.errors import ConfigError

Direction = Literal["maximize", "minimize"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A number that a trial is judged by: exactly one of ``metric`` and ``function``.

    Args:
        metric: ``STAGE/METRIC`` of a manifest, such as ``evaluate/dpo/preference_accuracy``.
        function: dotted path of a function of the trial's manifests: ``Mapping[stage, Manifest] -> float``.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True}

    direction: Direction
    metric: str | None = None
    function: str | None = None

    def __post_init__(self) -> None:
        if (self.metric is None) == (self.function is None):
            raise ConfigError(
                f"sweep.objectives: metric={self.metric} and function={self.function}; state one of them for each "
                "objective: metric=STAGE/METRIC, or function=package.module.name"
            )


@dataclass(frozen=True, kw_only=True)
class Pruning:
    """When a trial that goes badly is ended early.

    Args:
        pruner: ``_target_`` of a class of Optuna's, such as ``optuna.pruners.MedianPruner``, and its arguments.
        stage: whose reports are compared.
        metric: which of them, such as ``loss``.
        direction: of this metric; the objective may have the other one.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True}

    pruner: dict[str, object]
    stage: str
    metric: str
    direction: Direction


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What ``sweep:`` states.

    Args:
        name: of the sweep's folder in the store; None: derived from all that it tries.
        params: field -> values in Hydra's grammar: ``0.1,0.2``, ``choice(...)``, ``range(...)``, ``interval(a, b)``,
            ``int(interval(1, 9))``, ``tag(log, interval(1e-6, 1e-4))``; those of the command line are added.
        fixed: field -> value in Hydra's grammar, the same in every trial.
        until: the stage that a trial ends with; None: all of them. ``{until}`` in a field's name stands for it.
        objectives: name -> what is to be best; several have a Pareto front.
        sampler: ``_target_`` of a class of Optuna's and its arguments; None: every combination, in order.
        num_trials: how many a sampler proposes in all.
        parallel: how many trials are under way at once; None: as many as this machine admits.
        by_step: a metric that ``until`` reports while it runs, such as ``loss``, to be tabled step by step.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True}

    name: str | None
    params: Mapping[str, str]
    fixed: Mapping[str, str | int | float | bool | None]
    until: str | None
    objectives: Mapping[str, Objective]
    sampler: dict[str, object] | None
    pruning: Pruning | None
    num_trials: Annotated[int, Ge(1)] | None
    parallel: Annotated[int, Ge(1)] | None
    by_step: str | None = None

    def __post_init__(self) -> None:
        if self.name is not None and not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"sweep.name={self.name}: names a directory of the store; letters, digits, '_', '-' and '.' are "
                "accepted, and not one of the signs first"
            )
        if self.sampler is None:
            for name, value in (("num_trials", self.num_trials), ("pruning", self.pruning)):
                if value is not None:
                    raise ConfigError(
                        f"sweep.{name}: is stated without sweep.sampler, where every combination is tried to its end; "
                        f"state a sampler (sweep=optuna), or leave sweep.{name} out"
                    )
        elif not self.objectives or self.num_trials is None:
            lacking = (
                "num_trials=20" if self.objectives else "objectives.best={metric: STAGE/METRIC, direction: maximize}"
            )
            raise ConfigError(
                f"sweep.sampler: proposes trials by their objectives, so many in all; state sweep.{lacking}"
            )
        if self.pruning and len(self.objectives) > 1:
            raise ConfigError(
                f"sweep.pruning: Optuna prunes by one objective, there are {len(self.objectives)}: "
                f"{', '.join(self.objectives)}; leave out pruning, or all objectives but one"
            )
        if self.by_step and self.until is None:
            raise ConfigError(f"sweep.by_step={self.by_step}: is reported by the stage sweep.until; state it")
