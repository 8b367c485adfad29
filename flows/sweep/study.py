"""Trials that Optuna proposes: its samplers, its pruners, its storage. Imports Optuna."""

import contextlib
import logging
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import optuna
from filelock import FileLock
from optuna.trial import FrozenTrial, TrialState

from flows.declare.pipeline import nearest
from flows.declare.sweep import Sweep
from flows.sweep.dimension import Dimension
from flows.sweep.draws import draw, num_combinations, overrides_of
from flows.sweep.sampling import direction_sign, directions, make_pruner, make_sampler, silence
from flows.sweep.trial import Outcome, Trial
from lineage.lock import Lock, owner
from lineage.owner import Owner

logger = logging.getLogger(__name__)

_DATABASE = "study.db"
_NAME = "sweep"  # of the study; the database has no other
_PROCESSES = "processes"  # a directory for each that is at work on the study, with its lease
_OWNER, _FAILURES = "owner", "failures"
_MOST_FAILURES = 2  # of one trial, in as many runs of the sweep


class Study:
    """Proposes ``sweep.num_trials`` trials in all, however often it is opened again.

    A trial whose process was killed is still open in the study: the next process that opens it gets this trial first,
    with its number and its parameters, and reuses what was finished of it. So does the next after one that failed; of
    a trial that fails twice Optuna is told. SQLite keeps what it was told through a kill, and serves several processes.

    Args:
        folder: of the sweep.
    """

    def __init__(self, sweep: Sweep, space: Mapping[str, Dimension], folder: Path) -> None:
        assert sweep.sampler is not None and sweep.num_trials is not None
        self._sweep, self._space, self._num_trials = sweep, space, sweep.num_trials
        me = Owner.here()
        self._processes, self._me = folder / _PROCESSES, f"{me.host}-{me.pid}-{me.token[:8]}"
        self._running: dict[int, optuna.Trial] = {}
        self._heard: dict[int, set[int]] = {}  # number -> steps that were reported; of all that this process proposed
        self._unread: set[str] = set()  # metrics that the pruning stage reports, where the one to prune by is lacking
        self._has_warned = False
        self._guard = FileLock(folder / "study.lock")
        silence()
        pruner = make_pruner(sweep)
        with self._guard:  # two processes must not make one database at once
            self._study = optuna.create_study(
                storage=_storage(folder), study_name=_NAME, load_if_exists=True, directions=directions(sweep),
                pruner=pruner,
            )  # fmt: skip

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """By a heartbeat, which other hosts hear too."""
        place = self._processes / self._me
        lock = Lock(place)
        lock.try_acquire()
        try:
            with lock.holding():
                yield
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def ask(self) -> Trial | None:
        with self._guard:
            trials = self._study.get_trials(deepcopy=False)
            left = next((each for each in trials if self._is_left(each)), None)
            if left is None and (len(trials) >= self._num_trials or self._is_exhausted(trials)):
                return None
            number = left.number if left else len(trials)
            self._study.sampler = make_sampler(self._sweep, number)
            asked = optuna.Trial(self._study, left._trial_id) if left else self._study.ask()
            params = draw(asked, self._space)  # of a trial that is left: what it has, and what a kill kept it from
            asked.set_user_attr(_OWNER, self._me)
            self._running[number] = asked
            self._heard[number] = set(left.intermediate_values) if left else set()
            return Trial(number=number, params=overrides_of(self._space, params))

    def report(self, trial: Trial, stage: str, step: int, metrics: Mapping[str, float]) -> bool:
        pruning = self._sweep.pruning
        if pruning is None or stage != pruning.stage:
            return False
        if pruning.metric not in metrics:
            self._unread |= metrics.keys()
            return False
        asked = self._running.get(trial.number)
        if asked is None:  # it has ended
            return False
        if step not in self._heard[trial.number]:  # a stage that begins again repeats what a kill cut off
            self._heard[trial.number].add(step)
            asked.report(direction_sign(self._sweep) * metrics[pruning.metric], step)
        return asked.should_prune()

    def tell(self, trial: Trial, outcome: Outcome) -> None:
        asked = self._running.pop(trial.number)
        self._warn_of_metric(trial)
        if outcome.state == "pruned":
            self._end(asked, TrialState.PRUNED, None)
        elif outcome.state == "complete":
            self._end(asked, TrialState.COMPLETE, [outcome.values[name] for name in self._sweep.objectives])
        else:
            failures = asked.user_attrs.get(_FAILURES, 0) + 1
            asked.set_user_attr(_FAILURES, failures)
            asked.set_user_attr(_OWNER, None)
            if failures == _MOST_FAILURES:  # else it stays open: what made it fail may be mended
                self._end(asked, TrialState.FAIL, None)

    def _warn_of_metric(self, trial: Trial) -> None:
        """Says, once, that nothing can be pruned by a metric that is never reported."""
        pruning = self._sweep.pruning
        if pruning and self._unread and not self._heard[trial.number] and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "sweep.pruning.metric=%s: %s reports no such metric, so nothing is pruned; it reports: %s%s",
                pruning.metric, pruning.stage, ", ".join(sorted(self._unread)),
                nearest(pruning.metric, sorted(self._unread)),
            )  # fmt: skip

    def _end(self, asked: optuna.Trial, state: TrialState, values: list[float] | None) -> None:
        try:
            self._study.tell(asked, values, state, skip_if_finished=True)
        except RuntimeError:  # some samplers stop Optuna's own loop when nothing is left; there is none here
            if not self._study.get_trials(deepcopy=False)[asked.number].state.is_finished():
                raise

    def _is_left(self, trial: FrozenTrial) -> bool:
        """Whether nobody is at work on an open trial."""
        if trial.state != TrialState.RUNNING or trial.number in self._heard:
            return False
        process = trial.user_attrs.get(_OWNER)
        return process is None or owner(self._processes / process) is None

    def _is_exhausted(self, trials: list[FrozenTrial]) -> bool:
        different = {tuple(overrides_of(self._space, each.params).values()) for each in trials if each.params}
        return len(different) >= num_combinations(self._space)


def load_reports(folder: Path) -> dict[int, dict[int, float]]:
    """Number of a trial -> step -> what Optuna was told there."""
    study = optuna.load_study(study_name=_NAME, storage=_storage(folder))
    return {trial.number: trial.intermediate_values for trial in study.get_trials(deepcopy=False)}


def _storage(folder: Path) -> optuna.storages.RDBStorage:
    return optuna.storages.RDBStorage(
        f"sqlite:///{folder / _DATABASE}", engine_kwargs={"connect_args": {"timeout": 60}}
    )
