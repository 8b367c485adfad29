"""Supervised fine-tuning on conversations: Ouyang et al. 2022, arXiv:2203.02155, section 3.5."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Gt

from lineage.artifact import Kind
from tasks.chat_template import CHAT_TEMPLATES, install_chat_template
from tasks.context import Metrics, TrainContext
from tasks.data.tokens.thinking import Thinking
from tasks.data.tokens.tokenization import Packing, Tokenization, TooLong
from tasks.method import Inputs, Training


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

    version: ClassVar[int] = 2  # 2: spans end in a stop token, turns follow their own prompts
    consumes: ClassVar[Mapping[str, Kind]] = {"policy": Kind.CHECKPOINT, "rows": Kind.CONVERSATIONS}
    produces: ClassVar[Kind] = Kind.CHECKPOINT
    chat_slot: ClassVar[str | None] = "policy"

    learning_rate: Annotated[float, Gt(0)] = 2e-5
    num_steps: Annotated[int, Gt(0)] = 1000
    global_batch_size: Annotated[int, Gt(0)] = 64  # conversations per step
    max_length: Annotated[int, Gt(0)] = 2048
    chat_template: Literal["chatml", "hermes"] | None = None  # hermes: with tools
    too_long: TooLong | None = None
    max_prompt_length: Annotated[int, Gt(0)] | None = None  # tokens
    packing: Packing | None = None
    thinking: Thinking | None = None

    def tokenization(self) -> Tokenization:
        return Tokenization(
            kind=Kind.CONVERSATIONS, max_length=self.max_length, too_long=self.too_long,
            max_prompt_length=self.max_prompt_length, packing=self.packing, chat_template=self.chat_template,
            thinking=self.thinking,
        )  # fmt: skip

    def run(self, inputs: Inputs, ctx: TrainContext) -> Metrics:
        from trl import SFTConfig, SFTTrainer
        from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

        from tasks.data.tokens.load_or_make import load_or_make
        from tasks.data.tokens.stop_tokens import stop_at
        from tasks.data.tokens.tokenize_rows import require_chat_template
        from tasks.data.tokens.tokenized_rows import show
        from tasks.train.adapters import lora_config
        from tasks.train.models import CHAT_TEMPLATE_FILE, load_policy, save_output
        from tasks.train.padding_free import collator_for, install, unpacked
        from tasks.train.run import fit, ordered, trainer_args

        policy = load_policy(self, inputs["policy"], ctx)
        if self.chat_template:
            install_chat_template(policy.tokenizer, self.chat_template)
        require_chat_template(policy.tokenizer, inputs["policy"])
        rows = load_or_make(
            self.tokenization(), inputs["rows"], inputs["policy"].path, ctx.cache_dir, ctx.resources.cpus_per_worker
        )
        show(rows, inputs["rows"], self.max_length)
        stop_at(policy.model.generation_config, rows.account.stop_tokens)
        collate = collator_for(policy.model, DataCollatorForLanguageModeling(policy.tokenizer.pad_token_id))
        trainer = SFTTrainer(
            policy.model,
            args=SFTConfig(dataset_kwargs={"skip_prepare_dataset": True}, **trainer_args(self, ctx)),
            train_dataset=ordered(rows, self),
            data_collator=unpacked(collate) if self.packing else collate,
            processing_class=policy.tokenizer,
            peft_config=lora_config(self.adapter, policy.model),
        )
        install(trainer.model)
        metrics = fit(self, trainer, inputs, ctx)
        save_output(self, trainer.model, inputs["policy"], ctx)
        if self.chat_template and ctx.rank == 0:
            (ctx.output_dir / CHAT_TEMPLATE_FILE).write_text(CHAT_TEMPLATES[self.chat_template])
        return {**rows.metrics, **metrics}
