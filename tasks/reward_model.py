"""A reward model from preference pairs: Ouyang et al. 2022, arXiv:2203.02155, eq. 1 (Bradley-Terry)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Gt

from tasks.data.kinds import PREFERENCES
from tasks.data.tokens.thinking import Thinking
from tasks.data.tokens.tokenization import TooLong
from tasks.method import REWARD_HEAD, Training

if TYPE_CHECKING:
    from transformers import Trainer

    from tasks.train.run import TrainingRun


@dataclass(frozen=True, kw_only=True)
class RewardModel(Training):
    """Trains the policy's backbone under a new scalar head to score chosen answers above rejected ones.

    The loss is ``-log sigmoid(r(chosen) - r(rejected))``: ln 2 when the two score equal.

    Args:
        too_long: what is done with a row of more than ``max_length`` tokens: cut the end of its answers (None), cut the
            beginning of its prompt, drop it, or fail.
        max_prompt_length: a longer prompt keeps its last tokens.
        thinking: whether thinking in the answers (``<think>...</think>``) is trained or dropped; None: as the chat
            template does, and a row whose thinking the template would drop is an error.
    """

    version: ClassVar[int] = 2  # 1 found the last token by the pad token's id, and rounded scores to bf16
    reads: ClassVar = PREFERENCES
    models: ClassVar = {"policy": REWARD_HEAD}

    default_learning_rate: ClassVar = 1e-5
    global_batch_size: Annotated[int, Gt(0)] = 64  # pairs per step
    max_length: Annotated[int, Gt(0)] = 2048  # tokens, prompt + answer
    too_long: TooLong | None = None
    max_prompt_length: Annotated[int, Gt(0)] | None = None  # tokens
    thinking: Thinking | None = None

    def trainer(self, run: "TrainingRun") -> "Trainer":
        from trl import RewardConfig, RewardTrainer
        from trl.trainer.reward_trainer import DataCollatorForPreference

        from tasks.train.rewards import whole_sequences

        collate = whole_sequences(DataCollatorForPreference(run.policy.tokenizer.pad_token_id))
        return run.trl(RewardTrainer, RewardConfig, data_collator=collate)
