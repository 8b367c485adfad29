"""Trials that Optuna proposes: its samplers, its pruners, its storage. Imports Optuna."""

import json
import logging
import math
import threading
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import optuna
from filelock import FileLock
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState

from flows.pipeline import nearest
from flows.sweep.dimension import Dimension
from flows.sweep.draws import draw, num_combinations, overrides_of
from flows.sweep.pruning import direction_sign, make_pruner
from flows.sweep.settings import Direction, Sweep
from flows.sweep.target import build
from flows.sweep.trial import Outcome, Trial
from lineage.errors import ConfigError
from lineage.lease import Holder

logger = logging.getLogger(__name__)

_DATABASE = "study.db"
_NAME = "sweep"  # of the study; the database has no other
_OWNER = "owner"
# Their seed stands for one sequence, of which each trial is a member.
_ONE_SEQUENCE = ("optuna.samplers.QMCSampler", "optuna.samplers.GridSampler")


class Study:
    """Proposes ``sweep.num_trials`` trials in all, however often it is opened again.

    A trial whose process was killed, or that failed, is still open in the study: the next process that opens it gets
    this trial first, with its number and its parameters, and reuses what was finished of it. SQLite keeps what it was
    told through a kill, and serves several processes of one machine.

    Args:
        folder: of the sweep.

    Raises:
        ConfigError: Optuna refuses the sampler, the pruner or this space.
    """

    def __init__(self, sweep: Sweep, space: Mapping[str, Dimension], folder: Path) -> None:
        assert sweep.sampler is not None and sweep.num_trials is not None
        self._sweep, self._space, self._num_trials = sweep, space, sweep.num_trials
        self._me = Holder.here()
        self._running: dict[int, optuna.Trial] = {}
        self._heard: dict[int, set[int]] = {}  # number -> steps that were reported; of all that this process proposed
        self._unread: set[str] = set()  # metrics that the pruning stage reports, where the one to prune by is lacking
        self._has_warned = False
        self._lock, self._guard = threading.Lock(), FileLock(folder / "study.lock")
        silence()
        self._try_out()
        pruner = make_pruner(sweep)
        with self._guard:  # two processes must not make one database at once
            self._study = optuna.create_study(
                storage=_storage(folder), study_name=_NAME, load_if_exists=True, directions=_directions(sweep),
                pruner=pruner,
            )  # fmt: skip

    def known(self) -> list[Trial] | None:
        return None

    def ask(self) -> Trial | None:
        with self._lock, self._guard:
            trials = self._study.get_trials(deepcopy=False)
            left = next((each for each in trials if self._is_left(each)), None)
            if left is None and (len(trials) >= self._num_trials or self._is_exhausted(trials)):
                return None
            number = left.number if left else len(trials)
            self._study.sampler = self._sampler(number)
            asked = optuna.Trial(self._study, left._trial_id) if left else self._study.ask()
            params = draw(asked, self._space)  # of a trial that is left: what it has, and what a kill kept it from
            asked.set_user_attr(_OWNER, json.dumps(asdict(self._me)))
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
        with self._lock:
            asked = self._running.get(trial.number)
            if asked is None:  # it has ended
                return False
            if step not in self._heard[trial.number]:  # a resumed stage repeats what it said since its checkpoint
                self._heard[trial.number].add(step)
                asked.report(direction_sign(self._sweep) * metrics[pruning.metric], step)
            return asked.should_prune()

    def tell(self, trial: Trial, outcome: Outcome) -> None:
        with self._lock:
            asked = self._running.pop(trial.number)
            self._warn_of_metric(trial)
            if outcome.state == "failed":
                asked.set_user_attr(_OWNER, None)  # it stays open
            elif outcome.state == "pruned":
                self._end(asked, TrialState.PRUNED, None)
            else:
                self._end(asked, TrialState.COMPLETE, [outcome.values[name] for name in self._sweep.objectives])

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
        owner = trial.user_attrs.get(_OWNER)
        return owner is None or Holder(**json.loads(owner)).is_dead(math.inf)

    def _is_exhausted(self, trials: list[FrozenTrial]) -> bool:
        different = {tuple(overrides_of(self._space, each.params).values()) for each in trials if each.params}
        return len(different) >= num_combinations(self._space)

    def _sampler(self, number: int) -> BaseSampler:
        """The sampler for one trial, with a seed of its own: a continued sweep must not draw the same again."""
        node = dict(self._sweep.sampler or {})
        seed = node.get("seed")
        if isinstance(seed, int) and node["_target_"] not in _ONE_SEQUENCE:
            node["seed"] = seed + number
        sampler = build(node, "sweep.sampler", BaseSampler)
        assert isinstance(sampler, BaseSampler)
        return sampler

    def _try_out(self) -> None:
        """Lets the sampler draw from this space once, in a study of no consequence."""
        study = optuna.create_study(sampler=self._sampler(0), directions=_directions(self._sweep))
        try:
            draw(study.ask(), self._space)
        except Exception as error:  # whatever a sampler of Optuna's or of the user's raises
            raise ConfigError(
                f"sweep.sampler: {(self._sweep.sampler or {})['_target_']} cannot draw from this space ({error}); "
                "take another sampler, such as optuna.samplers.TPESampler"
            ) from error


def silence() -> None:
    """Keeps Optuna's notes, on trials and on plots, out of the progress of a run; its errors still come."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", module=r"optuna\.")
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)  # laid at our door


def load_reports(folder: Path) -> dict[int, dict[int, float]]:
    """Number of a trial -> step -> what Optuna was told there."""
    study = optuna.load_study(study_name=_NAME, storage=_storage(folder))
    return {trial.number: trial.intermediate_values for trial in study.get_trials(deepcopy=False)}


def _storage(folder: Path) -> optuna.storages.RDBStorage:
    return optuna.storages.RDBStorage(
        f"sqlite:///{folder / _DATABASE}", engine_kwargs={"connect_args": {"timeout": 60}}
    )


def _directions(sweep: Sweep) -> list[Direction]:
    return [each.direction for each in sweep.objectives.values()]
