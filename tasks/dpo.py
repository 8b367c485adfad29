"""Direct preference optimization: Rafailov et al. 2023, arXiv:2305.18290."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Gt

from tasks.data.kinds import PREFERENCES
from tasks.data.tokens.thinking import Thinking
from tasks.data.tokens.tokenization import TooLong
from tasks.method import FROZEN_POLICY, POLICY, Training

if TYPE_CHECKING:
    from transformers import Trainer

    from tasks.train.run import TrainingRun


@dataclass(frozen=True, kw_only=True)
class DPO(Training):
    """Tunes a policy on preference pairs; its frozen start is the reference.

    Args:
        beta: strength of the KL to the reference.
        loss_type: ``sigmoid`` is eq. 7 of the paper; ``ipo`` arXiv:2310.12036, ``hinge`` arXiv:2305.10425.
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
    too_long: TooLong | None = None
    max_prompt_length: Annotated[int, Gt(0)] | None = None  # tokens
    thinking: Thinking | None = None

    def trainer(self, run: "TrainingRun") -> "Trainer":
        from trl import DPOConfig, DPOTrainer

        return run.trl(DPOTrainer, DPOConfig, beta=self.beta, loss_type=[self.loss_type])
