"""``posttrain tune``: rounds of short trainings, each with the changes that ``diagnose`` proposes."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from flows.declare.config import load_pipeline
from flows.declare.pipeline import listed
from flows.declare.sweep import Objective, Sweep
from flows.planning.estimates import Estimator, History
from flows.planning.plan import Plan, PlannedStage
from flows.reports.diagnosis import overrides_of
from flows.sweep.folder import TrialResult, overrides, trial_results
from flows.sweep.plan import Planner, SweepPlan, varying
from flows.sweep.space import Values, fixed_and_swept
from lineage.diagnosis.curves import read_curves
from lineage.diagnosis.finding import rounded
from lineage.diagnosis.rules import as_line, diagnose
from lineage.errors import ConfigError
from lineage.files import atomic_write
from lineage.graph.places import node_key
from lineage.markup import markdown_table
from tasks.best import HELD_OUT_LOSS
from tasks.evaluate.row_scores import REWARD, lower_is_better
from tasks.method import Training

RATE, BATCH, EPOCHS, REGULARIZATION = ORDER = ("learning rate", "batch", "epochs", "regularization")
# Field of a method -> the round that tries its changes; other fields: regularization.
_ROUND_OF = {
    "learning_rate": RATE, "schedule": RATE, "warmup_ratio": RATE, "lr_schedule": RATE, "max_grad_norm": RATE,
    "precision": RATE, "global_batch_size": BATCH, "num_generations": BATCH, "num_steps": EPOCHS,
    "num_epochs": EPOCHS, "max_length": None,
}  # fmt: skip
_SIDES = (3.0, 1 / 3)  # factors of the learning rate to try if there is no finding on it
_MEASUREMENTS = 10  # validations per training
_BEST = "best"  # the objective


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """The arguments of the command.

    Args:
        metric: ``STAGE/METRIC``, or a metric of the stage; None: its held-out loss.
        rounds: number of rounds; after regularization they repeat from the learning rate.
        steps: steps of each trial, until the round of epochs changes them; None: as declared.
        budget_steps, budget_money: limits for all trials together; None: no limit.
    """

    stage: str
    metric: str | None = None
    rounds: int = len(ORDER)
    steps: int | None = None
    budget_steps: int | None = None
    budget_money: float | None = None


@dataclass(frozen=True, kw_only=True)
class Round:
    """A completed round: the finding, the compared trials, and the best trial so far."""

    name: str
    finding: str
    trials: list[int]
    best: int


@dataclass(frozen=True, kw_only=True)
class Need:
    """Planned optimizer steps, seconds and price of trainings; None: no estimate."""

    steps: int = 0
    seconds: float | None = 0.0
    money: float | None = 0.0


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A trial of the first round before it runs; ``over``: how it exceeds the budget, or empty."""

    params: Mapping[str, str]
    why: str
    need: Need
    over: str


def read_tuning(asked: Tuning, given: Sequence[str], config_dir: Path | None) -> SweepPlan:
    """The sweep of one stage, with its first trial planned: the stage as declared.

    Raises:
        ConfigError: there is no such training or metric, or an override is wrong or has several values.
    """
    shared, swept = fixed_and_swept(given)
    for field, values in swept.items():
        raise ConfigError(f"{field}={values}: tune chooses what varies; give one value, or: posttrain run --multirun")
    pipeline = load_pipeline(shared, config_dir)
    trainings = [name for name, stage in pipeline.stages.items() if isinstance(stage.method, Training)]
    if asked.stage not in trainings:
        raise ConfigError(f"{asked.stage}: no stage that trains; there are: {listed(asked.stage, trainings)}")
    method, where = pipeline.stages[asked.stage].method, f"stages.{asked.stage}.method"
    assert isinstance(method, Training)
    if asked.steps:
        shared += [f"{where}.num_steps={asked.steps}", f"{where}.num_epochs=null"]
    if asked.metric is None and method.validation is None:
        steps = asked.steps or method.num_steps
        how_often = f"every_steps={max(1, steps // _MEASUREMENTS)}" if steps else f"every_epochs={1 / _MEASUREMENTS}"
        shared.append(f"{where}.validation.{how_often}")
    metric = asked.metric or HELD_OUT_LOSS
    if metric.partition("/")[0] not in pipeline.stages:
        metric = f"{asked.stage}/{metric}"
    until = metric.partition("/")[0]
    own = varying(pipeline, [where])
    if until not in own:
        raise ConfigError(
            f"--metric {metric}: {until} does not read {asked.stage}, so no trial changes it; "
            f"name a metric of: {', '.join(name for name in pipeline.order() if name in own)}"
        )
    small = lower_is_better(metric.rpartition("/")[2]) and f"/{REWARD}" not in metric
    sweep = Sweep(
        name=None, params={}, fixed={}, until=until, sampler=None, pruning=None, num_trials=None, parallel=1,
        objectives={_BEST: Objective(metric=metric, direction="minimize" if small else "maximize")},
    )  # fmt: skip
    planner = Planner(shared, until, config_dir)
    return SweepPlan(
        sweep=sweep, params={where: "what the doctor finds"}, space={}, overrides=shared, planner=planner, known=None,
        samples=[planner.plan(0, {})], own=own,
    )  # fmt: skip


class Tuner:
    """Proposes the trials of the rounds, as a sampler does; its only state are the results of the trials.

    Each call replays the rounds, so that a resumed command continues where the killed one was.

    Attributes:
        rounds: the completed rounds.
        stopped: the trial that would have exceeded the budget; empty: none.
    """

    _folder: Path

    def __init__(self, sweep: SweepPlan, asked: Tuning) -> None:
        self._sweep, self._asked = sweep, asked
        self._is_small_good = sweep.sweep.objectives[_BEST].direction == "minimize"
        self._titles: dict[int, str] = {}
        self._void: dict[int, TrialResult] = {}
        self.rounds: list[Round] = []
        self.stopped = ""
        if asked.budget_money is not None:
            self._require_price()

    def begin(self, folder: Path) -> "Tuner":
        """Loads the results in the folder of the sweep."""
        self._folder, before = folder, _results(folder)
        if not any(each.state == "complete" for each in before.values()):
            self._void = before  # all failed: try them again, since the cause may be fixed
        return self

    def owning(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def ask(self) -> tuple[int, Mapping[str, str]] | None:
        """The first trial of the rounds without a result."""
        results = {number: each for number, each in _results(self._folder).items() if number not in self._void}
        found = next((each for each in self._walk(results) if each[0] not in results), None)
        if found:
            self.stopped = self._over_budget(*found, results)
        if self.rounds:
            atomic_write(self._folder / "rounds.md", self.text())
        return None if self.stopped else found

    def report(self, number: int, step: int, metrics: Mapping[str, float]) -> bool:
        return False

    def tell(self, result: TrialResult) -> str:
        """Returns a progress line on a result."""
        self._void.pop(result.number, None)
        value = f"{result.values[_BEST]:.6g}" if result.values else result.state
        return f"{self._titles[result.number]}: {' '.join(overrides(result.params)) or 'as declared'}: {value}"

    def text(self) -> str:
        """The completed rounds as a table."""
        rows = [
            (str(index), each.name, each.finding, ", ".join(map(str, each.trials)), str(each.best))
            for index, each in enumerate(self.rounds, 1)
        ]
        return markdown_table(("round", "of", "finding", "trials", "best"), rows) + "\n"

    def to_dict(self) -> dict[str, object]:
        """The fields that ``tune --json`` adds to the object of a sweep."""
        return {"rounds": [asdict(each) for each in self.rounds], "stopped": self.stopped or None}

    def first_round(self) -> list[Planned]:
        """The trials of the first round with their additional needs, without running anything."""
        planned = self._planned(0, {})
        done = self._sweep.plan.entry(planned).manifest()
        first = TrialResult(number=0, params={}, state="complete")
        found = self._changes(RATE, first) if done else (_sides(first, planned), "unless diagnose finds something")
        trials = [({}, "as declared"), *((params, found[1]) for params in found[0])]
        rows: list[Planned] = []
        seen = set[str]()
        for number, (params, why) in enumerate(trials):
            need = self._need(number, params, seen)
            over = self._past([*(row.need for row in rows), need])
            rows.append(Planned(params=params, why=why, need=need, over=over))
        return rows

    def _walk(self, results: Mapping[int, TrialResult]) -> Iterator[tuple[int, Mapping[str, str]]]:
        """Yields number and parameters of every trial in order; continuing requires the result of the last one."""
        self.rounds, numbers, best = [], {_settings({}): 0}, 0
        for index in range(self._asked.rounds):
            name = ORDER[index % len(ORDER)]
            title = f"round {index + 1}, {name}: trial"
            if index == 0:
                self._titles.setdefault(0, f"{title} 0")
                yield 0, {}
            changes, finding = self._changes(name, results[best])
            trials = [best]
            for params in changes:
                number = numbers.setdefault(_settings(params), len(numbers))
                self._titles.setdefault(number, f"{title} {number}")
                yield number, params
                trials.append(number)
            best = min(trials, key=lambda number: self._rank(results[number]))
            self.rounds.append(Round(name=name, finding=finding, trials=trials, best=best))

    def _rank(self, result: TrialResult) -> float:
        """Sort key: smaller is better."""
        if result.state != "complete":
            return float("inf")
        return result.values[_BEST] if self._is_small_good else -result.values[_BEST]

    def _changes(self, name: str, best: TrialResult) -> tuple[list[dict[str, str]], str]:
        """Parameters of the trials of a round, and the finding in the curves of the best trial so far."""
        planned = self._planned(best.number, best.params)
        path = self._sweep.plan.entry(planned).path
        curves = read_curves(path, failure=best.cause if best.state == "failed" else "")
        curves = curves if curves.recipe else replace(curves, recipe=planned.stage.method.recipe())
        for finding in diagnose(curves):
            change = {field: value for field, value in finding.change.items() if _round_of(field) == name}
            if change:
                words = overrides_of(planned.name, replace(finding, change=change))
                because = {f"because.{planned.name}": f"{finding.rule}:{node_key(planned.name, planned.fingerprint)}"}
                return [dict(best.params) | dict(word.split("=", 1) for word in words) | because], as_line(finding)
        sides = _sides(best, planned) if name == RATE and best.state == "complete" else []
        return sides, "nothing: a higher and a lower one are tried" if sides else "nothing"

    def _plan(self, number: int, params: Mapping[str, str]) -> Plan:
        return self._sweep.planner.plan(number, params).plan

    def _planned(self, number: int, params: Mapping[str, str]) -> PlannedStage:
        return self._plan(number, params).stage(self._asked.stage)

    def _over_budget(self, number: int, params: Mapping[str, str], results: Mapping[int, TrialResult]) -> str:
        """Why a trial would exceed the budget; empty: it would not."""
        if self._asked.budget_steps is None and self._asked.budget_money is None:
            return ""
        past = self._past([self._spent(results), self._need(number, params, set())])
        return f"{self._titles[number]}: {past}; not started" if past else ""

    def _past(self, needs: Sequence[Need]) -> str:
        """How these exceed the budget together; empty: they do not."""
        steps, money = sum(each.steps for each in needs), sum(each.money or 0.0 for each in needs)
        budgets = (("steps", steps, self._asked.budget_steps), ("money", money, self._asked.budget_money))
        past = (each for each in budgets if each[2] is not None and each[1] > each[2])
        return next(
            (f"it would make {total:,.6g} of --budget-{name} {budget:,.6g}" for name, total, budget in past), ""
        )

    def _spent(self, results: Mapping[int, TrialResult]) -> Need:
        """What the trials have used so far, without stages that were finished before this sweep."""
        began = (self._folder / "sweep.json").stat().st_mtime
        steps, money, seen = 0, 0.0, set[str]()
        for number, result in results.items():
            with contextlib.suppress(ConfigError):  # such a trial failed before it started
                plan = self._plan(number, result.params)
                for planned in plan.stages:
                    manifest = plan.entry(planned).manifest()
                    key = node_key(planned.name, planned.fingerprint)
                    if key in seen or (manifest and manifest.provenance.start < began):
                        continue
                    seen.add(key)
                    steps += _steps(planned)
                    seconds = manifest.provenance.end - manifest.provenance.start if manifest else 0.0
                    price = planned.stage.resources.price_per_gpu_hour or 0.0
                    money += planned.asks[1] * seconds / 3600 * price
        return Need(steps=steps, money=money)

    def _need(self, number: int, params: Mapping[str, str], seen: set[str]) -> Need:
        """The needs of the unfinished stages of a trial.

        Args:
            seen: stages that were counted already; those of this trial are added.

        Raises:
            ConfigError: there is a budget, and no estimate.
        """
        try:
            plan = self._plan(number, params)
        except ConfigError:  # the method refuses the change: the trial fails and costs nothing
            return Need()
        todo = [each for each in plan.stages if each.stage.method.trains and not each.is_finished(plan.entry(each))]
        todo = [each for each in todo if node_key(each.name, each.fingerprint) not in seen]
        seen |= {node_key(each.name, each.fingerprint) for each in todo}
        found = Estimator(plan, History.of(plan.home)).estimates(todo)
        unknown = [each.name for each in todo if each.hyperparameters is None or each.hyperparameters.num_steps is None]
        if unknown and self._asked.budget_steps is not None:
            raise ConfigError(
                f"--budget-steps: the steps of {unknown[0]} are not known before its rows are read; set --steps, or "
                f"stages.{unknown[0]}.method.num_steps"
            )
        lacking = [each.name for each in todo if each.name not in found]
        if lacking and self._asked.budget_money is not None:
            raise ConfigError(f"--budget-money: nothing estimates {lacking[0]} beforehand; set --budget-steps instead")
        prices = [found[each.name].price for each in todo if each.name in found]
        known = [price for price in prices if price is not None]
        return Need(
            steps=sum(map(_steps, todo)),
            seconds=None if lacking else sum((each.seconds for each in found.values()), start=0.0),
            money=None if lacking or len(known) < len(prices) else sum(known, start=0.0),
        )

    def _require_price(self) -> None:
        """Requires a price and GPUs, by which money is counted."""
        planned = self._planned(0, {})
        where = f"stages.{planned.name}.resources"
        if planned.stage.resources.price_per_gpu_hour is None or not planned.asks[1]:
            raise ConfigError(
                f"--budget-money: {where}.price_per_gpu_hour={planned.stage.resources.price_per_gpu_hour}, and "
                f"{planned.asks[1]} GPUs; money is counted by GPU-hours: set the price of one, and resources=gpu, or "
                "use --budget-steps"
            )


def _results(folder: Path) -> dict[int, TrialResult]:
    return {each.number: each for each in trial_results(folder)}


def _round_of(field: str) -> str | None:
    """The round that tries a field, such as ``method.learning_rate``; None: none."""
    place, _, name = field.partition(".")
    return _ROUND_OF.get(name.partition(".")[0], REGULARIZATION) if place == "method" else None


def _sides(best: TrialResult, planned: PlannedStage) -> list[dict[str, str]]:
    """Parameters with a higher and with a lower learning rate."""
    method, field = planned.stage.method, f"stages.{planned.name}.method.learning_rate"
    assert isinstance(method, Training)
    kept = {name: value for name, value in best.params.items() if not name.startswith("because.")}
    return [{**kept, field: f"{rounded(method.learning_rate * factor):g}"} for factor in _SIDES]


def _settings(params: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    """Parameters without the fields that record their reason."""
    return frozenset((name, value) for name, value in params.items() if not name.startswith("because."))


def _steps(planned: PlannedStage) -> int:
    return (planned.hyperparameters.num_steps or 0) if planned.hyperparameters else 0


def judge_trials(sweep: SweepPlan, results: Sequence[TrialResult], folder: Path) -> tuple[list[int], str]:
    """Number of the best trial, and Optuna's page with every field that some trial sets."""
    from flows.sweep.study import best_and_plots  # imports optuna

    names = dict.fromkeys(name for each in results for name, _ in sorted(_settings(each.params)))
    filled = [replace(each, params=dict.fromkeys(names, "as declared") | dict(each.params)) for each in results]
    space = {name: Values(choices=tuple(dict.fromkeys(each.params[name] for each in filled))) for name in names}
    return best_and_plots(sweep.sweep, space, filled, folder)
