"""A reward model from preference pairs: Ouyang et al. 2022, arXiv:2203.02155, eq. 1 (Bradley-Terry)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Gt

from lineage.artifact import Kind
from tasks.context import Metrics, TrainContext
from tasks.data.tokens.thinking import Thinking
from tasks.data.tokens.tokenization import Tokenization, TooLong
from tasks.method import Inputs, Training

if TYPE_CHECKING:
    from tasks.train.padding_free import Batch, Collator, Example


@dataclass(frozen=True, kw_only=True)
class RewardModel(Training):
    """Trains the policy's backbone under a new scalar head to score chosen answers above rejected ones.

    The loss is ``-log sigmoid(r(chosen) - r(rejected))``: ln 2 when the two cannot be told apart.

    Args:
        too_long: what becomes of a row of more than ``max_length`` tokens: its answers' end is cut off (None), the
            beginning of its prompt is, it is left out, or it is an error.
        max_prompt_length: a longer prompt keeps its last tokens.
        thinking: of the answers (``<think>...</think>``): trained or left out; None: as the chat template has it, and a
            row whose thinking it would leave out is an error.
    """

    version: ClassVar[int] = 2  # 2: answers end in a stop token
    version: ClassVar[int] = 2  # 1 took the last token that is not padding by its id, and rounded scores to bf16
    consumes: ClassVar[Mapping[str, Kind]] = {"policy": Kind.CHECKPOINT, "pairs": Kind.PREFERENCES}
    produces: ClassVar[Kind] = Kind.REWARD_MODEL
    chat_slot: ClassVar[str | None] = "policy"

    learning_rate: Annotated[float, Gt(0)] = 1e-5
    num_steps: Annotated[int, Gt(0)] = 1000
    global_batch_size: Annotated[int, Gt(0)] = 64  # pairs per step
    max_length: Annotated[int, Gt(0)] = 2048  # tokens, prompt + answer
    too_long: TooLong | None = None
    max_prompt_length: Annotated[int, Gt(0)] | None = None  # tokens
    thinking: Thinking | None = None

    def tokenization(self) -> Tokenization:
        return Tokenization(
            kind=Kind.PREFERENCES, max_length=self.max_length, too_long=self.too_long,
            max_prompt_length=self.max_prompt_length, thinking=self.thinking,
        )  # fmt: skip

    def run(self, inputs: Inputs, ctx: TrainContext) -> Metrics:
        from trl import RewardConfig, RewardTrainer
        from trl.trainer.reward_trainer import DataCollatorForPreference

        from tasks.data.tokens.load_or_make import load_or_make
        from tasks.data.tokens.tokenize_rows import require_chat_template
        from tasks.data.tokens.tokenized_rows import show
        from tasks.train.adapters import lora_config
        from tasks.train.models import load_reward_model, save_output
        from tasks.train.padding_free import collator_for, install
        from tasks.train.rewards import install_scores
        from tasks.train.run import fit, ordered, trainer_args

        policy = load_reward_model(self, inputs["policy"], ctx)
        require_chat_template(policy.tokenizer, inputs["policy"])
        rows = load_or_make(
            self.tokenization(), inputs["pairs"], inputs["policy"].path, ctx.cache_dir, ctx.resources.cpus_per_worker
        )
        show(rows, inputs["pairs"], self.max_length)
        collate = whole_sequences(DataCollatorForPreference(policy.tokenizer.pad_token_id))
        # TRL turns all dropout off; a LoRA that asks for it gets it.
        disable_dropout = not (self.adapter and self.adapter.dropout)
        trainer = RewardTrainer(
            policy.model,
            # TRL knows no column of prompts, and would take it away.
            args=RewardConfig(disable_dropout=disable_dropout, remove_unused_columns=False, **trainer_args(self, ctx)),
            train_dataset=ordered(rows, self),
            data_collator=collator_for(policy.model, collate, pairs=True),
            processing_class=policy.tokenizer,
            peft_config=lora_config(self.adapter, policy.model),
        )
        install(trainer.model)
        install_scores(trainer.model)
        metrics = fit(self, trainer, inputs, ctx)
        save_output(self, trainer.model, inputs["policy"], ctx)
        return {**rows.metrics, **metrics}


def whole_sequences(collate: "Collator") -> "Collator":
    """Collates prompt and answer as one sequence: what a reward model reads."""

    def joined(examples: "list[Example]") -> "Batch":
        sides = ("chosen_ids", "rejected_ids")
        return collate([{side: example["prompt_ids"] + example[side] for side in sides} for example in examples])

    return joined
