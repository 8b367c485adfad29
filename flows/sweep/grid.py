"""Every combination of the values, in order."""

import itertools
import threading
from collections.abc import Mapping

from flows.sweep.dimension import Choices, Dimension, Steps
from flows.sweep.trial import Outcome, Trial
from lineage.errors import ConfigError


class Grid:
    """Proposes every combination once; the last field varies fastest, and the same sweep numbers them the same.

    Raises:
        ConfigError: a field has values without end, or a scale that only a sampler reads.
    """

    def __init__(self, space: Mapping[str, Dimension]) -> None:
        values = {field: _values(field, each) for field, each in space.items()}
        self._trials = [
            Trial(number=number, params=dict(zip(values, combination, strict=True)))
            for number, combination in enumerate(itertools.product(*values.values()))
        ]
        self._left = iter(self._trials)
        self._lock = threading.Lock()

    def known(self) -> list[Trial] | None:
        return list(self._trials)

    def ask(self) -> Trial | None:
        with self._lock:
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
