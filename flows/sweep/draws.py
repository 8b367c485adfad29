"""A space in Optuna's terms: distributions to draw from, and what is drawn as overrides. Imports Optuna."""

import math
from collections.abc import Mapping

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import Trial

from flows.sweep.dimension import Choices, Dimension, Interval, Steps


def distributions(space: Mapping[str, Dimension]) -> dict[str, BaseDistribution]:
    """Field -> what Optuna draws from."""
    return {field: _distribution(each) for field, each in space.items()}


def draw(trial: Trial, space: Mapping[str, Dimension]) -> dict[str, object]:
    """Lets a trial draw its parameters; those that it has stay what they are."""
    return {field: _draw(trial, field, each) for field, each in distributions(space).items()}


def num_combinations(space: Mapping[str, Dimension]) -> float:
    """How many different trials there are; infinite where a field has an interval of real numbers."""
    return math.prod(_count(each) for each in space.values())


def overrides_of(space: Mapping[str, Dimension], drawn: Mapping[str, object]) -> dict[str, str]:
    """Field -> value as an override states it."""
    return {field: _override(each, drawn[field]) for field, each in space.items()}


def drawn_from(space: Mapping[str, Dimension], params: Mapping[str, str]) -> dict[str, object]:
    """The reverse of ``overrides_of``."""
    return {field: _drawn(each, params[field]) for field, each in space.items()}


def _distribution(values: Dimension) -> BaseDistribution:
    if isinstance(values, Steps):
        if _is_whole(values):
            return IntDistribution(int(values.low), int(values.high), log=values.log, step=int(values.step))
        return FloatDistribution(values.low, values.high, step=values.step)
    if isinstance(values, Interval):
        if _is_whole(values):
            return IntDistribution(int(values.low), int(values.high), log=values.log)
        return FloatDistribution(values.low, values.high, log=values.log)
    return CategoricalDistribution(values.values)


def _draw(trial: Trial, field: str, given: BaseDistribution) -> object:
    if isinstance(given, FloatDistribution):
        return trial.suggest_float(field, given.low, given.high, step=given.step, log=given.log)
    if isinstance(given, IntDistribution):
        return trial.suggest_int(field, given.low, given.high, step=given.step, log=given.log)
    assert isinstance(given, CategoricalDistribution)
    return trial.suggest_categorical(field, given.choices)


def _is_whole(values: Steps | Interval) -> bool:
    return isinstance(values.low, int) and isinstance(values.high, int)


def _count(values: Dimension) -> float:
    if isinstance(values, Choices):
        return len(values.values)
    return values.high - values.low + 1 if _is_whole(values) else math.inf


def _override(values: Dimension, drawn: object) -> str:
    if isinstance(values, Steps):  # as the range itself states it: sums of steps differ in their last digits
        return min(values.values, key=lambda text: abs(float(text) - float(str(drawn))))
    return str(drawn)


def _drawn(values: Dimension, text: str) -> object:
    if isinstance(values, Steps | Interval):
        return int(text) if _is_whole(values) else float(text)
    return text
