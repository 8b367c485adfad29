"""The trials of a sweep as plans, checks before the sweep starts, and the objectives of trials."""

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import cast

from hydra.core.override_parser.types import Override, RangeSweep

from flows.declare.config import Composer, TypedFloat, TypedInt, field_of, pipeline_of, typed
from flows.declare.pipeline import Pipeline, listed
from flows.declare.sweep import Objective, Sweep
from flows.planning.checks import require_metric
from flows.planning.plan import Memo, Plan, PlannedStage, make_plan
from flows.sweep.folder import overrides
from flows.sweep.space import choices, combinations, fixed_and_swept, read_values, require_variable
from lineage.code import dotted
from lineage.errors import ArtifactError, ConfigError
from lineage.record.metrics_file import is_score
from lineage.store import Manifest
from tasks.context import Launcher

Key = tuple[str, str]  # one artifact: stage and fingerprint


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
    """A sweep before it runs. What its trials share is composed, pinned and looked up once.

    Args:
        params: field -> values as written, of all fields that vary.
        space: field -> parsed values; empty: the trials do not come from a space.
        overrides: the overrides that all trials share.
    """

    sweep: Sweep
    params: Mapping[str, str]
    space: Mapping[str, Override]
    overrides: Sequence[str]
    config_dir: Path | None

    @cached_property
    def _composer(self) -> Composer:
        return Composer(self.overrides, self.config_dir)

    @cached_property
    def _memo(self) -> Memo:
        return Memo()

    def trial(self, number: int, params: Mapping[str, str]) -> Trial:
        """Plans one trial."""
        own = overrides(params)
        try:
            pipeline = pipeline_of(self._composer.tree(own), [*self.overrides, *own], self.config_dir)
            for name, stage in pipeline.stages.items():
                if stage.resources.launcher == Launcher.FOREGROUND:
                    raise ConfigError(
                        f"stages.{name}.resources.launcher={Launcher.FOREGROUND}: a sweep runs stages side by side; "
                        "debug a single trial with posttrain run, or choose another launcher"
                    )
            return Trial(number=number, params=params, plan=_until(make_plan(pipeline, self._memo), self.sweep.until))
        except ConfigError as error:
            raise ConfigError(f"trial {number}: {' '.join(own)}: {error}") from error

    @cached_property
    def known(self) -> list[Trial] | None:
        """All trials, if they are fixed; None: they are proposed one after another."""
        if self.sweep.sampler is not None or not self.space:
            return None
        return [self.trial(number, params) for number, params in enumerate(combinations(self.space))]

    @cached_property
    def samples(self) -> list[Trial]:
        """All trials, if they are fixed; else that of the first values, and one for each further category."""
        if self.known:
            return self.known
        starts = {field: (choices(values) or (str(values.value().start),)) for field, values in self.space.items()}
        first = {field: texts[0] for field, texts in starts.items()}
        found = [self.trial(0, first)]
        for field, texts in starts.items():
            for text in () if isinstance(self.space[field].value(), RangeSweep) else texts[1:]:
                with contextlib.suppress(ConfigError):  # it may be valid with other values of the other fields
                    found.append(self.trial(0, {**first, field: text}))
        return found

    @property
    def plan(self) -> Plan:
        """The plan of one trial."""
        return self.samples[0].plan

    @cached_property
    def own(self) -> frozenset[str]:
        """Names of the stages that may differ between trials."""
        return varying(self.plan.pipeline, self.params)

    @property
    def stale(self) -> list[PlannedStage]:
        """The stages of all trials that have to run, each once."""
        return [planned for planned in union(self.samples).values() if planned.state != "reuse"]

    @property
    def num_trials(self) -> int | None:
        """Number of trials; for a sampler, the maximum; None: not known."""
        return self.sweep.num_trials if self.known is None else len(self.known)

    def title(self, stage: str, number: int) -> str:
        """The name of a stage, with the trial's number if trials differ in it: ``dpo#3``."""
        return f"{stage}#{number}" if stage in self.own else stage


def key_of(planned: PlannedStage) -> Key:
    """Trials share a stage if these are equal."""
    return planned.name, planned.fingerprint


def union(trials: Sequence[Trial]) -> dict[Key, PlannedStage]:
    """The different stages of all trials."""
    return {key_of(planned): planned for each in trials for planned in each.plan.stages}


def count_stages(trials: Sequence[Trial]) -> dict[str, int]:
    """Stage -> number of different artifacts that all trials need."""
    names = [name for name, _ in union(trials)]
    return {name: names.count(name) for name in names}


def read_sweep(arguments: Sequence[str], config_dir: Path | None = None) -> SweepPlan:
    """Reads and checks a sweep, and plans its trials if they are fixed.

    Raises:
        ConfigError: an override, a setting or a trial is wrong.
    """
    shared, swept = fixed_and_swept(arguments)
    node = Composer(shared, config_dir).part("sweep")
    if isinstance(fixed := node.get("fixed"), dict):  # numbers as they were typed: a field may be a text
        scalars = {field: value for field, value in fixed.items() if not isinstance(value, dict | list)}
        node["fixed"] = {**fixed, **{field: _written(value) for field, value in scalars.items()}}
    sweep = typed(Sweep, node, "sweep")
    overridden = {field_of(word) for word in shared}  # the command line replaces sweep.fixed
    cli_args = [f"{field}={value}" for field, value in sweep.fixed.items() if field not in overridden]
    cli_args = [*cli_args, *(word for word in shared if field_of(word).split(".")[0] != "sweep")]
    params = {**sweep.params, **swept}
    require_variable(params, cli_args)
    space = {field: read_values(field, values) for field, values in params.items()}
    found = SweepPlan(sweep=sweep, params=params, space=space, overrides=cli_args, config_dir=config_dir)
    check_sweep(sweep, space, [planned.name for planned in found.plan.stages])
    check_metrics(sweep, found.plan)
    check_recorded(sweep, [each.plan for each in found.samples])
    return found


def _written(value: object) -> str:
    """A value as an override writes it."""
    return str(value) if isinstance(value, str | TypedInt | TypedFloat) else json.dumps(value)


def varying(pipeline: Pipeline, fields: Iterable[str]) -> frozenset[str]:
    """The stages that these fields may change: their own stages and all descendants."""
    places = [field.split(".") for field in fields]
    if any(place[0] != "stages" or len(place) < 2 for place in places):
        return frozenset(pipeline.stages)  # a group, a source, or a default of all stages
    found = {place[1] for place in places} & pipeline.stages.keys()
    for name in pipeline.order():
        if found & set(pipeline.upstream(name)):
            found.add(name)
    return frozenset(found)


def check_sweep(sweep: Sweep, space: Mapping[str, Override], stages: Sequence[str]) -> None:
    """Checks objectives, pruning and sampler of a sweep with trials of these stages.

    Raises:
        ConfigError: an objective or the pruning names another stage, an objective's function cannot be imported, or
            Optuna refuses the sampler, the pruner or the space.
    """
    named = {f"sweep.pruning.stage={sweep.pruning.stage}": sweep.pruning.stage} if sweep.pruning else {}
    for name, objective in sweep.objectives.items():
        if objective.function:
            _function(name, objective.function)
            continue
        stage, slash, _ = str(objective.metric).partition("/")
        where = f"sweep.objectives.{name}.metric={objective.metric}"
        if not slash:
            raise ConfigError(f"{where}: not a metric of a stage; write STAGE/METRIC")
        named[where] = stage
    for where, stage in named.items():
        if stage not in stages:
            raise ConfigError(f"{where}: no trial runs a stage {stage}; they run: {listed(stage, stages)}")
    if sweep.sampler is not None:
        from flows.sweep.study import try_out  # imports optuna

        try_out(sweep, space)


def check_metrics(sweep: Sweep, plan: Plan) -> None:
    """Checks that objectives and pruning name what their stages will measure, where that is known before they ran.

    Raises:
        ConfigError: a stage measures no such metric, or reports none while it runs.
    """
    reported = [("pruning.metric", sweep.pruning.stage, sweep.pruning.metric)] if sweep.pruning else []
    reported += [("by_step", str(sweep.until), sweep.by_step)] if sweep.by_step else []
    for field, stage, metric in reported:
        of_steps = not is_score(metric)
        require_metric(f"sweep.{field}={metric}", stage, plan.stage(stage).stage, metric, of_steps=of_steps)
    for name, objective in sweep.objectives.items():
        if objective.metric is not None:
            stage, _, metric = objective.metric.partition("/")
            where = f"sweep.objectives.{name}.metric={objective.metric}"
            require_metric(where, stage, plan.stage(stage).stage, metric)


def check_recorded(sweep: Sweep, plans: Iterable[Plan]) -> None:
    """Checks that the finished stages of trials have the metrics of the objectives.

    Raises:
        ConfigError: one was finished before its evaluation was set, or by an older version.
    """
    for name, objective in sweep.objectives.items():
        stage, _, metric = str(objective.metric).partition("/")
        for plan in plans if objective.metric else ():
            planned = plan.stage(stage)
            manifest = plan.entry(planned).manifest() if planned.state == "reuse" else None
            if manifest and metric not in manifest.metrics:
                raise ConfigError(
                    f"sweep.objectives.{name}.metric={objective.metric}: {stage} is finished and has not measured it; "
                    f"it measured {listed(metric, sorted(manifest.metrics))}; to measure it, change a field, such as "
                    f"stages.{stage}.method.evaluation.pick=best, or delete {plan.entry(planned).path}"
                )


def _function(name: str, path: str) -> Callable[[Mapping[str, Manifest]], float]:
    where = f"sweep.objectives.{name}.function"
    found = dotted(path, where)
    if not callable(found):
        raise ConfigError(f"{where}={path}: not a function; give one of Mapping[stage, Manifest] that returns a number")
    return cast(Callable[[Mapping[str, Manifest]], float], found)


def metrics_of(manifests: Mapping[str, Manifest]) -> dict[str, float]:
    """``STAGE/METRIC`` -> value."""
    return {f"{stage}/{name}": value for stage, each in manifests.items() for name, value in each.metrics.items()}


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
        metric, found = str(objective.metric), metrics_of(manifests)
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
