"""Distillation of a teacher into a student on conversations: Hinton et al. 2015, arXiv:1503.02531."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge, Gt, Le, Lt

from tasks.method import POLICY, TEACHER, AnswerTraining
from tasks.sft import SFT

if TYPE_CHECKING:
    from transformers import Trainer

    from tasks.train.run import TrainingRun


@dataclass(frozen=True, kw_only=True)
class Distillation(SFT):
    """Trains a policy, the student, towards a teacher's distribution at the tokens that SFT would train.

    The loss is (1 - cross_entropy_weight) x divergence + cross_entropy_weight x cross-entropy on the rows' own tokens.

    Args:
        beta: of the divergence: 0 is the forward KL from teacher to student, 1 the reverse KL, between them the
            generalized Jensen-Shannon divergence: Agarwal et al. 2024, arXiv:2306.13649, eq. 1, at lambda = 0.
        temperature: softens both distributions; the divergence is multiplied by its square.
    """

    version: ClassVar[int] = 1
    option_versions: ClassVar = {**AnswerTraining.option_versions}  # its packing never padded
    models: ClassVar = {"policy": POLICY, "teacher": TEACHER}
    measures: ClassVar = ("divergence", "mean_token_accuracy")

    beta: Annotated[float, Ge(0), Le(1)] = 0.0
    temperature: Annotated[float, Gt(0)] = 1.0
    cross_entropy_weight: Annotated[float, Ge(0), Lt(1)] = 0.0  # in the loss, beside the divergence

    def trainer(self, run: "TrainingRun") -> "Trainer":
        from tasks.train.losses.distill_trainer import distill_trainer, divergence

        apart = partial(divergence, beta=self.beta, temperature=self.temperature)
        return distill_trainer(run, divergence=apart, cross_entropy_weight=self.cross_entropy_weight)
