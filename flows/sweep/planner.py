"""Trials as plans: what they share is composed, pinned and looked up once, and one trial says what the others are."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flows.declare.compose import Composer
from flows.declare.config import pipeline_of
from flows.declare.pipeline import Pipeline, nearest
from flows.planning.plan import Memo, Plan, PlannedStage, make_plan
from flows.sweep.trial import Trial
from lineage.errors import ConfigError
from tasks.context import Launcher

Key = tuple[str, str]  # one artifact: stage and fingerprint


def key_of(planned: PlannedStage) -> Key:
    """By which two trials know that they share a stage."""
    return planned.name, planned.fingerprint


@dataclass(frozen=True, kw_only=True)
class PlannedTrial:
    """A trial and its plan.

    Args:
        own: names of the stages that its parameters may change; the others are the same in every trial.
    """

    trial: Trial
    plan: Plan
    own: frozenset[str]

    @property
    def titles(self) -> dict[str, str]:
        """What its own stages are called: ``dpo#3``."""
        return {name: f"{name}#{self.trial.number}" for name in self.own}


class Planner:
    """Plans trials of one sweep.

    Args:
        words: overrides that every trial has.
        until: the stage that a trial ends with; None: all of them.

    Raises:
        ConfigError: the words do not compose.
    """

    def __init__(self, words: Sequence[str], until: str | None = None, config_dir: Path | None = None) -> None:
        self._words, self._until, self._config_dir = list(words), until, config_dir
        self._composer, self._memo = Composer(words, config_dir), Memo()

    def plan(self, trial: Trial) -> PlannedTrial:
        """One trial.

        Raises:
            ConfigError: names the trial and what is wrong with it.
        """
        try:
            tree = self._composer.tree(trial.overrides)
            pipeline = pipeline_of(tree, [*self._words, *trial.overrides], self._config_dir)
            _refuse_foreground(pipeline)
            plan = _part(make_plan(pipeline, self._memo), self._until)
            return PlannedTrial(trial=trial, plan=plan, own=varying(pipeline, trial.params))
        except ConfigError as error:
            raise ConfigError(f"trial {trial.number}: {' '.join(trial.overrides)}: {error}") from error


def varying(pipeline: Pipeline, fields: Iterable[str]) -> frozenset[str]:
    """The stages that these fields may change: those that they are fields of, and all that is made from them."""
    places = [field.split(".") for field in fields]
    if any(place[0] != "stages" or len(place) < 2 for place in places):
        return frozenset(pipeline.stages)  # a group, a source, or what all stages take from the root
    found = {place[1] for place in places}
    for name in pipeline.order():
        if found & set(pipeline.upstream(name)):
            found.add(name)
    return frozenset(found & pipeline.stages.keys())


def count_stages(trials: Sequence[PlannedTrial]) -> Mapping[str, int]:
    """Stage -> how many different artifacts of it all trials together need."""
    keys = {key_of(planned) for each in trials for planned in each.plan.stages}
    names = [planned.name for each in trials for planned in each.plan.stages]
    return {name: sum(stage == name for stage, _ in keys) for name in dict.fromkeys(names)}


def _part(plan: Plan, stage: str | None) -> Plan:
    """The part of a plan that one stage needs."""
    if stage is None:
        return plan
    names = [planned.name for planned in plan.stages]
    if stage not in names:
        raise ConfigError(f"sweep.until={stage}: no such stage; there are: {', '.join(names)}{nearest(stage, names)}")
    needed = {stage}
    for planned in reversed(plan.stages):  # in order of execution, so each comes after all that it needs
        if planned.name in needed:
            needed |= set(planned.upstream)
    return replace(plan, stages=[planned for planned in plan.stages if planned.name in needed])


def _refuse_foreground(pipeline: Pipeline) -> None:
    for name, stage in pipeline.stages.items():
        if stage.resources.launcher == Launcher.FOREGROUND:
            raise ConfigError(
                f"stages.{name}.resources.launcher={Launcher.FOREGROUND}: a sweep runs stages beside each other; "
                "debug a single trial with posttrain run, or take another launcher"
            )
