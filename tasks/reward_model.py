"""A reward model from preference pairs: Ouyang et al. 2022, arXiv:2203.02155, eq. 1 (Bradley-Terry)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Gt

from lineage.artifact import Kind
from tasks.context import Metrics, TrainContext
from tasks.method import Inputs, Training

if TYPE_CHECKING:
    from tasks.data.tokens.tokenized_rows import TokenizedRows


@dataclass(frozen=True, kw_only=True)
class RewardModel(Training):
    """Trains the policy's backbone under a new scalar head to score chosen answers above rejected ones.

    The loss is ``-log sigmoid(r(chosen) - r(rejected))``: ln 2 when the two cannot be told apart.
    """

    consumes: ClassVar[Mapping[str, Kind]] = {"policy": Kind.CHECKPOINT, "pairs": Kind.PREFERENCES}
    produces: ClassVar[Kind] = Kind.REWARD_MODEL
    chat_slot: ClassVar[str | None] = "policy"

    learning_rate: Annotated[float, Gt(0)] = 1e-5
    num_steps: Annotated[int, Gt(0)] = 1000
    global_batch_size: Annotated[int, Gt(0)] = 64  # pairs per step
    max_length: Annotated[int, Gt(0)] = 2048  # tokens, prompt + answer

    def run(self, inputs: Inputs, ctx: TrainContext) -> Metrics:
        from trl import RewardConfig, RewardTrainer
        from trl.trainer.reward_trainer import DataCollatorForPreference

        from tasks.data.tokens.tokenize_rows import read_rows, require_chat_template, tokenize_preferences
        from tasks.data.tokens.tokenized_rows import show
        from tasks.models import load_reward_model, lora_config, save_output
        from tasks.packed_batches import collator_for
        from tasks.packed_forward import install
        from tasks.trainer import fit, ordered, trainer_args

        policy = load_reward_model(inputs["policy"], self.seed)
        require_chat_template(policy.tokenizer, inputs["policy"])
        rows = tokenize_preferences(read_rows(inputs["pairs"]), policy.tokenizer, self.max_length)
        show(rows, inputs["pairs"], self.max_length)
        collate = DataCollatorForPreference(policy.tokenizer.pad_token_id)
        trainer = RewardTrainer(
            policy.model,
            # TRL turns all dropout off; a LoRA that asks for it gets it.
            args=RewardConfig(disable_dropout=not (self.adapter and self.adapter.dropout), **trainer_args(self, ctx)),
            train_dataset=ordered(whole_sequences(rows), self),
            data_collator=collator_for(policy.model, collate, pairs=True),
            processing_class=policy.tokenizer,
            peft_config=lora_config(self.adapter, "SEQ_CLS"),
        )
        install(trainer.model)
        metrics = fit(trainer, ctx)
        save_output(trainer.model, ctx, inputs["policy"])
        return {**rows.metrics, **metrics}


def whole_sequences(rows: "TokenizedRows") -> "TokenizedRows":
    """Prompt and answer as one sequence: what a reward model reads."""
    prompts = rows.columns["prompt_ids"]
    columns = {
        name: [prompt + answer for prompt, answer in zip(prompts, rows.columns[name], strict=True)]
        for name in ("chosen_ids", "rejected_ids")
    }
    return replace(rows, columns=columns)
