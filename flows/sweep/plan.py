"""The trials of a sweep as plans, checks before the sweep starts, and the objectives of trials."""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from flows.declare.compose import Composer, field_of
from flows.declare.config import dotted, pipeline_of, typed
from flows.declare.pipeline import Pipeline, listed
from flows.declare.sweep import Objective, Sweep
from flows.planning.plan import Memo, Plan, PlannedStage, make_plan
from flows.sweep.space import (
    Values,
    combinations,
    field_name,
    fixed_and_swept,
    fixed_overrides,
    merged_params,
    read_values,
)
from lineage.errors import ArtifactError, ConfigError
from lineage.manifest import Manifest
from tasks.context import Launcher

Key = tuple[str, str]  # one artifact: stage and fingerprint
Judge = Callable[[Mapping[str, Manifest]], float]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run of the pipeline.

    Args:
        number: from 0, in the order of proposal.
        params: field -> value as an override writes it.
    """

    number: int
    params: Mapping[str, str]
    plan: Plan


class Planner:
    """Plans trials; what they share is composed, pinned and looked up once.

    Args:
        overrides: the overrides that all trials share.
        until: last stage of a trial; None: all stages run.

    Raises:
        ConfigError: the overrides do not compose.
    """

    def __init__(self, overrides: Sequence[str], until: str | None = None, config_dir: Path | None = None) -> None:
        self._overrides, self._until, self._config_dir = list(overrides), until, config_dir
        self._composer, self._memo = Composer(overrides, config_dir), Memo()

    def plan(self, number: int, params: Mapping[str, str]) -> Trial:
        """Plans one trial.

        Raises:
            ConfigError: names the trial and what is wrong with it.
        """
        own = [f"{field}={value}" for field, value in params.items()]
        try:
            pipeline = pipeline_of(self._composer.tree(own), [*self._overrides, *own], self._config_dir)
            for name, stage in pipeline.stages.items():
                if stage.resources.launcher == Launcher.FOREGROUND:
                    raise ConfigError(
                        f"stages.{name}.resources.launcher={Launcher.FOREGROUND}: a sweep runs stages side by side; "
                        "debug a single trial with posttrain run, or choose another launcher"
                    )
            return Trial(number=number, params=params, plan=_until(make_plan(pipeline, self._memo), self._until))
        except ConfigError as error:
            raise ConfigError(f"trial {number}: {' '.join(own)}: {error}") from error


def _until(plan: Plan, stage: str | None) -> Plan:
    """The part of a plan that one stage depends on."""
    if stage is None:
        return plan
    names = [planned.name for planned in plan.stages]
    if stage not in names:
        raise ConfigError(f"sweep.until={stage}: no such stage; there are: {listed(stage, names)}")
    needed = {stage}
    for planned in reversed(plan.stages):  # in order of execution, so each comes after its inputs
        if planned.name in needed:
            needed |= set(planned.upstream)
    return replace(plan, stages=[planned for planned in plan.stages if planned.name in needed])


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """A sweep before it runs.

    Args:
        params: field -> values as written, of all fields that vary.
        space: field -> parsed values.
        overrides: overrides of the command that all trials share.
        known: all trials, if they are fixed; None: a sampler proposes them.
        samples: example trials, at least one; deterministic.
        own: names of the stages that may differ between trials.
    """

    sweep: Sweep
    params: dict[str, str]
    space: dict[str, Values]
    overrides: list[str]
    planner: Planner
    known: list[Trial] | None
    samples: list[Trial]
    own: frozenset[str]

    @property
    def plan(self) -> Plan:
        """The plan of one trial."""
        return self.samples[0].plan

    @property
    def trials(self) -> list[Trial]:
        """All known trials; for a sampler, one example."""
        return self.samples[:1] if self.known is None else self.known

    @property
    def stages(self) -> set[Key]:
        """Keys of the stages of the example trials."""
        return {key_of(planned) for each in self.samples for planned in each.plan.stages}

    @property
    def stale(self) -> list[PlannedStage]:
        """The stages of all trials that have to run, each once."""
        return list({key_of(planned): planned for each in self.trials for planned in each.plan.stale}.values())

    @property
    def num_trials(self) -> int | None:
        """Number of trials; for a sampler, the maximum."""
        return self.sweep.num_trials if self.known is None else len(self.known)

    def title(self, stage: str, number: int) -> str:
        """The name of a stage, with the trial's number if trials differ in it: ``dpo#3``."""
        return f"{stage}#{number}" if stage in self.own else stage


def key_of(planned: PlannedStage) -> Key:
    """Trials share a stage if these are equal."""
    return planned.name, planned.fingerprint


def count_stages(trials: Sequence[Trial]) -> dict[str, int]:
    """Stage -> number of different artifacts that all trials need."""
    keys = dict.fromkeys(key_of(planned) for each in trials for planned in each.plan.stages)
    return {name: sum(stage == name for stage, _ in keys) for name in dict.fromkeys(stage for stage, _ in keys)}


def read_sweep(overrides: Sequence[str], config_dir: Path | None = None) -> SweepPlan:
    """Reads and checks a sweep, and plans its trials if they are fixed.

    Raises:
        ConfigError: an override, a setting or a trial is wrong.
    """
    shared, swept = fixed_and_swept(overrides)
    sweep = typed(Sweep, Composer(shared, config_dir).part("sweep"), "sweep")
    given = {field_of(word) for word in shared}  # the command line replaces sweep.fixed
    sweep = replace(
        sweep, fixed={name: value for name, value in sweep.fixed.items() if field_name(sweep, name) not in given}
    )
    fixed = [*fixed_overrides(sweep), *shared]
    params = merged_params(sweep, fixed, swept)
    space = {field: read_values(field, values) for field, values in params.items()}
    planner = Planner(fixed, sweep.until, config_dir)
    known = None
    if sweep.sampler is None:
        known = [planner.plan(number, each) for number, each in enumerate(combinations(space))]
    samples = known or list(_samples(planner, space))
    check_sweep(sweep, space, [planned.name for planned in samples[0].plan.stages])
    return SweepPlan(
        sweep=sweep, params=params, space=space, overrides=shared, planner=planner, known=known, samples=samples,
        own=varying(samples[0].plan.pipeline, params),
    )  # fmt: skip


def _samples(planner: Planner, space: Mapping[str, Values]) -> Iterator[Trial]:
    """A trial with the first values of all fields, and one for each further value of categories."""
    first = {field: values.first for field, values in space.items()}
    yield planner.plan(0, first)
    for field, values in space.items():
        for value in values.choices[1:] if values.low is None else ():
            with contextlib.suppress(ConfigError):  # it may be valid with other values of the other fields
                yield planner.plan(0, {**first, field: value})


def varying(pipeline: Pipeline, fields: Iterable[str]) -> frozenset[str]:
    """The stages that these fields may change: their own stages and all descendants."""
    places = [field.split(".") for field in fields]
    if any(place[0] != "stages" or len(place) < 2 for place in places):
        return frozenset(pipeline.stages)  # a group, a source, or a default of all stages
    found = {place[1] for place in places}
    for name in pipeline.order():
        if found & set(pipeline.upstream(name)):
            found.add(name)
    return frozenset(found & pipeline.stages.keys())


def check_sweep(sweep: Sweep, space: Mapping[str, Values], stages: Sequence[str]) -> None:
    """Checks objectives, pruning and sampler of a sweep with trials of these stages.

    Raises:
        ConfigError: an objective or the pruning names another stage, an objective's function cannot be imported, or
            Optuna refuses the sampler, the pruner or the space.
    """
    for name, objective in sweep.objectives.items():
        if objective.function:
            _function(name, objective.function)
            continue
        stage, slash, _ = str(objective.metric).partition("/")
        where = f"sweep.objectives.{name}.metric={objective.metric}"
        if not slash:
            raise ConfigError(f"{where}: not a metric of a stage; write STAGE/METRIC")
        _require_stage(where, stage, stages)
    if sweep.pruning:
        _require_stage(f"sweep.pruning.stage={sweep.pruning.stage}", sweep.pruning.stage, stages)
    if sweep.sampler is not None:
        from flows.sweep.study import try_out  # imports optuna

        try_out(sweep, space)


def _require_stage(where: str, stage: str, stages: Sequence[str]) -> None:
    if stage not in stages:
        raise ConfigError(f"{where}: no trial runs a stage {stage}; they run: {listed(stage, stages)}")


def _function(name: str, path: str) -> Judge:
    where = f"sweep.objectives.{name}.function"
    found = dotted(path, where)
    if not callable(found):
        raise ConfigError(f"{where}={path}: not a function; give one of Mapping[stage, Manifest] that returns a number")
    return cast(Judge, found)


def objective_values(sweep: Sweep, manifests: Mapping[str, Manifest]) -> dict[str, float]:
    """The objectives of a complete trial.

    Raises:
        ArtifactError: there is no such metric, a function failed, or a value is not finite.
    """
    return {name: _objective_value(name, each, manifests) for name, each in sweep.objectives.items()}


def _objective_value(name: str, objective: Objective, manifests: Mapping[str, Manifest]) -> float:
    if objective.function:
        try:
            value = _function(name, objective.function)(manifests)
        except Exception as error:  # a function of the user's may raise anything
            raise ArtifactError(
                f"objective {name} ({objective.function}) raised {type(error).__name__}: {error}"
            ) from error
    else:
        metric, found = str(objective.metric), dict[str, float]()
        for stage, each in manifests.items():
            found |= {f"{stage}/{measured}": value for measured, value in each.metrics.items()}
        if metric not in found:
            of_stage = [each for each in found if each.startswith(metric.partition("/")[0] + "/")] or found
            raise ArtifactError(
                f"no metric {metric}; there are: {listed(metric, sorted(of_stage)) or 'none'} "
                "(choose one with sweep.objectives.NAME.metric)"
            )
        value = found[metric]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ArtifactError(f"objective {name} ({objective.metric or objective.function}) is {value}, not finite")
    return float(value)
