"""Online direct preference optimization: Guo et al. 2024, arXiv:2402.04792."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Ge, Gt

from tasks.data.images import Images
from tasks.train.best import PAIRS, REWARDED
from tasks.train.generation.generating import Generating

if TYPE_CHECKING:
    from transformers import Trainer

    from tasks.train.run import TrainingRun


@dataclass(frozen=True, kw_only=True)
class OnlineDPO(Generating):
    """DPO on pairs of the policy's own completions, which the rewards judge (algorithm 1).

    Of each prompt, the completion of the highest reward is chosen, that of the lowest rejected. A prompt whose
    completions have equal rewards gets no loss: TRL's trainer takes the first as the better one.

    Args:
        beta: strength of the KL to the policy that the stage starts from.
        loss: as ``loss_type`` of DPO.
        images: prompts may have images, as of ``sft``.
    """

    version: ClassVar[int] = 2  # 1 took steps without a signal
    whole_groups: ClassVar[bool] = True

    default_learning_rate: ClassVar = 5e-7
    measures: ClassVar = (*REWARDED, *PAIRS[:4])
    num_generations: Annotated[int, Ge(2)] = 2
    beta: Annotated[float, Gt(0)] = 0.1
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    images: Images | None = None

    def trainer(self, run: "TrainingRun") -> "Trainer":
        from trl import GRPOConfig

        from tasks.train.generation.generating_trainer import OnlineDPOTrainer, generating_trainer

        return generating_trainer(
            run, OnlineDPOTrainer, GRPOConfig, kl_beta=self.beta, pair_loss=self.loss, scale="none",
            temperature=1.0,
        )  # fmt: skip
