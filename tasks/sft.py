"""Supervised fine-tuning on conversations: Ouyang et al. 2022, arXiv:2203.02155, section 3.5."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Gt

from lineage.artifact import Kind
from lineage.errors import ConfigError
from tasks.chat_template import CHAT_TEMPLATES
from tasks.context import Metrics, TrainContext
from tasks.method import Inputs, Training

if TYPE_CHECKING:
    from tasks.models import Policy

CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")


@dataclass(frozen=True, kw_only=True)
class SFT(Training):
    """Trains a policy on what the assistant says, its end of turn included, and on nothing else.

    Args:
        chat_template: installs a template for training and writes it into the output: for a model that has none.
    """

    consumes: ClassVar[Mapping[str, Kind]] = {"policy": Kind.CHECKPOINT, "rows": Kind.CONVERSATIONS}
    produces: ClassVar[Kind] = Kind.CHECKPOINT
    chat_slot: ClassVar[str | None] = "policy"

    learning_rate: Annotated[float, Gt(0)] = 2e-5
    num_steps: Annotated[int, Gt(0)] = 1000
    global_batch_size: Annotated[int, Gt(0)] = 64  # conversations per step
    max_length: Annotated[int, Gt(0)] = 2048
    chat_template: Literal["chatml"] | None = None

    def run(self, inputs: Inputs, ctx: TrainContext) -> Metrics:
        from trl import SFTConfig, SFTTrainer
        from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

        from tasks.data.tokens.tokenize_rows import read_rows, require_chat_template, tokenize_conversations
        from tasks.data.tokens.tokenized_rows import show
        from tasks.models import CHAT_TEMPLATE_FILE, load_policy, lora_config, save_output
        from tasks.packed_batches import collator_for
        from tasks.packed_forward import install
        from tasks.trainer import fit, ordered, trainer_args

        policy = load_policy(inputs["policy"])
        if self.chat_template:
            install_chat_template(policy, self.chat_template)
        require_chat_template(policy.tokenizer, inputs["policy"])
        rows = tokenize_conversations(read_rows(inputs["rows"]), policy.tokenizer, self.max_length)
        show(rows, inputs["rows"], self.max_length)
        trainer = SFTTrainer(
            policy.model,
            args=SFTConfig(dataset_kwargs={"skip_prepare_dataset": True}, **trainer_args(self, ctx)),
            train_dataset=ordered(rows, self),
            data_collator=collator_for(policy.model, DataCollatorForLanguageModeling(policy.tokenizer.pad_token_id)),
            processing_class=policy.tokenizer,
            peft_config=lora_config(self.adapter, "CAUSAL_LM"),
        )
        install(trainer.model)
        metrics = fit(trainer, ctx)
        save_output(trainer.model, ctx, inputs["policy"])
        if self.chat_template and ctx.rank == 0:
            (ctx.output_dir / CHAT_TEMPLATE_FILE).write_text(CHAT_TEMPLATES[self.chat_template])
        return {**rows.metrics, **metrics}


def install_chat_template(policy: "Policy", name: str) -> None:
    """Gives the tokenizer a template, and lets the model's generation stop at its end of turn.

    Raises:
        ConfigError: the vocabulary lacks the template's tokens; adding them would change the tokenizer.
    """
    missing = [token for token in CHATML_TOKENS if token not in policy.tokenizer.get_vocab()]
    if missing:
        raise ConfigError(
            f"chat_template={name} needs the tokens {', '.join(CHATML_TOKENS)} and the model's vocabulary lacks "
            f"{', '.join(missing)}; start from a model whose tokenizer has them or that brings a chat template"
        )
    policy.tokenizer.chat_template = CHAT_TEMPLATES[name]
    end_of_turn = policy.tokenizer.convert_tokens_to_ids(CHATML_TOKENS[1])
    ends = policy.model.generation_config.eos_token_id
    ends = [] if ends is None else [ends] if isinstance(ends, int) else ends
    policy.model.generation_config.eos_token_id = [end_of_turn, *(token for token in ends if token != end_of_turn)]
