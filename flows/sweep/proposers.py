"""Who proposes the trials of a sweep: every combination, or Optuna."""

import itertools
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from flows.declare.sweep import Sweep
from flows.sweep.dimension import Choices, Dimension, Steps
from flows.sweep.trial import Outcome, Proposer, Trial
from lineage.errors import ConfigError


def make_proposer(sweep: Sweep, space: Mapping[str, Dimension], folder: Path) -> Proposer:
    """The proposer that a sweep states.

    Args:
        folder: of the sweep, where Optuna keeps its study.

    Raises:
        ConfigError: it cannot propose from these values.
    """
    if sweep.sampler is None:
        return Grid(space)
    from flows.sweep.study import Study  # the import of optuna

    return Study(sweep, space, folder)


class Grid:
    """Proposes every combination once; the last field varies fastest, and the same sweep numbers them the same.

    Raises:
        ConfigError: a field has values without end, or a scale that only a sampler reads.
    """

    def __init__(self, space: Mapping[str, Dimension]) -> None:
        values = {field: _values(field, each) for field, each in space.items()}
        self.trials = [
            Trial(number=number, params=dict(zip(values, combination, strict=True)))
            for number, combination in enumerate(itertools.product(*values.values()))
        ]
        self._left = iter(self.trials)

    def at_work(self) -> AbstractContextManager[None]:
        """Whoever asks is given every combination; two that make one stage wait for each other there."""
        return nullcontext()

    def ask(self) -> Trial | None:
        return next(self._left, None)

    def report(self, trial: Trial, stage: str, step: int, metrics: Mapping[str, float]) -> bool:
        return False

    def tell(self, trial: Trial, outcome: Outcome) -> None:
        """Nothing that becomes of a trial changes what is tried next."""


def _values(field: str, values: Dimension) -> tuple[str, ...]:
    if not isinstance(values, Choices):
        raise ConfigError(
            f"{field}: an interval has values without end, and without a sampler every combination is tried; "
            "list values (0.1,0.2 or range(1,5)), or state a sampler: sweep=optuna"
        )
    if isinstance(values, Steps) and values.log:
        raise ConfigError(
            f"{field}: log says how a sampler draws, and without one every value is tried; "
            "leave the tag out, or state a sampler: sweep=optuna"
        )
    return values.values
