"""Temporally adaptive interpolated distillation: Shing et al. 2025, arXiv:2501.16937."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge, Gt, Le, Lt

from lineage.errors import ConfigError
from tasks.method import POLICY, TEACHER, AnswerTraining
from tasks.sft import SFT

if TYPE_CHECKING:
    from transformers import Trainer

    from tasks.train.run import TrainingRun


@dataclass(frozen=True, kw_only=True)
class TAID(SFT):
    """Trains a policy, the student, towards a distribution that moves from its own to the teacher's.

    The loss is the forward KL from that distribution, whose logits are (1 - t) x the student's, held fixed, + t x the
    teacher's. The share t rises from ``t_start`` to ``t_end``: after each step at least to where a straight line over
    the training would have it, and further while the loss falls (Algorithm 1 of the paper).

    Args:
        alpha: largest part of 1 - t that a step adds to t, beside the line.
        momentum: of the mean relative fall of the loss, which says how much of ``alpha`` is added.
    """

    version: ClassVar[int] = 1
    option_versions: ClassVar = {**AnswerTraining.option_versions}  # its packing never padded
    models: ClassVar = {"policy": POLICY, "teacher": TEACHER}

    t_start: Annotated[float, Ge(0), Lt(1)] = 0.4
    t_end: Annotated[float, Gt(0), Le(1)] = 1.0
    alpha: Annotated[float, Ge(0), Le(1)] = 5e-4
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.99

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.t_end <= self.t_start:
            raise ConfigError(
                f"t_start={self.t_start:g}, t_end={self.t_end:g}: the teacher's share rises from the first to the "
                "second; set t_end above t_start"
            )

    def trainer(self, run: "TrainingRun") -> "Trainer":
        from tasks.train.distill_trainer import Interpolation, distill_trainer, divergence

        interpolation = Interpolation(t_start=self.t_start, t_end=self.t_end, alpha=self.alpha, momentum=self.momentum)
        apart = partial(divergence, beta=0.0, temperature=1.0)
        return distill_trainer(run, divergence=apart, interpolation=interpolation)
