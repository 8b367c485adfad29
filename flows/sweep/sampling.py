"""The sampler and the pruner of Optuna's that a sweep states: built, and tried out. Imports Optuna."""

import warnings
from collections.abc import Mapping

import optuna
from optuna.pruners import BasePruner, NopPruner
from optuna.samplers import BaseSampler
from optuna.samplers.nsgaii import BaseCrossover, BaseMutation

from flows.declare.sweep import Direction, Sweep
from flows.sweep.dimension import Dimension
from flows.sweep.draws import draw
from flows.sweep.target import build
from lineage.errors import ConfigError

# Their seed stands for one sequence, of which each trial is a member.
_ONE_SEQUENCE = ("optuna.samplers.QMCSampler", "optuna.samplers.GridSampler")

# What an argument of a sampler or a pruner may be built from.
_PARTS = (BaseSampler, BasePruner, BaseCrossover, BaseMutation)


def make_sampler(sweep: Sweep, number: int) -> BaseSampler:
    """The sampler for one trial, with a seed of its own: a continued sweep must not draw the same again."""
    node = dict(sweep.sampler or {})
    seed = node.get("seed")
    if isinstance(seed, int) and node.get("_target_") not in _ONE_SEQUENCE:
        node["seed"] = seed + number
    sampler = build(node, "sweep.sampler", (BaseSampler,), _PARTS)
    assert isinstance(sampler, BaseSampler)
    return sampler


def make_pruner(sweep: Sweep) -> BasePruner:
    """The pruner that is stated; one that never prunes where none is."""
    if sweep.pruning is None:
        return NopPruner()
    node = dict(sweep.pruning.pruner)
    if direction_sign(sweep) < 0 and node.get("_target_") == "optuna.pruners.ThresholdPruner":
        bounds = {"lower": node.pop("upper", None), "upper": node.pop("lower", None)}  # of the negative
        node |= {name: -bound for name, bound in bounds.items() if isinstance(bound, int | float)}
    pruner = build(node, "sweep.pruning.pruner", (BasePruner,), _PARTS)
    assert isinstance(pruner, BasePruner)
    return pruner


def direction_sign(sweep: Sweep) -> int:
    """What a report is multiplied by before Optuna hears it.

    Optuna's pruners compare in the direction of the study, that of the objective: a loss that is to fall, in a sweep
    whose objective is to rise, is told as its negative.
    """
    assert sweep.pruning is not None
    (objective,) = sweep.objectives.values()
    return 1 if sweep.pruning.direction == objective.direction else -1


def directions(sweep: Sweep) -> list[Direction]:
    """Of the objectives."""
    return [each.direction for each in sweep.objectives.values()]


def try_out(sweep: Sweep, space: Mapping[str, Dimension]) -> None:
    """Builds both, and lets the sampler draw from this space once, in a study of no consequence.

    Raises:
        ConfigError: Optuna refuses the sampler, the pruner or this space.
    """
    silence()
    make_pruner(sweep)
    study = optuna.create_study(sampler=make_sampler(sweep, 0), directions=directions(sweep))
    try:
        draw(study.ask(), space)
    except Exception as error:  # whatever a sampler of Optuna's or of the user's raises
        raise ConfigError(
            f"sweep.sampler: {(sweep.sampler or {})['_target_']} cannot draw from this space ({error}); "
            "take another sampler, such as optuna.samplers.TPESampler"
        ) from error


def silence() -> None:
    """Keeps Optuna's notes, on trials and on plots, out of the progress of a run; its errors still come."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", module=r"optuna\.")
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)  # laid at our door
