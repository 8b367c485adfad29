"""A sweep as the words of a command and ``sweep:`` in the configuration state it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flows.compose import Composer
from flows.plan import PlannedStage
from flows.sweep.dimension import Choices, Dimension
from flows.sweep.grid import Grid
from flows.sweep.planner import PlannedTrial, Planner, key_of
from flows.sweep.proposers import check_sweep
from flows.sweep.settings import Sweep
from flows.sweep.space import dimensions, fixed_words, merged_params, split_words
from flows.sweep.trial import Trial
from flows.typed import typed


@dataclass(frozen=True, kw_only=True)
class Stated:
    """A sweep before anything of it runs.

    Args:
        params: field -> values, of all that varies.
        words: the overrides of the command that are the same in every trial.
        known: every trial, planned, where they are fixed beforehand; None: a sampler proposes them.
        sample: a plan of the kind that the trials have.
    """

    sweep: Sweep
    params: dict[str, str]
    words: list[str]
    config_dir: Path | None
    planner: Planner
    known: list[PlannedTrial] | None
    sample: PlannedTrial

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
    def titles(self) -> list[str]:
        """What stages are called at most."""
        last = (self.sweep.num_trials or len(self.trials)) - 1
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
    words, swept = split_words(overrides)
    sweep = _without(typed(Sweep, Composer(words, config_dir).part("sweep"), "sweep"), words)
    shared = [*fixed_words(sweep), *words]
    params = merged_params(sweep, shared, swept)
    planner = Planner(shared, sweep.until, config_dir)
    space = dimensions(params)
    if sweep.sampler is None:
        known = [planner.plan(trial) for trial in Grid(space).known() or []]
        sample = known[0]
    else:
        known = None
        sample = planner.plan(Trial(number=0, params={field: _any(each) for field, each in space.items()}))
    check_sweep(sweep, [planned.name for planned in sample.plan.stages])
    return Stated(
        sweep=sweep, params=params, words=words, config_dir=config_dir, planner=planner, known=known, sample=sample
    )


def _without(sweep: Sweep, words: Sequence[str]) -> Sweep:
    """What the command line fixes otherwise than ``sweep.fixed`` is as the command line says."""
    stated = {_field(word) for word in words}
    named = zip(fixed_words(sweep), sweep.fixed.items(), strict=True)
    return replace(sweep, fixed=dict(item for word, item in named if _field(word) not in stated))


def _any(values: Dimension) -> str:
    """One value, as an override states it."""
    return values.values[0] if isinstance(values, Choices) else str(values.low)


def _field(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]
