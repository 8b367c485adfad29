"""Optuna: samplers and pruners, and the resumable study of a sweep. Imports Optuna."""

import contextlib
import inspect
import logging
import math
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

import optuna
from filelock import FileLock, Timeout
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from optuna.pruners import BasePruner, NopPruner
from optuna.samplers import BaseSampler
from optuna.samplers.nsgaii import BaseCrossover, BaseMutation
from optuna.trial import FrozenTrial, TrialState

from flows.declare.pipeline import listed
from flows.declare.sweep import Direction, Sweep
from flows.sweep.folder import TrialResult, folder_lock
from flows.sweep.space import categories, choices, exact, numbers
from lineage.code import target_class
from lineage.errors import ConfigError

logger = logging.getLogger(__name__)

_STUDY = "sweep"  # the name of the study; the database has no other
STATES = {"complete": TrialState.COMPLETE, "pruned": TrialState.PRUNED}
# With these samplers all trials share one sequence, and so one seed.
_ONE_SEQUENCE = ("optuna.samplers.QMCSampler", "optuna.samplers.GridSampler")
# Classes of objects that samplers and pruners take as arguments.
_PARTS = (BaseSampler, BasePruner, BaseCrossover, BaseMutation)


def try_out(sweep: Sweep, space: Mapping[str, Override]) -> None:
    """Checks a sweep by building sampler and pruner and drawing once.

    Raises:
        ConfigError: Optuna refuses the sampler, the pruner or this space.
    """
    silence()
    _pruner(sweep)
    study = optuna.create_study(sampler=_sampler(sweep, 0), directions=directions(sweep))
    try:
        _draw(study.ask(), space)
    except Exception as error:  # a sampler of Optuna's or of the user's may raise anything
        raise ConfigError(
            f"sweep.sampler: {(sweep.sampler or {})['_target_']} cannot draw from this space ({error}); "
            "correct the values, or choose another sampler, such as optuna.samplers.TPESampler"
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
    if report_sign(sweep) < 0 and node.get("_target_") == "optuna.pruners.ThresholdPruner":
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
    arguments = {
        name: _build(value, f"{where}.{name}", _PARTS) if isinstance(value, Mapping) and "_target_" in value else value
        for name, value in node.items()
        if name != "_target_"
    }
    try:
        built: object = cls(**arguments)
    except Exception as error:  # a class of Optuna's or of the user's may raise anything
        accepted = ", ".join(name for name in inspect.signature(cls).parameters if name not in ("args", "kwargs"))
        raise ConfigError(f"{where}: {target} does not take {arguments} ({error}); accepted: {accepted}") from error
    return built


def report_sign(sweep: Sweep) -> int:
    """Factor for reports: Optuna's pruners compare in the direction of the objective, not of the metric."""
    assert sweep.pruning is not None
    (objective,) = sweep.objectives.values()
    return 1 if sweep.pruning.direction == objective.direction else -1


def directions(sweep: Sweep) -> list[Direction]:
    """Those of the objectives."""
    return [each.direction for each in sweep.objectives.values()]


def silence() -> None:
    """Silences Optuna's notices, but not its errors."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", module=r"optuna\.|flows\.sweep\.study")  # such as: a resumed stage repeats steps
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)  # attributed to the caller


def _draw(trial: optuna.Trial, space: Mapping[str, Override]) -> dict[str, str]:
    """Draws the parameters of a trial as override values; parameters that it has already are kept."""
    return {field: _drawn(trial, field, values) for field, values in space.items()}


def _drawn(trial: optuna.Trial, field: str, values: Override) -> str:
    value, step = values.value(), None
    if isinstance(value, IntervalSweep):
        low, high = value.start, value.end
    elif isinstance(value, RangeSweep):
        low, high, step = min(numbers(value)), max(numbers(value)), abs(exact(value.step))
    else:
        texts = choices(values)
        names = categories(texts)
        return texts[names.index(str(trial.suggest_categorical(field, names)))]
    assert low is not None and high is not None
    log = "log" in value.tags
    if isinstance(low, int):
        return str(trial.suggest_int(field, low, int(high), step=int(step or 1), log=log))
    drawn = trial.suggest_float(field, low, high, step=step, log=log)
    return str(exact(drawn) if step else drawn)


def _count(values: Override) -> float:
    """Number of values; may be infinite."""
    value = values.value()
    if isinstance(value, IntervalSweep):
        return value.end - value.start + 1 if isinstance(value.start, int) and value.end else math.inf
    return len(choices(values))


class Study:
    """Proposes ``sweep.num_trials`` trials in total, over all processes that open the study.

    A trial whose process was killed, or that failed, stays open: the next run gets it first, with its number and
    parameters. SQLite survives kills and serves several processes; each locks its running trials.

    Args:
        folder: of the sweep.
    """

    def __init__(self, sweep: Sweep, space: Mapping[str, Override], folder: Path) -> None:
        assert sweep.num_trials is not None
        self._sweep, self._space, self._num_trials, self._folder = sweep, space, sweep.num_trials, folder
        self._asked: dict[int, optuna.Trial] = {}  # the trials of this process
        self._locks: dict[int, FileLock] = {}  # of its running trials
        self._has_metric = False  # whether the pruning stage has reported the pruning metric
        self._other_metrics: set[str] = set()  # that it reported instead
        silence()
        with folder_lock(folder):  # two processes must not create one database at once
            self._study = optuna.create_study(
                storage=_storage(folder), study_name=_STUDY, load_if_exists=True, directions=directions(sweep),
                pruner=_pruner(sweep),
            )  # fmt: skip

    def ask(self) -> tuple[int, dict[str, str]] | None:
        """Number and parameters of the next trial; None: there are no more."""
        with folder_lock(self._folder):
            trials = self._study.get_trials(deepcopy=False)
            left = next((each for each in trials if each.state == TrialState.RUNNING and self._own(each.number)), None)
            if left is None and (len(trials) >= self._num_trials or self._is_exhausted(trials)):
                return None
            number = left.number if left else len(trials)
            self._study.sampler = _sampler(self._sweep, number)
            asked = optuna.Trial(self._study, left._trial_id) if left else self._study.ask()
            if left is None:
                self._own(number)
            self._asked[number] = asked
            return number, _draw(self._asked[number], self._space)

    def report(self, number: int, step: int, metrics: Mapping[str, float]) -> bool:
        """Reports the metrics of the pruning stage at a step; returns whether to prune the trial."""
        assert self._sweep.pruning is not None
        metric, asked = self._sweep.pruning.metric, self._asked[number]
        if metric not in metrics:
            self._other_metrics |= metrics.keys()
            return False
        self._has_metric = True
        asked.report(report_sign(self._sweep) * metrics[metric], step)
        return asked.should_prune()

    def tell(self, result: TrialResult) -> None:
        """Reports the end of a trial; one that failed stays open, since the cause may be fixed."""
        values = [result.values[name] for name in self._sweep.objectives] if result.state == "complete" else None
        with folder_lock(self._folder):  # else another process that asks could take the trial for one that was killed
            if result.state != "failed":
                # Samplers that have tried everything try to stop Optuna's own loop, which is not used here.
                with contextlib.suppress(RuntimeError):
                    self._study.tell(self._asked[result.number], values, STATES[result.state], skip_if_finished=True)
            self._locks.pop(result.number).release()
        pruning, found = self._sweep.pruning, sorted(self._other_metrics)
        if pruning and found and not self._has_metric:
            self._has_metric = True  # one warning is enough
            logger.warning(
                "sweep.pruning.metric=%s: %s reports no such metric, so nothing is pruned; it reports: %s",
                pruning.metric, pruning.stage, listed(pruning.metric, found),
            )  # fmt: skip

    def _own(self, number: int) -> bool:
        """Takes an open trial, unless a living process runs it, or this one has run it."""
        lock = FileLock(self._folder / "running" / str(number), thread_local=False)
        if number in self._asked:
            return False
        with contextlib.suppress(Timeout):
            lock.acquire(blocking=False)
            self._locks[number] = lock
        return lock.is_locked

    def _is_exhausted(self, trials: Iterable[FrozenTrial]) -> bool:
        drawn = {
            tuple(each.params[field] for field in self._space)
            for each in trials
            if len(each.params) == len(self._space)
        }
        return len(drawn) >= math.prod(map(_count, self._space.values()))


def stored_trials(folder: Path) -> list[FrozenTrial]:
    """The trials of the study in a folder."""
    return optuna.load_study(study_name=_STUDY, storage=_storage(folder)).get_trials(deepcopy=False)


def _storage(folder: Path) -> optuna.storages.RDBStorage:
    url = f"sqlite:///{folder / 'study.db'}"
    return optuna.storages.RDBStorage(url, engine_kwargs={"connect_args": {"timeout": 60}})
