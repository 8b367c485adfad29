"""Supervised fine-tuning on conversations: Ouyang et al. 2022, arXiv:2203.02155, section 3.5."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Gt

from tasks.data.kinds import CONVERSATIONS
from tasks.data.tokens.thinking import Thinking
from tasks.data.tokens.tokenization import Packing, TooLong
from tasks.method import Training

if TYPE_CHECKING:
    from transformers import Trainer

    from tasks.train.run import TrainingRun


@dataclass(frozen=True, kw_only=True)
class SFT(Training):
    """Trains a policy on what the assistant says, its end of turn included, and on nothing else.

    Args:
        chat_template: installs a template for training and writes it into the output: for a model that has none.
        too_long: what becomes of a row of more than ``max_length`` tokens: its end is cut off (None), the
            beginning of its prompt is, it is left out, or it is an error.
        max_prompt_length: what precedes the first answer keeps its last tokens.
        packing: several conversations, none cut for it, share the ``max_length`` tokens of one example, and none sees
            another; ``global_batch_size`` then counts such packs.
        thinking: what the assistant thinks (``<think>...</think>`` before an answer) is trained, or left out; None: as
            the chat template has it, and a row whose thinking it would leave out is an error.
    """

    version: ClassVar[int] = 2  # 1 trained what the template writes behind the token that ends a turn, or no such token
    reads: ClassVar = CONVERSATIONS

    learning_rate: Annotated[float, Gt(0)] = 2e-5
    num_steps: Annotated[int, Gt(0)] = 1000
    global_batch_size: Annotated[int, Gt(0)] = 64  # examples per step: a conversation is one, or several
    max_length: Annotated[int, Gt(0)] = 2048
    chat_template: Literal["chatml", "hermes"] | None = None  # hermes: with tools
    too_long: TooLong | None = None
    max_prompt_length: Annotated[int, Gt(0)] | None = None  # tokens
    packing: Packing | None = None
    thinking: Thinking | None = None

    def recipe(self) -> dict[str, object]:
        """As of every method; one version further with packing, since rows of a pack are no longer padded."""
        recipe = super().recipe()
        return {**recipe, "version": self.version + 1} if self.packing else recipe

    def trainer(self, run: "TrainingRun") -> "Trainer":
        from trl import SFTConfig, SFTTrainer

        return run.trl(SFTTrainer, SFTConfig)
