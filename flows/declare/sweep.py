"""The ``sweep:`` section of the configuration: parameters, objectives, sampler, pruning."""

import re
from collections.abc import Mapping
from typing import Annotated, Literal

from annotated_types import Ge

from flows.declare.operation import strict
from lineage.errors import ConfigError

Direction = Literal["maximize", "minimize"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_UNTIL = "{until}"  # in the name of a field


@strict
class Objective:
    """An objective of a sweep: exactly one of ``metric`` and ``function``.

    Args:
        metric: ``STAGE/METRIC`` of a manifest, such as ``evaluate/dpo/preference_accuracy``.
        function: dotted path of a function of the trial's manifests: ``Mapping[stage, Manifest] -> float``.
    """

    direction: Direction
    metric: str | None = None
    function: str | None = None

    def __post_init__(self) -> None:
        if (self.metric is None) == (self.function is None):
            raise ConfigError(
                f"sweep.objectives: metric={self.metric} and function={self.function}; set one of them for each "
                "objective: metric=STAGE/METRIC, or function=package.module.name"
            )


@strict
class Pruning:
    """When a bad trial is stopped early.

    Args:
        pruner: ``_target_`` of an Optuna class, such as ``optuna.pruners.MedianPruner``, and its arguments.
        stage: the stage whose reports are compared.
        metric: the reported metric, such as ``loss``.
        direction: of this metric; may differ from that of the objective.
    """

    pruner: dict[str, object]
    stage: str
    metric: str
    direction: Direction


@strict
class Sweep:
    """The ``sweep:`` section.

    Args:
        name: name of the sweep's folder in the store; None: derived from the parameters.
        params: field -> values in Hydra's grammar: ``0.1,0.2``, ``choice(...)``, ``range(...)``, ``interval(a, b)``,
            ``int(interval(1, 9))``, ``tag(log, interval(1e-6, 1e-4))``; overrides of the command line are added.
        fixed: field -> value in Hydra's grammar, the same in every trial.
        until: last stage of a trial, which replaces ``{until}`` in the names of fields; None: all stages run.
        objectives: name -> objective; several give a Pareto front.
        sampler: ``_target_`` of an Optuna class and its arguments; None: every combination, in order.
        num_trials: total number of trials of a sampler.
        parallel: number of concurrent trials; None: as many as this machine admits.
        by_step: a metric that ``until`` reports, such as ``loss``, to be shown step by step in a table.
    """

    name: str | None
    params: Mapping[str, str]
    fixed: Mapping[str, str]
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
                "accepted, and the first must be a letter or a digit"
            )
        if self.sampler is None:
            for name, value in (("num_trials", self.num_trials), ("pruning", self.pruning)):
                if value is not None:
                    raise ConfigError(
                        f"sweep.{name}: is set without sweep.sampler, where every combination is tried to its end; "
                        f"set a sampler (sweep=optuna), or leave sweep.{name} out"
                    )
        elif not self.objectives or self.num_trials is None:
            lacking = (
                "num_trials=20" if self.objectives else "objectives.best={metric: STAGE/METRIC, direction: maximize}"
            )
            raise ConfigError(f"sweep.sampler: needs objectives and a number of trials; set sweep.{lacking}")
        if self.pruning and len(self.objectives) > 1:
            raise ConfigError(
                f"sweep.pruning: Optuna prunes by one objective, there are {len(self.objectives)}: "
                f"{', '.join(self.objectives)}; leave out pruning, or all objectives but one"
            )
        if self.by_step and self.until is None:
            raise ConfigError(f"sweep.by_step={self.by_step}: is reported by the stage sweep.until; set it")
        for name, fields in (("params", self.params), ("fixed", self.fixed)):
            object.__setattr__(self, name, {self._with_until(field): value for field, value in fields.items()})

    def _with_until(self, field: str) -> str:
        if _UNTIL in field and self.until is None:
            raise ConfigError(f"sweep: {field} names the last stage of a trial, which is not set; set sweep.until")
        return field.replace(_UNTIL, self.until or "")
