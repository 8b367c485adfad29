"""On-policy distillation: Agarwal et al. 2024, arXiv:2306.13649, at lambda = 1."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge, Le

from tasks.method import POLICY, TEACHER
from tasks.train.best import COMPLETIONS
from tasks.train.generation.generating import Completing

if TYPE_CHECKING:
    from transformers import Trainer

    from tasks.train.run import TrainingRun


@dataclass(frozen=True, kw_only=True)
class OnPolicyDistillation(Completing):
    """Trains a policy, the student, towards a teacher's distribution at the tokens of its own completions.

    The loss is a mean over all tokens of the step's completions. ``sampling.temperature`` is also that of both
    distributions. A mixture of experts gets no auxiliary loss, in which it would balance its experts.

    Args:
        beta: of the divergence: 0 is the forward KL from teacher to student, 1 the reverse KL, between them the
            generalized Jensen-Shannon divergence (eq. 1).
    """

    version: ClassVar[int] = 2  # 1 did not stop at the end of turn that the chat template alone names
    models: ClassVar = {"policy": POLICY, "teacher": TEACHER}
    default_learning_rate: ClassVar = 1e-6
    measures: ClassVar = COMPLETIONS

    beta: Annotated[float, Ge(0), Le(1)] = 1.0

    def trainer(self, run: "TrainingRun") -> "Trainer":
        from tasks.train.generation.generating_trainer import on_policy_trainer

        return on_policy_trainer(run, self, beta=self.beta)
