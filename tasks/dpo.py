"""Direct preference optimization: Rafailov et al. 2023, arXiv:2305.18290."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Gt

from lineage.artifact import Kind
from tasks.context import Metrics, TrainContext
from tasks.data.tokens.thinking import Thinking
from tasks.data.tokens.tokenization import Tokenization, TooLong
from tasks.method import Inputs, Training


@dataclass(frozen=True, kw_only=True)
class DPO(Training):
    """Tunes a policy on preference pairs; its frozen start is the reference.

    Args:
        beta: strength of the KL to the reference.
        loss_type: ``sigmoid`` is eq. 7 of the paper; ``ipo`` arXiv:2310.12036, ``hinge`` arXiv:2305.10425.
        too_long: what becomes of a row of more than ``max_length`` tokens: its answers' end is cut off (None), the
            beginning of its prompt is, it is left out, or it is an error.
        max_prompt_length: a longer prompt keeps its last tokens.
        thinking: of the answers (``<think>...</think>``): trained or left out; None: as the chat template has it, and a
            row whose thinking it would leave out is an error.
    """

    version: ClassVar[int] = 2  # 2: answers end in a stop token
    consumes: ClassVar[Mapping[str, Kind]] = {"policy": Kind.CHECKPOINT, "pairs": Kind.PREFERENCES}
    produces: ClassVar[Kind] = Kind.CHECKPOINT
    chat_slot: ClassVar[str | None] = "policy"

    learning_rate: Annotated[float, Gt(0)] = 1e-6
    num_steps: Annotated[int, Gt(0)] = 1000
    global_batch_size: Annotated[int, Gt(0)] = 64  # pairs per step
    max_length: Annotated[int, Gt(0)] = 2048  # tokens, prompt + answer
    beta: Annotated[float, Gt(0)] = 0.1
    loss_type: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    too_long: TooLong | None = None
    max_prompt_length: Annotated[int, Gt(0)] | None = None  # tokens
    thinking: Thinking | None = None

    def tokenization(self) -> Tokenization:
        return Tokenization(
            kind=Kind.PREFERENCES, max_length=self.max_length, too_long=self.too_long,
            max_prompt_length=self.max_prompt_length, thinking=self.thinking,
        )  # fmt: skip

    def run(self, inputs: Inputs, ctx: TrainContext) -> Metrics:
        from trl import DPOConfig
        from trl.trainer.dpo_trainer import DataCollatorForPreference

        from tasks.data.tokens.load_or_make import load_or_make
        from tasks.data.tokens.stop_tokens import stop_at
        from tasks.data.tokens.tokenize_rows import require_chat_template
        from tasks.data.tokens.tokenized_rows import show
        from tasks.train.adapters import lora_config
        from tasks.train.callbacks import StepZeroProof
        from tasks.train.models import load_policy, save_output
        from tasks.train.padding_free import collator_for, install
        from tasks.train.run import TokenizedDPOTrainer, fit, ordered, trainer_args

        policy = load_policy(self, inputs["policy"], ctx)
        # With LoRA the reference is the policy with its adapter switched off; else a second copy of the policy.
        reference = None if self.adapter else load_policy(self, inputs["policy"], ctx).model
        require_chat_template(policy.tokenizer, inputs["policy"])
        rows = load_or_make(
            self.tokenization(), inputs["pairs"], inputs["policy"].path, ctx.cache_dir, ctx.resources.cpus_per_worker
        )
        show(rows, inputs["pairs"], self.max_length)
        stop_at(policy.model.generation_config, rows.account.stop_tokens)
        trainer = TokenizedDPOTrainer(
            policy.model,
            reference,
            args=DPOConfig(
                beta=self.beta,
                loss_type=[self.loss_type],
                # TRL turns all dropout off; a LoRA that asks for it gets it.
                disable_dropout=not (self.adapter and self.adapter.dropout),
                **trainer_args(self, ctx),
            ),
            train_dataset=ordered(rows, self),
            data_collator=collator_for(
                policy.model, DataCollatorForPreference(policy.tokenizer.pad_token_id), pairs=True
            ),
            processing_class=policy.tokenizer,
            peft_config=lora_config(self.adapter, policy.model),
        )
        install(trainer.model)
        if reference is not None:
            install(reference)
            if not ctx.resources.zero_stage:  # DeepSpeed's engine calls the forward that the model has then
                # Once more: the first preparation wrapped the forward that was just replaced (autocast, device).
                trainer.ref_model = trainer.accelerator.prepare_model(reference, evaluation_mode=True)
        trainer.add_callback(StepZeroProof(inputs["policy"], self.precision, self.loss_type))
        metrics = fit(self, trainer, inputs, ctx)
        save_output(self, trainer.model, inputs["policy"], ctx)
        return {**rows.metrics, **metrics}
