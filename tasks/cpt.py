"""Continued pretraining: the next-token loss on raw text, as in Gururangan et al. 2020, arXiv:2004.10964."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Gt

from lineage.artifact import Kind
from tasks.context import Metrics, TrainContext
from tasks.data.tokens.tokenization import Tokenization
from tasks.method import Inputs, Training


@dataclass(frozen=True, kw_only=True)
class ContinuedPretraining(Training):
    """Trains a policy on documents, joined and cut in chunks of ``max_length`` tokens."""

    version: ClassVar[int] = 2  # 2: documents begin with BOS where the tokenizer adds it
    consumes: ClassVar[Mapping[str, Kind]] = {"policy": Kind.CHECKPOINT, "rows": Kind.TEXT}
    produces: ClassVar[Kind] = Kind.CHECKPOINT

    learning_rate: Annotated[float, Gt(0)] = 2e-5
    num_steps: Annotated[int, Gt(0)] = 1000
    global_batch_size: Annotated[int, Gt(0)] = 64  # chunks per step
    max_length: Annotated[int, Gt(0)] = 2048  # tokens per chunk

    def tokenization(self) -> Tokenization:
        return Tokenization(kind=Kind.TEXT, max_length=self.max_length)

    def run(self, inputs: Inputs, ctx: TrainContext) -> Metrics:
        from trl import SFTConfig, SFTTrainer
        from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

        from tasks.data.tokens.load_or_make import load_or_make
        from tasks.data.tokens.tokenized_rows import show
        from tasks.train.adapters import lora_config
        from tasks.train.models import load_policy, save_output
        from tasks.train.padding_free import install
        from tasks.train.run import fit, ordered, trainer_args

        policy = load_policy(self, inputs["policy"], ctx)
        rows = load_or_make(
            self.tokenization(), inputs["rows"], inputs["policy"].path, ctx.cache_dir, ctx.resources.cpus_per_worker
        )
        show(rows, inputs["rows"], self.max_length)
        trainer = SFTTrainer(
            policy.model,
            args=SFTConfig(dataset_kwargs={"skip_prepare_dataset": True}, **trainer_args(self, ctx)),
            train_dataset=ordered(rows, self),
            # Chunks are of one length: there is no padding to leave out.
            data_collator=DataCollatorForLanguageModeling(policy.tokenizer.pad_token_id),
            processing_class=policy.tokenizer,
            peft_config=lora_config(self.adapter, policy.model),
        )
        install(trainer.model)
        metrics = fit(self, trainer, inputs, ctx)
        save_output(self, trainer.model, inputs["policy"], ctx)
        return {**rows.metrics, **metrics}
