"""A sweep as the words of a command and ``sweep:`` in the configuration state it."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flows.declare.compose import Composer, field_of
from flows.declare.config import typed
from flows.declare.sweep import Sweep
from flows.planning.plan import PlannedStage
from flows.sweep.dimension import Choices, Dimension, Steps, dimensions
from flows.sweep.objective import check_sweep
from flows.sweep.planner import Key, PlannedTrial, Planner, key_of
from flows.sweep.proposers import Grid
from flows.sweep.space import fixed_and_swept, fixed_words, merged_params
from flows.sweep.trial import Trial
from lineage.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Stated:
    """A sweep before anything of it runs.

    Args:
        params: field -> values, of all that varies.
        space: the same, read.
        words: the overrides of the command that are the same in every trial.
        known: every trial, planned, where they are fixed beforehand; None: a sampler proposes them.
        samples: plans of the kind that the trials have, at least one; always the same for the same sweep.
    """

    sweep: Sweep
    params: dict[str, str]
    space: dict[str, Dimension]
    words: list[str]
    config_dir: Path | None
    planner: Planner
    known: list[PlannedTrial] | None
    samples: list[PlannedTrial]

    @property
    def sample(self) -> PlannedTrial:
        return self.samples[0]

    @property
    def stages(self) -> set[Key]:
        """What trials are made of, as far as it is known beforehand."""
        return {key_of(planned) for each in self.samples for planned in each.plan.stages}

    @property
    def own(self) -> frozenset[str]:
        """The stages that may differ from trial to trial."""
        return self.sample.own

    @property
    def trials(self) -> list[PlannedTrial]:
        """All that are known; of a sampler's, one of their kind."""
        return [self.sample] if self.known is None else self.known

    @property
    def stale(self) -> list[PlannedStage]:
        """The stages that have something to do, each once."""
        return list({key_of(planned): planned for each in self.trials for planned in each.plan.stale}.values())

    @property
    def num_trials(self) -> int | None:
        """How many there are; of a sampler's, how many at most."""
        return self.sweep.num_trials if self.known is None else len(self.known)

    @property
    def titles(self) -> list[str]:
        """What stages are called at most."""
        last = (self.num_trials or 1) - 1
        return [f"{each.name}#{last}" if each.name in self.own else each.name for each in self.sample.plan.stages]

    @property
    def shared_words(self) -> list[str]:
        """The options and overrides of the command that are the same in every trial."""
        return [*(["--config-dir", str(self.config_dir)] if self.config_dir else []), *self.words]


def read_sweep(overrides: Sequence[str], config_dir: Path | None = None) -> Stated:
    """Reads, checks and, where its trials are known beforehand, plans a sweep.

    Raises:
        ConfigError: a word or a setting is wrong; or one of the trials is, which is named.
    """
    words, swept = fixed_and_swept(overrides)
    sweep = _without(typed(Sweep, Composer(words, config_dir).part("sweep"), "sweep"), words)
    shared = [*fixed_words(sweep), *words]
    params = merged_params(sweep, shared, swept)
    planner = Planner(shared, sweep.until, config_dir)
    space = dimensions(params)
    known = [planner.plan(trial) for trial in Grid(space).trials] if sweep.sampler is None else None
    samples = known or list(_samples(planner, space))
    check_sweep(sweep, space, [planned.name for planned in samples[0].plan.stages])
    return Stated(
        sweep=sweep, params=params, space=space, words=words, config_dir=config_dir, planner=planner, known=known,
        samples=samples,
    )  # fmt: skip


def _samples(planner: Planner, space: Mapping[str, Dimension]) -> Iterator[PlannedTrial]:
    """One trial with the first values of all fields, and one for each further choice: other data, other groups."""
    first = {field: each.values[0] if isinstance(each, Choices) else str(each.low) for field, each in space.items()}
    yield planner.plan(Trial(number=0, params=first))
    for field, each in space.items():
        further = each.values[1:] if isinstance(each, Choices) and not isinstance(each, Steps) else ()
        for value in further:
            with contextlib.suppress(ConfigError):  # it may go with other values of the other fields
                yield planner.plan(Trial(number=0, params={**first, field: value}))


def _without(sweep: Sweep, words: Sequence[str]) -> Sweep:
    """What the command line fixes otherwise than ``sweep.fixed`` is as the command line says."""
    stated = {field_of(word) for word in words}
    named = zip(fixed_words(sweep), sweep.fixed.items(), strict=True)
    return replace(sweep, fixed=dict(item for word, item in named if field_of(word) not in stated))
