"""Optuna: samplers and pruners, the resumable study of a sweep, and the page of plots. Imports Optuna."""

import contextlib
import inspect
import logging
import math
import os
import shutil
import socket
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path

import optuna
import plotly.io
from filelock import FileLock
from optuna import visualization
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.importance import get_param_importances
from optuna.pruners import BasePruner, NopPruner
from optuna.samplers import BaseSampler
from optuna.samplers.nsgaii import BaseCrossover, BaseMutation
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState
from plotly.graph_objects import Figure
from plotly.offline import get_plotlyjs

from flows.declare.config import target_class
from flows.declare.pipeline import listed
from flows.declare.sweep import Direction, Sweep
from flows.sweep.folder import TrialResult, short_names
from flows.sweep.space import Values
from lineage.errors import ConfigError
from lineage.lock import Lock, owner

logger = logging.getLogger(__name__)

_STUDY = "sweep"  # the name of the study; the database has no other
_OWNER, _FAILURES = "owner", "failures"
_MAX_FAILURES = 2  # attempts of a failing trial, each in another run of the sweep
# With these samplers all trials share one sequence, and so one seed.
_ONE_SEQUENCE = ("optuna.samplers.QMCSampler", "optuna.samplers.GridSampler")
# Classes of objects that samplers and pruners take as arguments.
_PARTS = (BaseSampler, BasePruner, BaseCrossover, BaseMutation)
_STATES = {"complete": TrialState.COMPLETE, "pruned": TrialState.PRUNED}
_LOG_RATIO = 100  # ratio of high to low from which an axis is logarithmic
_MAX_CONTOURS = 6  # most parameters for contour plots
_OF_OBJECTIVE: dict[str, Callable[..., Figure]] = {
    "by trial": visualization.plot_optimization_history,
    "by parameter": visualization.plot_slice,
    "parallel coordinates": visualization.plot_parallel_coordinate,
    "by pairs of parameters": visualization.plot_contour,
}


def try_out(sweep: Sweep, space: Mapping[str, Values]) -> None:
    """Checks a sweep by building sampler and pruner and drawing once.

    Raises:
        ConfigError: Optuna refuses the sampler, the pruner or this space.
    """
    _silence()
    _pruner(sweep)
    study = optuna.create_study(sampler=_sampler(sweep, 0), directions=_directions(sweep))
    try:
        _draw(study.ask(), space)
    except Exception as error:  # a sampler of Optuna's or of the user's may raise anything
        raise ConfigError(
            f"sweep.sampler: {(sweep.sampler or {})['_target_']} cannot draw from this space ({error}); "
            "choose another sampler, such as optuna.samplers.TPESampler"
        ) from error


def _sampler(sweep: Sweep, number: int) -> BaseSampler:
    """The sampler for one trial, with its own seed, so that a resumed sweep does not repeat draws."""
    node = dict(sweep.sampler or {})
    seed = node.get("seed")
    if isinstance(seed, int) and node.get("_target_") not in _ONE_SEQUENCE:
        node["seed"] = seed + number
    sampler = _build(node, "sweep.sampler", (BaseSampler,))
    assert isinstance(sampler, BaseSampler)
    return sampler


def _pruner(sweep: Sweep) -> BasePruner:
    if sweep.pruning is None:
        return NopPruner()
    node = dict(sweep.pruning.pruner)
    if _sign(sweep) < 0 and node.get("_target_") == "optuna.pruners.ThresholdPruner":
        bounds = {"lower": node.pop("upper", None), "upper": node.pop("lower", None)}  # reports are negated
        node |= {name: -bound for name, bound in bounds.items() if isinstance(bound, int | float)}
    pruner = _build(node, "sweep.pruning.pruner", (BasePruner,))
    assert isinstance(pruner, BasePruner)
    return pruner


def _build(node: Mapping[str, object], where: str, bases: tuple[type, ...]) -> object:
    """An instance of the class that ``_target_`` names; arguments with a ``_target_`` are built first."""
    target = str(node.get("_target_"))
    refusal = f"is not an optuna {' or '.join(base.__name__ for base in bases)}"
    cls = target_class(target, f"{where}._target_", bases, refusal)
    if inspect.isabstract(cls):
        raise ConfigError(f"{where}._target_={target}: {refusal}")
    accepted = [name for name in inspect.signature(cls).parameters if name not in ("args", "kwargs")]
    arguments: dict[str, object] = {}
    for name, value in node.items():
        if name == "_target_":
            continue
        if name not in accepted:
            raise ConfigError(f"{where}.{name}: unknown argument of {target}; accepted: {listed(name, accepted)}")
        if isinstance(value, Mapping) and "_target_" in value:
            arguments[name] = _build(value, f"{where}.{name}", _PARTS)
        else:
            arguments[name] = value
    try:
        built: object = cls(**arguments)
    except Exception as error:  # a class of Optuna's or of the user's may raise anything
        raise ConfigError(f"{where}: {target} does not take {arguments} ({error})") from error
    return built


def _sign(sweep: Sweep) -> int:
    """Factor for reports: Optuna's pruners compare in the direction of the objective, not of the metric."""
    assert sweep.pruning is not None
    (objective,) = sweep.objectives.values()
    return 1 if sweep.pruning.direction == objective.direction else -1


def _directions(sweep: Sweep) -> list[Direction]:
    return [each.direction for each in sweep.objectives.values()]


def _silence() -> None:
    """Silences Optuna's notices, but not its errors."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", module=r"optuna\.")
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)  # attributed to the caller


def _draw(trial: optuna.Trial, space: Mapping[str, Values]) -> dict[str, str]:
    """Draws the parameters of a trial as override values; parameters that it has already are kept."""
    return {field: _text(values, _drawn(trial, field, values)) for field, values in space.items()}


def _drawn(trial: optuna.Trial, field: str, values: Values) -> object:
    if values.low is None:
        return trial.suggest_categorical(field, values.choices)
    if values.is_whole:
        return trial.suggest_int(field, int(values.low), int(values.high), step=int(values.step or 1), log=values.log)
    return trial.suggest_float(field, values.low, values.high, step=values.step, log=values.log)


def _text(values: Values, drawn: object) -> str:
    if values.low is not None and values.choices:  # the text of the range: summed steps differ in the last digits
        return min(values.choices, key=lambda text: abs(float(text) - float(str(drawn))))
    return str(drawn)


class Study:
    """Proposes ``sweep.num_trials`` trials in total, over all processes that open the study.

    A trial whose process was killed, or that failed, stays open: the next process gets it first, with its number and
    parameters. A second failure is reported to Optuna. SQLite survives kills and serves several processes.

    Args:
        folder: of the sweep.
    """

    def __init__(self, sweep: Sweep, space: Mapping[str, Values], folder: Path) -> None:
        assert sweep.num_trials is not None
        self._sweep, self._space, self._num_trials = sweep, space, sweep.num_trials
        self._owners, self._me = folder / "processes", f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._running: dict[int, optuna.Trial] = {}
        self._steps: dict[int, set[int]] = {}  # trial of this process -> reported steps
        self._other_metrics: set[str] = set()  # reported by the pruning stage instead of the pruning metric
        self._has_warned = False
        self._lock = FileLock(folder / "study.lock", thread_local=False)
        _silence()
        with self._lock:  # two processes must not create one database at once
            self._study = optuna.create_study(
                storage=_storage(folder), study_name=_STUDY, load_if_exists=True, directions=_directions(sweep),
                pruner=_pruner(sweep),
            )  # fmt: skip

    @contextlib.contextmanager
    def owning(self) -> Iterator[None]:
        """Holds a lock that shows other processes that the trials of this one are not abandoned."""
        directory = self._owners / self._me
        lock = Lock(directory)
        lock.try_acquire()
        try:
            with lock.holding():
                yield
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def ask(self) -> tuple[int, dict[str, str]] | None:
        """Number and parameters of the next trial; None: there are no more."""
        with self._lock:
            trials = self._study.get_trials(deepcopy=False)
            left = next((each for each in trials if self._is_abandoned(each)), None)
            if left is None and (len(trials) >= self._num_trials or self._is_exhausted(trials)):
                return None
            number = left.number if left else len(trials)
            self._study.sampler = _sampler(self._sweep, number)
            asked = optuna.Trial(self._study, left._trial_id) if left else self._study.ask()
            params = _draw(asked, self._space)
            asked.set_user_attr(_OWNER, self._me)
            self._running[number] = asked
            self._steps[number] = set(left.intermediate_values) if left else set()
            return number, params

    def report(self, number: int, step: int, metrics: Mapping[str, float]) -> bool:
        """Reports the metrics of the pruning stage at a step; returns whether the trial is to be pruned."""
        assert self._sweep.pruning is not None
        metric, asked = self._sweep.pruning.metric, self._running[number]
        if metric not in metrics:
            self._other_metrics |= metrics.keys()
            return False
        if step not in self._steps[number]:  # a resumed stage repeats steps
            self._steps[number].add(step)
            asked.report(_sign(self._sweep) * metrics[metric], step)
        return asked.should_prune()

    def tell(self, result: TrialResult) -> None:
        """Reports the end of a trial."""
        asked = self._running.pop(result.number)
        self._warn_of_metric(result.number)
        if result.state == "complete":
            self._end(asked, TrialState.COMPLETE, [result.values[name] for name in self._sweep.objectives])
        elif result.state == "pruned":
            self._end(asked, TrialState.PRUNED, None)
        else:
            failures = asked.user_attrs.get(_FAILURES, 0) + 1
            asked.set_user_attr(_FAILURES, failures)
            asked.set_user_attr(_OWNER, None)
            if failures == _MAX_FAILURES:  # before that it stays open, since the cause may be fixed
                self._end(asked, TrialState.FAIL, None)

    def _warn_of_metric(self, number: int) -> None:
        pruning, found = self._sweep.pruning, sorted(self._other_metrics)
        if pruning and found and not self._steps[number] and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "sweep.pruning.metric=%s: %s reports no such metric, so nothing is pruned; it reports: %s",
                pruning.metric, pruning.stage, listed(pruning.metric, found),
            )  # fmt: skip

    def _end(self, asked: optuna.Trial, state: TrialState, values: list[float] | None) -> None:
        try:
            self._study.tell(asked, values, state, skip_if_finished=True)
        except RuntimeError:  # some samplers try to stop Optuna's own loop, which is not used here
            if not self._study.get_trials(deepcopy=False)[asked.number].state.is_finished():
                raise

    def _is_abandoned(self, trial: FrozenTrial) -> bool:
        """Whether no process runs an open trial."""
        if trial.state != TrialState.RUNNING or trial.number in self._steps:
            return False
        process = trial.user_attrs.get(_OWNER)
        return process is None or owner(self._owners / process) is None

    def _is_exhausted(self, trials: Iterable[FrozenTrial]) -> bool:
        drawn = (each.params for each in trials if each.params.keys() == self._space.keys())
        texts = {tuple(_text(values, params[field]) for field, values in self._space.items()) for params in drawn}
        return len(texts) >= math.prod(values.count() for values in self._space.values())


def _storage(folder: Path) -> optuna.storages.RDBStorage:
    url = f"sqlite:///{folder / 'study.db'}"
    return optuna.storages.RDBStorage(url, engine_kwargs={"connect_args": {"timeout": 60}})


def best_and_plots(
    sweep: Sweep, space: Mapping[str, Values], results: Sequence[TrialResult], folder: Path
) -> tuple[list[int], str]:
    """Numbers of the best trials (one, or the Pareto front), and an HTML page of Optuna's plots."""
    _silence()
    study = optuna.create_study(directions=_directions(sweep))
    study.add_trials(_frozen(sweep, space, results, folder))
    best: list[FrozenTrial] = []
    if any(trial.state == TrialState.COMPLETE for trial in study.trials):
        best = [study.best_trial] if len(study.directions) == 1 else study.best_trials
    return sorted(trial.number for trial in best), _page(study, sweep, folder.name)


def _frozen(
    sweep: Sweep, space: Mapping[str, Values], results: Iterable[TrialResult], folder: Path
) -> Iterator[FrozenTrial]:
    """The results as Optuna trials; failed and unfinished trials have no parameters."""
    reports: dict[int, dict[int, float]] = {}
    if sweep.pruning:
        stored = optuna.load_study(study_name=_STUDY, storage=_storage(folder))
        reports = {trial.number: trial.intermediate_values for trial in stored.get_trials(deepcopy=False)}
    names, axes = short_names(space), {field: _axis(values) for field, values in space.items()}
    ended = {each.number: each for each in results if each.state in _STATES}
    for number in range(max(ended, default=-1) + 1):
        result = ended.get(number)
        if result is None:
            yield optuna.create_trial(state=TrialState.FAIL)
            continue
        yield optuna.create_trial(
            state=_STATES[result.state],
            values=[result.values[name] for name in sweep.objectives] if result.state == "complete" else None,
            params={names[field]: _on_axis(axis, result.params[field]) for field, axis in axes.items()},
            distributions={names[field]: axis for field, axis in axes.items()},
            intermediate_values=dict(reports.get(number, {})),
        )


def _axis(values: Values) -> BaseDistribution:
    """The axis of a parameter: numeric if all choices are numbers, logarithmic if they span orders of magnitude."""
    if values.low is None:
        try:
            numbers = [float(text) for text in values.choices]
        except ValueError:
            return CategoricalDistribution(values.choices)
        low, high = min(numbers), max(numbers)
        return FloatDistribution(low, high, log=low > 0 and high >= _LOG_RATIO * low)
    if values.is_whole:
        return IntDistribution(int(values.low), int(values.high), log=values.log)
    return FloatDistribution(values.low, values.high, log=values.log)


def _on_axis(axis: BaseDistribution, text: str) -> object:
    return text if isinstance(axis, CategoricalDistribution) else axis.to_external_repr(float(text))


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
        negated = " (negated)" if _sign(sweep) < 0 else ""
        title = f"{sweep.pruning.stage}/{sweep.pruning.metric}{negated} by step"
        yield title, lambda: visualization.plot_intermediate_values(study)


def _value(index: int, trial: FrozenTrial) -> float:
    return float(trial.values[index])


def _importances(study: optuna.Study, index: int, name: str) -> Figure:
    """How much each parameter contributes to good values of an objective."""
    sign = 1 if study.directions[index] == StudyDirection.MINIMIZE else -1

    def loss(trial: FrozenTrial) -> float:
        return sign * _value(index, trial)

    found = get_param_importances(study, target=loss, normalize=False)
    if len(found) == 1:
        raise ValueError("only one parameter varies")
    if not any(found.values()):
        raise ValueError("there are too few trials to tell the parameters apart")
    return visualization.plot_param_importances(study, target=loss, target_name=name)
