"""``posttrain tune``: rounds of short trainings, each with the changes that ``diagnose`` proposes."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from flows.declare.config import load_pipeline
from flows.declare.pipeline import listed
from flows.declare.sweep import Objective, Sweep
from flows.planning.checks import require_metric
from flows.planning.estimates import Estimator, History
from flows.planning.plan import PlannedStage
from flows.reports.diagnosis import overrides_of
from flows.sweep.folder import TrialResult, overrides, trial_results
from flows.sweep.plan import SweepPlan, check_recorded, varying
from flows.sweep.space import fixed_and_swept
from lineage.diagnosis.curves import read_curves
from lineage.diagnosis.finding import rounded
from lineage.diagnosis.rules import as_line, diagnose
from lineage.errors import ConfigError
from lineage.filesystem.files import atomic_write
from lineage.graph.places import node_key
from lineage.markup import markdown_table
from lineage.record.metrics_file import SCORED
from tasks.evaluate import Evaluate
from tasks.evaluate.row_scores import lower_is_better
from tasks.method import Method, Training
from tasks.train.best import HELD_OUT_LOSS

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
        metric: ``STAGE/METRIC``, or a metric of the stage; None: its held-out loss, or of a method on prompts, which
            have none, its reward or loss.
        rounds: number of rounds; after regularization they repeat from the learning rate.
        steps: steps of each trial, until the round of epochs changes them; None: as declared.
        budget: ``steps`` or ``money``, and the limit for all trials together; None: no limit.
    """

    stage: str
    metric: str | None = None
    rounds: int = len(ORDER)
    steps: int | None = None
    budget: tuple[str, float] | None = None


@dataclass(frozen=True, kw_only=True)
class Round:
    """A completed round: the finding, the compared trials, and the best trial so far."""

    name: str
    finding: str
    trials: list[int]
    best: int


class Need(NamedTuple):
    """Optimizer steps, seconds and price of the trainings of a trial; None: no estimate."""

    steps: int
    seconds: float | None
    money: float | None


def read_tuning(asked: Tuning, cli_overrides: Sequence[str], config_dir: Path | None) -> SweepPlan:
    """The sweep of one stage, with its first trial planned: the stage as declared.

    Raises:
        ConfigError: there is no such training or metric, or an override is wrong or has several values.
    """
    shared, swept = fixed_and_swept(cli_overrides)
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
    reads = getattr(type(method), "reads", None)
    default = HELD_OUT_LOSS if reads is None or reads.trained else str(method.progress)
    if asked.metric is None and method.validation is None and default == HELD_OUT_LOSS:
        steps = asked.steps or method.num_steps
        how_often = f"every_steps={max(1, steps // _MEASUREMENTS)}" if steps else f"every_epochs={1 / _MEASUREMENTS}"
        shared.append(f"{where}.validation.{how_often}")
    metric = asked.metric or f"{asked.stage}/{default}"
    if metric.partition("/")[0] not in pipeline.stages:
        metric = f"{asked.stage}/{metric}"
    until = metric.partition("/")[0]
    own = varying(pipeline, [where])
    if until not in own:
        raise ConfigError(
            f"--metric {metric}: {until} does not read {asked.stage}, so no trial changes it; "
            f"name a metric of: {', '.join(name for name in pipeline.order() if name in own)}"
        )
    if asked.metric is not None:
        require_metric(f"--metric {metric}", until, pipeline.stages[until], metric.partition("/")[2])
    small = _small_is_good(pipeline.stages[until].method, metric.partition("/")[2])
    sweep = Sweep(
        name=None, params={}, fixed={}, until=until, sampler=None, pruning=None, num_trials=None, parallel=1,
        objectives={_BEST: Objective(metric=metric, direction="minimize" if small else "maximize")},
    )  # fmt: skip
    return SweepPlan(
        sweep=sweep, params={where: "what the doctor finds"}, space={}, overrides=shared, config_dir=config_dir
    )


def _small_is_good(method: Method, metric: str) -> bool:
    """Whether small values of a metric of a stage are better: as it is set, else as its name says."""
    name = metric.partition("/")[2] or metric  # an evaluation's begin with a policy
    own = method.own_metrics if isinstance(method, Evaluate) else ()
    if isinstance(method, Training):
        name, own = metric.removeprefix(SCORED), method.evaluation.own_metrics if method.evaluation else ()
    return next((each.small_is_good for each in own if each.label == name), lower_is_better(name))


class Tuner:
    """Proposes the trials of the rounds, as a sampler does; its only state are the results of the trials.

    Each call replays the rounds, so that a resumed command continues where the killed one was.

    Attributes:
        rounds: the completed rounds.
        stopped: the trial that would have exceeded the budget; empty: none.

    Raises:
        ConfigError: a budget of money, without a price and GPUs; or the finished stage has not measured the metric.
    """

    def __init__(self, sweep: SweepPlan, asked: Tuning) -> None:
        check_recorded(sweep.sweep, [sweep.plan])
        self._sweep, self._asked = sweep, asked
        self._folder, self._began = Path(), time.time()
        self._titles: dict[int, str] = {}
        self.rounds: list[Round] = []
        self.stopped = ""
        planned = sweep.plan.stage(asked.stage)
        price, gpus = planned.stage.resources.price_per_gpu_hour, planned.asks[1]
        if asked.budget and asked.budget[0] == "money" and (price is None or not gpus):
            raise ConfigError(
                f"--budget-money: stages.{planned.name}.resources.price_per_gpu_hour={price}, and {gpus} GPUs; money "
                "is counted by GPU-hours: set the price of one, and resources=gpu, or use --budget-steps"
            )

    def begin(self, folder: Path) -> "Tuner":
        """Reads the results in the folder of the sweep; if all trials failed, they are tried again."""
        self._folder, self._began = folder, (folder / "sweep.json").stat().st_mtime
        if not any(each.state == "complete" for each in trial_results(folder)):
            (folder / "trials.jsonl").unlink(missing_ok=True)  # the cause may be fixed
        return self

    def ask(self) -> tuple[int, Mapping[str, str]] | None:
        """The first trial of the rounds without a result."""
        results = {each.number: each for each in trial_results(self._folder)}
        found = next((each for each in self._walk(results) if each[0] not in results), None)
        if self.rounds:
            atomic_write(self._folder / "rounds.md", self.text())
        if found and self._asked.budget:
            seen = set[str]()
            needs = [self._need(params, seen) for params in (*(each.params for each in results.values()), found[1])]
            past = self._past(needs)
            self.stopped = f"{self._titles[found[0]]}: {past}; not started" if past else ""
        return None if self.stopped else found

    def report(self, number: int, step: int, metrics: Mapping[str, float]) -> bool:
        """Prunes nothing."""
        return False

    def tell(self, result: TrialResult) -> str:
        """Returns a progress line on a result."""
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

    def first_round(self) -> list[tuple[Mapping[str, str], str, Need, str]]:
        """The trials of the first round, without running anything.

        Returns:
            Parameters, reason, additional needs, and how it exceeds the budget, or nothing.
        """
        first = TrialResult(number=0, params={}, state="complete")
        if self._sweep.plan.entry(self._planned({})).manifest():
            changes, why = self._changes(RATE, first)
        else:
            changes, why = _sides(first, self._planned({})), "unless diagnose finds something"
        rows: list[tuple[Mapping[str, str], str, Need, str]] = []
        seen = set[str]()
        for params, reason in [({}, "as declared"), *((params, why) for params in changes)]:
            need = self._need(params, seen)
            rows.append((params, reason, need, self._past([*(row[2] for row in rows), need])))
        return rows

    def _walk(self, results: Mapping[int, TrialResult]) -> Iterator[tuple[int, Mapping[str, str]]]:
        """Yields number and parameters of every trial in order; continuing requires the result of the last one."""
        self.rounds, numbers, best = [], {_settings({}): 0}, 0
        self._titles = {0: f"round 1, {ORDER[0]}: trial 0"}
        yield 0, {}
        for index in range(self._asked.rounds):
            name = ORDER[index % len(ORDER)]
            changes, finding = self._changes(name, results[best])
            trials = [best]
            for params in changes:
                number = numbers.setdefault(_settings(params), len(numbers))
                self._titles.setdefault(number, f"round {index + 1}, {name}: trial {number}")
                yield number, params
                trials.append(number)
            best = min(trials, key=lambda number: self._rank(results[number]))
            self.rounds.append(Round(name=name, finding=finding, trials=trials, best=best))

    def _rank(self, result: TrialResult) -> float:
        """Sort key: smaller is better."""
        if result.state != "complete":
            return float("inf")
        return result.values[_BEST] * (1 if self._sweep.sweep.objectives[_BEST].direction == "minimize" else -1)

    def _changes(self, name: str, best: TrialResult) -> tuple[list[dict[str, str]], str]:
        """Parameters of the trials of a round, and the finding in the curves of the best trial so far."""
        planned = self._planned(best.params)
        path = self._sweep.plan.entry(planned).path
        curves = read_curves(path, failure=best.cause if best.state == "failed" else "")
        curves = curves if curves.recipe else replace(curves, recipe=planned.stage.method.recipe())
        for finding in diagnose(curves):
            change = {field: value for field, value in finding.change.items() if _round_of(field) == name}
            if change:
                cli_args = overrides_of(planned.name, replace(finding, change=change))
                because = {f"because.{planned.name}": f"{finding.rule}:{node_key(planned.name, planned.fingerprint)}"}
                return [dict(best.params) | dict(word.split("=", 1) for word in cli_args) | because], as_line(finding)
        sides = _sides(best, planned) if name == RATE and best.state == "complete" else []
        return sides, "nothing: a higher and a lower one are tried" if sides else "nothing"

    def _planned(self, params: Mapping[str, str]) -> PlannedStage:
        return self._sweep.trial(0, params).plan.stage(self._asked.stage)

    def _past(self, needs: Sequence[Need]) -> str:
        """How these exceed the budget together; empty: they do not."""
        name, budget = self._asked.budget or ("steps", math.inf)
        total = sum((getattr(each, name) or 0.0 for each in needs), start=0.0)
        return f"it would make {total:,.6g} of --budget-{name} {budget:,.6g}" if total > budget else ""

    def _need(self, params: Mapping[str, str], seen: set[str]) -> Need:
        """What the trainings of a trial have used or will use, without those that were finished before this sweep.

        Args:
            seen: trainings that were counted already; those of this trial are added.

        Raises:
            ConfigError: there is a budget, and no estimate.
        """
        try:
            plan = self._sweep.trial(0, params).plan
        except ConfigError:  # the method refuses the change: the trial fails and costs nothing
            return Need(0, 0.0, 0.0)
        steps, seconds, money = 0, list[float | None](), list[float | None]()
        estimator, (budget, _) = Estimator(plan, History.of(plan.home)), self._asked.budget or ("", 0)
        for planned in plan.stages:
            key, entry = node_key(planned.name, planned.fingerprint), plan.entry(planned)
            made = entry.manifest() if planned.is_finished(entry) else None
            if not planned.stage.method.trains or key in seen or (made and made.provenance.start < self._began):
                continue
            seen.add(key)
            num_steps = planned.hyperparameters.num_steps if planned.hyperparameters else None
            guess = None if made else estimator.estimate(planned)
            guessed = guess.seconds if guess else None
            if not made and {"steps": num_steps, "money": guessed}.get(budget, 0) is None:
                raise ConfigError(
                    f"--budget-{budget}: what {planned.name} takes is not known before its rows are read; set "
                    f"--steps, or stages.{planned.name}.method.num_steps, or the other budget"
                )
            took = made.provenance.end - made.provenance.start if made else guessed
            price = planned.stage.resources.price_per_gpu_hour
            steps += num_steps or 0
            seconds.append(took)
            money.append(None if took is None or price is None else price * planned.asks[1] * took / 3600)
        return Need(steps, *(None if None in each else math.fsum(filter(None, each)) for each in (seconds, money)))


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
