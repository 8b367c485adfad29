"""Direct preference optimization: Rafailov et al. 2023, arXiv:2305.18290."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Gt

from lineage.errors import ConfigError
from tasks.data.kinds import PREFERENCES
from tasks.data.tokens.thinking import Thinking
from tasks.data.tokens.tokenization import TooLong
from tasks.method import FROZEN_POLICY, POLICY, Training

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import Trainer

    from tasks.train.run import TrainingRun


@dataclass(frozen=True, kw_only=True)
class DPO(Training):
    """Tunes a policy on preference pairs; its frozen start is the reference.

    Args:
        beta: strength of the KL to the reference.
        loss_type: ``sigmoid`` is eq. 7 of the paper; ``ipo`` arXiv:2310.12036, ``hinge`` arXiv:2305.10425.
        sft_weight: weight of the chosen answers' mean log-likelihood per token in the loss (RPO, arXiv:2404.19733, eq.
            1): it keeps them likely where the preference loss alone would make both answers of a pair less likely.
            The reference's is subtracted, a constant, so that the loss starts at ln 2. Only with ``sigmoid``.
        too_long: what is done with a row of more than ``max_length`` tokens: cut the end of its answers (None), cut the
            beginning of its prompt, drop it, or fail.
        max_prompt_length: a longer prompt keeps its last tokens.
        thinking: whether thinking in the answers (``<think>...</think>``) is trained or dropped; None: as the chat
            template does, and a row whose thinking the template would drop is an error.
    """

    version: ClassVar[int] = 2  # 1 also trained the template's text after the token that ends an answer
    reads: ClassVar = PREFERENCES
    models: ClassVar = {"policy": POLICY, "reference": FROZEN_POLICY}

    learning_rate: Annotated[float, Gt(0)] = 1e-6
    num_steps: Annotated[int, Gt(0)] = 1000
    global_batch_size: Annotated[int, Gt(0)] = 64  # pairs per step
    max_length: Annotated[int, Gt(0)] = 2048  # tokens, prompt + answer
    beta: Annotated[float, Gt(0)] = 0.1
    loss_type: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    sft_weight: Annotated[float, Gt(0)] | None = None
    too_long: TooLong | None = None
    max_prompt_length: Annotated[int, Gt(0)] | None = None  # tokens
    thinking: Thinking | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sft_weight is not None and self.loss_type != "sigmoid":
            raise ConfigError(
                f"sft_weight={self.sft_weight:g} with loss_type={self.loss_type}: it is added to loss_type=sigmoid "
                "alone; set loss_type=sigmoid, or sft_weight=null"
            )

    def trainer(self, run: "TrainingRun") -> "Trainer":
        if self.sft_weight is not None:
            from tasks.train.pair_trainer import PairConfig, PairTrainer

            return run.trl(PairTrainer, PairConfig, pair_loss=self._loss_with_sft, proof=run.start_proof())
        from trl import DPOConfig, DPOTrainer

        return run.trl(DPOTrainer, DPOConfig, beta=self.beta, loss_type=[self.loss_type])

    def _loss_with_sft(
        self, sums_R: "Tensor", counts_R: "Tensor", reference_R: "Tensor | None"
    ) -> "tuple[Tensor, dict[str, Tensor]]":
        """Of B pairs, R = 2B rows: the chosen answers, then the rejected ones; a mean over the pairs."""
        from torch.nn.functional import logsigmoid

        assert self.sft_weight is not None and reference_R is not None
        chosen_B, rejected_B = (sums_R - reference_R).chunk(2)
        margins_B = self.beta * (chosen_B - rejected_B)
        gains_B = chosen_B / counts_R.chunk(2)[0]
        metrics = {
            "rewards/chosen": self.beta * chosen_B,
            "rewards/rejected": self.beta * rejected_B,
            "rewards/margins": margins_B,
            "rewards/accuracies": (margins_B > 0).float(),
        }
        return (-logsigmoid(margins_B) - self.sft_weight * gains_B).mean(), metrics
