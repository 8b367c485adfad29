"""The trials of a sweep as a study of Optuna's, for its plots and its Pareto front. Imports Optuna and plotly."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import optuna
import plotly.io
from optuna import visualization
from optuna.importance import get_param_importances
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState
from plotly.graph_objects import Figure
from plotly.offline import get_plotlyjs

from flows.declare.sweep import Sweep
from flows.sweep.dimension import Dimension, Interval, Steps
from flows.sweep.draws import distributions, drawn_from
from flows.sweep.folder import Row
from flows.sweep.sampling import direction_sign, directions, silence
from flows.sweep.space import short_names
from flows.sweep.study import load_reports

_STATES = {"complete": TrialState.COMPLETE, "pruned": TrialState.PRUNED}
_ORDERS = 100  # high over low, from which an axis is logarithmic
_MOST_CONTOURS = 6  # parameters; more make a page of specks


@dataclass(frozen=True, kw_only=True)
class Plot:
    """One plot: its title, and who draws it."""

    title: str
    draw: Callable[[], Figure]


def study_of(sweep: Sweep, space: Mapping[str, Dimension], rows: Sequence[Row], folder: Path) -> optuna.Study:
    """The trials in memory, with their numbers; those that failed or have not ended have no parameters."""
    silence()
    study = optuna.create_study(directions=directions(sweep))
    reports = load_reports(folder) if sweep.pruning else {}
    ended = {row.number: row for row in rows if row.state in _STATES}
    for number in range(max(ended, default=-1) + 1):
        row = ended.get(number)
        frozen = (
            _frozen(sweep, space, row, reports.get(number, {})) if row else optuna.create_trial(state=TrialState.FAIL)
        )
        study.add_trial(frozen)
    return study


def best_numbers(study: optuna.Study) -> list[int]:
    """Of the best trial; with several objectives, of all on the Pareto front."""
    if not any(trial.state == TrialState.COMPLETE for trial in study.trials):
        return []
    best = [study.best_trial] if len(study.directions) == 1 else study.best_trials
    return sorted(trial.number for trial in best)


def page(study: optuna.Study, sweep: Sweep, title: str) -> str:
    """One page with every plot that these trials are enough for; plotly is part of it, nothing is fetched."""
    drawn, left_out = [], []
    for plot in _plots(study, sweep):
        try:
            figure = plot.draw()
        except (ValueError, RuntimeError) as error:
            left_out.append(f"{plot.title} is left out: {str(error).rstrip('.')}.")
            continue
        if not figure.data:
            left_out.append(f"{plot.title} is left out: these trials are not enough for it.")
            continue
        drawn.append(
            f"<h2>{escape(plot.title)}</h2>{plotly.io.to_html(figure, full_html=False, include_plotlyjs=False)}"
        )
    sentences = "".join(f"<p>{escape(sentence)}</p>" for sentence in left_out)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        "<style>body{font-family:sans-serif;margin:2em}</style>"
        f"<script>{get_plotlyjs()}</script></head><body><h1>{escape(title)}</h1>{''.join(drawn)}{sentences}</body></html>\n"
    )


def _frozen(sweep: Sweep, space: Mapping[str, Dimension], row: Row, reports: Mapping[int, float]) -> FrozenTrial:
    names = short_names(space)
    shown = {names[field]: _shown(each) for field, each in space.items()}
    return optuna.create_trial(
        state=_STATES[row.state],
        values=[row.values[name] for name in sweep.objectives] if row.state == "complete" else None,
        params=drawn_from(shown, {names[field]: value for field, value in row.params.items()}),
        distributions=distributions(shown),
        intermediate_values=dict(reports),
    )


def _shown(values: Dimension) -> Dimension:
    """Choices that are all numbers have an axis of numbers; a logarithmic one where they span orders of magnitude."""
    if isinstance(values, Interval):
        return values
    if isinstance(values, Steps):
        return Interval(low=values.low, high=values.high, log=values.log)
    try:
        numbers = [float(text) for text in values.values]
    except ValueError:
        return values
    low, high = min(numbers), max(numbers)
    return Interval(low=low, high=high, log=low > 0 and high >= _ORDERS * low)


def _plots(study: optuna.Study, sweep: Sweep) -> Iterator[Plot]:
    if len(sweep.objectives) > 1:
        names = list(sweep.objectives)
        yield Plot(title="Pareto front", draw=lambda: visualization.plot_pareto_front(study, target_names=names))
    for index, name in enumerate(sweep.objectives):
        yield from _plots_of(study, index, name)
    if sweep.pruning:
        negated = " (negated)" if direction_sign(sweep) < 0 else ""
        title = f"{sweep.pruning.stage}/{sweep.pruning.metric}{negated} by step"
        yield Plot(title=title, draw=lambda: visualization.plot_intermediate_values(study))


def _importances(study: optuna.Study, index: int, name: str) -> Figure:
    """How much each parameter does for good values of an objective."""

    def loss(trial: FrozenTrial) -> float:
        sign = 1 if study.directions[index] == StudyDirection.MINIMIZE else -1
        return sign * float(trial.values[index])

    found = get_param_importances(study, target=loss, normalize=False)
    if len(found) == 1:
        raise ValueError("only one parameter varies")
    if not any(found.values()):
        raise ValueError("these trials are too few to tell the parameters apart")
    return visualization.plot_param_importances(study, target=loss, target_name=name)


def _plots_of(study: optuna.Study, index: int, name: str) -> Iterator[Plot]:
    """The plots of one objective."""

    def value(trial: FrozenTrial) -> float:
        return float(trial.values[index])

    def plot(title: str, draw: Callable[..., Figure]) -> Plot:
        if len(study.directions) == 1:  # without a target, Optuna also marks which is the best
            return Plot(title=f"{name}: {title}", draw=lambda: draw(study, target_name=name))
        return Plot(title=f"{name}: {title}", draw=lambda: draw(study, target=value, target_name=name))

    yield plot("by trial", visualization.plot_optimization_history)
    yield Plot(title=f"{name}: importance of each parameter", draw=lambda: _importances(study, index, name))
    yield plot("by parameter", visualization.plot_slice)
    yield plot("parallel coordinates", visualization.plot_parallel_coordinate)
    if 2 <= len({field for trial in study.trials for field in trial.params}) <= _MOST_CONTOURS:
        yield plot("by pairs of parameters", visualization.plot_contour)
