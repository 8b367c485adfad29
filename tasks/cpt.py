"""Continued pretraining: the next-token loss on raw text, as in Gururangan et al. 2020, arXiv:2004.10964."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Gt

from tasks.data.kinds import TEXT
from tasks.data.tokens.tokenization import ControlText
from tasks.method import Training

if TYPE_CHECKING:
    from transformers import Trainer

    from tasks.train.run import TrainingRun


@dataclass(frozen=True, kw_only=True)
class ContinuedPretraining(Training):
    """Trains a policy on documents, concatenated and cut into chunks of ``max_length`` tokens."""

    version: ClassVar[int] = 2  # 1 put no BOS before documents where the tokenizer adds one
    reads: ClassVar = TEXT
    measures: ClassVar = ("mean_token_accuracy",)

    default_learning_rate: ClassVar = 2e-5
    global_batch_size: Annotated[int, Gt(0)] = 64  # chunks per step
    max_length: Annotated[int, Gt(0)] = 2048  # tokens per chunk
    control_tokens: ControlText | None = None  # of documents: keep them (None), encode as text, drop, refuse

    def trainer(self, run: "TrainingRun") -> "Trainer":
        from trl import SFTConfig, SFTTrainer

        return run.trl(SFTTrainer, SFTConfig)
