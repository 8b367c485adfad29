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

    With p of the teacher, q of the student and q' the student held fixed (section 3 of the paper):

        p_t = softmax((1 - t) logit_q' + t logit_p)           the interpolated distribution
        J^(t)(p, q) = KL(p_t || q), a mean over the tokens    the objective

    The share t rises from ``t_start`` to ``t_end``. After step n (Algorithm 1), with J_n the objective of that step,
    beta ``momentum`` and sigma the logistic function:

        delta_n = (J_(n-1) - J_n) / J_(n-1),  m_n = beta m_(n-1) + (1 - beta) delta_n
        t_n = min(t_end, max(t_linear, t_(n-1) + alpha sigma(m_n) (1 - t_(n-1))))

    ``t_linear`` lies on the straight line from ``t_start`` to ``t_end`` over the steps of the training.
    """

    version: ClassVar[int] = 1
    option_versions: ClassVar = {**AnswerTraining.option_versions}  # its packing never padded
    models: ClassVar = {"policy": POLICY, "teacher": TEACHER}
    measures: ClassVar = ("divergence", "taid/t", "mean_token_accuracy")
    progress: ClassVar = None  # J falls as the student learns, and rises as t does

    t_start: Annotated[float, Ge(0), Lt(1)] = 0.4  # the teacher's share t at the first step
    t_end: Annotated[float, Gt(0), Le(1)] = 1.0  # its largest value, reached at the last step at the latest
    alpha: Annotated[float, Ge(0), Le(1)] = 5e-4  # largest part of 1 - t that a step adds to t, beside the line
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.99  # of the mean relative fall of J, which decides the part of alpha

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.t_end <= self.t_start:
            raise ConfigError(f"t_start={self.t_start:g}, t_end={self.t_end:g}: set t_end above t_start")
        if self.alpha == 0 and self.momentum != type(self).momentum:
            raise ConfigError(f"momentum={self.momentum:g} has no effect with alpha=0; remove it, or set alpha=0.0005")

    def trainer(self, run: "TrainingRun") -> "Trainer":
        from tasks.train.losses.distill_trainer import Interpolation, distill_trainer, divergence

        interpolation = Interpolation(t_start=self.t_start, t_end=self.t_end, alpha=self.alpha, momentum=self.momentum)
        apart = partial(divergence, beta=0.0, temperature=1.0)
        return distill_trainer(run, divergence=apart, interpolation=interpolation)
