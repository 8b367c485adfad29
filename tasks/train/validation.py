"""Validation while a stage trains: when the loss on held-out rows is measured, and when it ends the training."""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, ClassVar

from annotated_types import Gt

from lineage.errors import ConfigError

VAL_LOSS = "val/loss"


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
