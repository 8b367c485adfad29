"""Supervised fine-tuning on conversations: Ouyang et al. 2022, arXiv:2203.02155, section 3.5."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tasks.data.kinds import CONVERSATIONS
from tasks.data.tokens.tokenization import Packing
from tasks.method import AnswerTraining

if TYPE_CHECKING:
    from transformers import Trainer

    from tasks.train.run import TrainingRun


@dataclass(frozen=True, kw_only=True)
class SFT(AnswerTraining):
    """Trains a policy on the assistant's turns, including the token that ends each turn, and on nothing else.

    Args:
        chat_template: for a model that has none; written into the output. From a file: ``sources.base.chat_template``.
        packing: conversations share an example, and attend to themselves; ``global_batch_size`` then counts packs.
    """

    version: ClassVar[int] = 2  # 1 also trained the template's text after the token that ends a turn, or no such token
    # The first version of packing padded the rows of a pack.
    option_versions: ClassVar[Mapping[str, tuple[str, int]]] = {
        **AnswerTraining.option_versions,
        "packing": ("version", 1),
    }
    reads: ClassVar = CONVERSATIONS
    measures: ClassVar[tuple[str, ...]] = ("mean_token_accuracy",)
    default_learning_rate: ClassVar = 2e-5
    chat_template: str | None = None  # chatml; hermes, which has tools; or a family of TRL's templates, such as qwen3
    packing: Packing | None = None

    def trainer(self, run: "TrainingRun") -> "Trainer":
        from trl import SFTConfig, SFTTrainer

        return run.trl(SFTTrainer, SFTConfig)
