"""Direct preference optimization: Rafailov et al. 2023, arXiv:2305.18290."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Gt

from lineage.errors import ConfigError
from tasks.data.kinds import PREFERENCES
from tasks.method import FROZEN_POLICY, POLICY, AnswerTraining

if TYPE_CHECKING:
    from transformers import Trainer

    from tasks.train.run import TrainingRun


@dataclass(frozen=True, kw_only=True)
class DPO(AnswerTraining):
    """Tunes a policy on preference pairs; its frozen start is the reference.

    Args:
        beta: strength of the KL to the reference.
        loss_type: ``sigmoid`` is eq. 7 of the paper; ``ipo`` arXiv:2310.12036, ``hinge`` arXiv:2305.10425.
        sft_weight: of the chosen answers' log-likelihood in the loss, which keeps them likely (``rpo_loss``).
    """

    version: ClassVar[int] = 2  # 1 also trained the template's text after the token that ends an answer
    reads: ClassVar = PREFERENCES
    models: ClassVar = {"policy": POLICY, "reference": FROZEN_POLICY}

    default_learning_rate: ClassVar = 1e-6
    beta: Annotated[float, Gt(0)] = 0.1
    loss_type: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    sft_weight: Annotated[float, Gt(0)] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sft_weight is not None and self.loss_type != "sigmoid":
            found = f"sft_weight={self.sft_weight:g} with loss_type={self.loss_type}"
            raise ConfigError(f"{found}: it goes with loss_type=sigmoid; set loss_type=sigmoid, or sft_weight=null")

    def trainer(self, run: "TrainingRun") -> "Trainer":
        if self.sft_weight is not None:
            from tasks.train.pair_loss import pair_trainer, rpo_loss

            return pair_trainer(run, partial(rpo_loss, self.beta, self.sft_weight))
        from trl import DPOConfig, DPOTrainer

        return run.trl(DPOTrainer, DPOConfig, beta=self.beta, loss_type=[self.loss_type])
