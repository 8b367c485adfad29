"""The best trials of a sweep, and the page of Optuna's plots. Imports Optuna and plotly."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from html import escape
from pathlib import Path

import optuna
import plotly.io
from optuna import visualization
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.importance import get_param_importances
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState
from plotly.graph_objects import Figure
from plotly.offline import get_plotlyjs

from flows.declare.sweep import Sweep
from flows.sweep.folder import TrialResult, short_names
from flows.sweep.study import STATES, directions, report_sign, silence, stored_trials

_UNSET = "as declared"  # value of a field that only other trials set
_LOG_RATIO = 100  # ratio of high to low from which an axis is logarithmic
_MAX_CONTOURS = 6  # most parameters for contour plots
_OF_OBJECTIVE: dict[str, Callable[..., Figure]] = {
    "by trial": visualization.plot_optimization_history,
    "by parameter": visualization.plot_slice,
    "parallel coordinates": visualization.plot_parallel_coordinate,
    "by pairs of parameters": visualization.plot_contour,
}


def best_and_plots(sweep: Sweep, results: Sequence[TrialResult], folder: Path) -> tuple[list[int], str]:
    """Numbers of the best trials (one, or the Pareto front), and an HTML page of Optuna's plots."""
    silence()
    study = optuna.create_study(directions=directions(sweep))
    study.add_trials(_frozen(sweep, results, folder))
    best: list[FrozenTrial] = []
    if any(trial.state == TrialState.COMPLETE for trial in study.trials):
        best = [study.best_trial] if len(study.directions) == 1 else study.best_trials
    return sorted(trial.number for trial in best), _page(study, sweep, folder.name)


def _frozen(sweep: Sweep, results: Sequence[TrialResult], folder: Path) -> Iterator[FrozenTrial]:
    """The results as Optuna trials; failed and unfinished trials have no parameters."""
    reports = {each.number: each.intermediate_values for each in stored_trials(folder)} if sweep.pruning else {}
    ended = {each.number: each for each in results if each.state in STATES}
    fields = {field: None for each in ended.values() for field in each.params if not field.startswith("because.")}
    texts = {field: [each.params.get(field, _UNSET) for each in ended.values()] for field in fields}
    names, axes = short_names(fields), {field: _axis(found) for field, found in texts.items()}
    for number in range(max(ended, default=-1) + 1):
        result = ended.get(number)
        if result is None:
            yield optuna.create_trial(state=TrialState.FAIL)
            continue
        yield optuna.create_trial(
            state=STATES[result.state],
            values=[result.values[name] for name in sweep.objectives] if result.state == "complete" else None,
            params={names[field]: _on_axis(axis, result.params.get(field, _UNSET)) for field, axis in axes.items()},
            distributions={names[field]: axis for field, axis in axes.items()},
            intermediate_values=dict(reports.get(number, {})),
        )


def _axis(texts: Sequence[str]) -> BaseDistribution:
    """The axis of a parameter: numeric if all values are numbers, logarithmic if they span orders of magnitude."""
    try:
        numbers = [float(text) for text in texts]
    except ValueError:
        return CategoricalDistribution(tuple(dict.fromkeys(texts)))
    low, high = min(numbers), max(numbers)
    return FloatDistribution(low, high, log=low > 0 and high >= _LOG_RATIO * low)


def _on_axis(axis: BaseDistribution, text: str) -> object:
    return text if isinstance(axis, CategoricalDistribution) else float(text)


def _page(study: optuna.Study, sweep: Sweep, title: str) -> str:
    """All plots for which there are enough trials, with plotly included."""
    parts, left_out = [], []
    for name, draw in _plots(study, sweep):
        try:
            figure = draw()
            if not figure.data:
                raise ValueError("there are not enough trials for it")
        except (ValueError, RuntimeError) as error:
            left_out.append(f"<p>{escape(f'{name} is left out: {error}'.rstrip('.'))}.</p>")
        else:
            plot = plotly.io.to_html(figure, full_html=False, include_plotlyjs=False)
            parts.append(f"<h2>{escape(name)}</h2>{plot}")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>body{{font-family:sans-serif;margin:2em}}</style><script>{get_plotlyjs()}</script></head>"
        f"<body><h1>{escape(title)}</h1>{''.join([*parts, *left_out])}</body></html>\n"
    )


def _plots(study: optuna.Study, sweep: Sweep) -> Iterator[tuple[str, Callable[[], Figure]]]:
    """Title and drawing function of each plot."""
    names = list(sweep.objectives)
    if len(names) > 1:
        yield "Pareto front", lambda: visualization.plot_pareto_front(study, target_names=names)
    num_params = len({field for trial in study.trials for field in trial.params})
    for index, name in enumerate(names):
        # Without a target, which several objectives need, Optuna also marks the best trial.
        own = {"target": partial(_value, index)} if len(names) > 1 else {}
        for title, draw in _OF_OBJECTIVE.items():
            if draw != visualization.plot_contour or 2 <= num_params <= _MAX_CONTOURS:
                yield f"{name}: {title}", partial(draw, study, target_name=name, **own)
        yield f"{name}: importance of each parameter", partial(_importances, study, index, name)
    if sweep.pruning:
        negated = " (negated)" if report_sign(sweep) < 0 else ""
        title = f"{sweep.pruning.stage}/{sweep.pruning.metric}{negated} by step"
        yield title, lambda: visualization.plot_intermediate_values(study)


def _value(index: int, trial: FrozenTrial) -> float:
    return float(trial.values[index])


def _importances(study: optuna.Study, index: int, name: str) -> Figure:
    """How much each parameter contributes to good values of an objective."""
    sign = 1 if study.directions[index] == StudyDirection.MINIMIZE else -1

    def loss(trial: FrozenTrial) -> float:
        return sign * _value(index, trial)

    if not any(get_param_importances(study, target=loss, normalize=False).values()):
        raise ValueError("there are too few trials to tell the parameters apart")
    return visualization.plot_param_importances(study, target=loss, target_name=name)
