"""When a training is measured on held-out rows, and which checkpoint is the best by a metric."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, ClassVar, Literal

from annotated_types import Gt

from lineage.checkpoints import Checkpoint
from lineage.errors import ConfigError

VAL_LOSS = "val/loss"
HELD_OUT_LOSS = "held_out_loss"  # the mean loss on the held-out rows of the stage's own data
# By the end of a metric's name.
_SMALL_IS_GOOD = re.compile(r"(loss|perplexity|grad_norm)$")
_LARGE_IS_GOOD = re.compile(r"(accuracy|accuracies|margins)$")


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """An order of checkpoints by one metric.

    Args:
        metric: one that the stage reports, as the mean of its last steps, each before its own update; or
            ``held_out_loss``, of the model itself.
        mode: whether small or large is good; None: small for what ends in loss, perplexity or grad_norm, large for
            what ends in accuracy, accuracies or margins.

    Class attributes:
        key: where it is stated.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True, "allow_inf_nan": False}

    key: ClassVar[str] = ""

    metric: str
    mode: Literal["min", "max"] | None = None

    def __post_init__(self) -> None:
        if self.mode is None and not _SMALL_IS_GOOD.search(self.metric) and not _LARGE_IS_GOOD.search(self.metric):
            raise ConfigError(
                f"{self.key}.metric={self.metric}: whether small or large is good does not show in its name; state "
                f"{self.key}.mode=min or max"
            )

    def is_better(self, value: float, than: float | None) -> bool:
        """Of equal values the earlier is the better one; what is no number is never better."""
        if not math.isfinite(value):
            return False
        small = self.mode == "min" or (self.mode is None and bool(_SMALL_IS_GOOD.search(self.metric)))
        return than is None or (value < than if small else value > than)

    def best(self, checkpoints: Sequence[Checkpoint], count: int = 1) -> list[Checkpoint]:
        """The best first; those that do not have the metric are left out.

        Args:
            checkpoints: by step, ascending.
        """
        left, found = list(checkpoints), list[Checkpoint]()
        while len(found) < count:
            first = self._first(left)
            if first is None:
                break
            found.append(first)
            left.remove(first)
        return found

    def _first(self, checkpoints: Sequence[Checkpoint]) -> Checkpoint | None:
        first = None
        for each in checkpoints:
            value = each.metrics.get(self.metric, math.nan)
            if self.is_better(value, first.metrics[self.metric] if first else None):
                first = each
        return first


@dataclass(frozen=True, kw_only=True)
class KeepBest(Ranking):
    """Which checkpoints are kept beside the newest, and beside the output when the stage is finished: execution."""

    key: ClassVar[str] = "resources.keep_best"

    n: Annotated[int, Gt(0)] = 1


@dataclass(frozen=True, kw_only=True)
class Best(Ranking):
    """Which model is a stage's best: that of all multiples of ``every_steps``, and of the last step. Identity.

    Args:
        every_steps: None: those that ``validation`` measures compete.
    """

    key: ClassVar[str] = "method.best"

    metric: str = HELD_OUT_LOSS
    every_steps: Annotated[int, Gt(0)] | None = None

    def competes(self, step: int) -> bool:
        """Whether a model before the last one competes: checkpoints of other steps were saved for other reasons.

        Args:
            step: optimizer steps that it was trained for; the last one competes whatever their number.
        """
        return self.every_steps is None or step % self.every_steps == 0  # else only what was measured has the metric


def kept_steps(
    checkpoints: Sequence[Checkpoint], keep_last: int, keep_best: KeepBest | None, best: Best | None
) -> set[int]:
    """The steps whose checkpoints stay while the stage trains.

    Args:
        checkpoints: by step, ascending.
        best: also the one that was the best at each of the newest, so that a stage that goes on from an older one,
            because the newest is damaged, still ends with the same model. It is one at the most: what became the best
            later is a checkpoint itself, and so among the newest.
    """
    newest = [each.step for each in checkpoints[-keep_last:]]
    kept = set(newest)
    if keep_best:
        kept |= {each.step for each in keep_best.best(checkpoints, keep_best.n)}
    if best:
        for step in newest:
            competed = [each for each in checkpoints if each.step <= step and best.competes(each.step)]
            kept |= {each.step for each in best.best(competed)}
    return kept


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Measures the loss on held-out rows while a stage trains, and after its last step.

    Args:
        every_steps: optimizer steps from one measurement to the next.
        every_epochs: the same in passes over the rows: 0.5 is twice a pass. One of the two is set.
        patience: measurements in a row without a smaller loss, after which the training ends; None: it never does.
        max_rows: the first of the held-out examples; None: all.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True, "allow_inf_nan": False}

    every_steps: Annotated[int, Gt(0)] | None = None
    every_epochs: Annotated[float, Gt(0)] | None = None
    patience: Annotated[int, Gt(0)] | None = None
    max_rows: Annotated[int, Gt(0)] | None = None

    def __post_init__(self) -> None:
        if (self.every_steps is None) == (self.every_epochs is None):
            found = "neither is" if self.every_steps is None else "both are"
            raise ConfigError(
                f"validation.every_steps and validation.every_epochs: {found} set, and one of them says when the loss "
                "is measured; set validation.every_steps=N or validation.every_epochs=1, and the other to null"
            )

    def is_due(self, step: int, num_rows: int, rows_per_step: int | Fraction) -> bool:
        """Whether the loss is measured after a step that is not the last, which is always measured."""
        if self.every_steps is not None:
            return step % self.every_steps == 0
        assert self.every_epochs
        return completes_epochs(self.every_epochs, step, num_rows, rows_per_step)


@dataclass
class Patience:
    """The measurements so far: the smallest, and how many in a row were no smaller."""

    least: float = math.inf
    waited: int = 0

    def add(self, loss: float) -> None:
        """A non-finite loss is no improvement."""
        if loss < self.least:
            self.least, self.waited = loss, 0
        else:
            self.waited += 1


def steps_of_epochs(epochs: float, num_rows: int, rows_per_step: int | Fraction) -> int:
    """Optimizer steps of so many passes over the rows; the last one is filled from the next pass."""
    return max(1, math.ceil(_rows(epochs, num_rows) / rows_per_step))


def completes_epochs(epochs: float, step: int, num_rows: int, rows_per_step: int | Fraction) -> bool:
    """Whether a step is the first that completes a multiple of so many passes over the rows."""
    rows = _rows(epochs, num_rows)
    return step * rows_per_step // rows > (step - 1) * rows_per_step // rows


def _rows(epochs: float, num_rows: int) -> Fraction:
    return Fraction(str(epochs)) * num_rows  # exact: 1.1 x 100 rows are 110, and as floats a little more
