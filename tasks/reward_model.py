"""A reward model from preference pairs: Ouyang et al. 2022, arXiv:2203.02155, eq. 1 (Bradley-Terry)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tasks.data.kinds import PREFERENCES
from tasks.method import REWARD_HEAD, AnswerTraining

if TYPE_CHECKING:
    from transformers import Trainer

    from tasks.train.run import TrainingRun


@dataclass(frozen=True, kw_only=True)
class RewardModel(AnswerTraining):
    """Trains the policy's backbone under a new scalar head to score chosen answers above rejected ones.

    The loss is ``-log sigmoid(r(chosen) - r(rejected))``: ln 2 when the two score equal.
    """

    version: ClassVar[int] = 2  # 1 found the last token by the pad token's id, and rounded scores to bf16
    reads: ClassVar = PREFERENCES
    models: ClassVar = {"policy": REWARD_HEAD}
    measures: ClassVar = ("accuracy", "margin", "mean_reward", "min_reward", "max_reward")

    default_learning_rate: ClassVar = 1e-5

    def trainer(self, run: "TrainingRun") -> "Trainer":
        from trl import RewardConfig, RewardTrainer
        from trl.trainer.reward_trainer import DataCollatorForPreference

        from tasks.train.losses.rewards import whole_sequences

        collate = whole_sequences(DataCollatorForPreference(run.policy.tokenizer.pad_token_id))
        return run.trl(RewardTrainer, RewardConfig, data_collator=collate)
