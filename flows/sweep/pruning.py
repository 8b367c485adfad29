"""Optuna's pruners on a metric that is reported while a stage runs. Imports Optuna."""

from optuna.pruners import BasePruner, NopPruner

from flows.sweep.settings import Sweep
from flows.sweep.target import build


def direction_sign(sweep: Sweep) -> int:
    """What a report is multiplied by before Optuna hears it.

    Optuna's pruners compare in the direction of the study, that of the objective: a loss that is to fall, in a sweep
    whose objective is to rise, is told as its negative.
    """
    assert sweep.pruning is not None
    (objective,) = sweep.objectives.values()
    return 1 if sweep.pruning.direction == objective.direction else -1


def make_pruner(sweep: Sweep) -> BasePruner:
    """The pruner that is stated; one that never prunes where none is."""
    if sweep.pruning is None:
        return NopPruner()
    node = dict(sweep.pruning.pruner)
    if direction_sign(sweep) < 0 and node.get("_target_") == "optuna.pruners.ThresholdPruner":
        bounds = {"lower": node.pop("upper", None), "upper": node.pop("lower", None)}  # of the negative
        node |= {name: -bound for name, bound in bounds.items() if isinstance(bound, int | float)}
    pruner = build(node, "sweep.pruning.pruner", BasePruner)
    assert isinstance(pruner, BasePruner)
    return pruner
