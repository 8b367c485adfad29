"""Creates a small Llama with random weights and its tokenizer, so that the quickstart needs no network."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Ge, Gt

from lineage.artifact import Kind
from lineage.errors import ConfigError
from tasks.context import Metrics, TrainContext
from tasks.data.kinds import TRAIN
from tasks.model.chat_template import CHATML
from tasks.recipe import Inputs, Method
from tasks.train.sharding import leave_out_deepspeed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_END_OF_TEXT, _START, _END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_BYTES = 256


@dataclass(frozen=True, kw_only=True)
class BaseModel(Method):
    """A byte-level BPE tokenizer trained on the rows, and a Llama (arXiv:2302.13971) with random weights."""

    consumes: ClassVar[Mapping[str, Kind]] = {"rows": Kind.TEXT}
    produces: ClassVar[Kind] = Kind.CHECKPOINT
    measures: ClassVar[tuple[str, ...]] = ("parameters", "vocab_size")
    cluster_workers: ClassVar[Literal["all", "one", "none"]] = "one"

    vocab_size: Annotated[int, Ge(_BYTES + 3)] = 4096  # maximum; a small corpus yields fewer tokens
    hidden_size: Annotated[int, Gt(0)] = 192  # width of the layers
    intermediate_size: Annotated[int, Gt(0)] = 512  # width of the MLPs
    num_layers: Annotated[int, Gt(0)] = 4  # decoder layers
    num_heads: Annotated[int, Gt(0)] = 6  # attention heads; as many for keys and values
    max_positions: Annotated[int, Gt(0)] = 1024  # tokens
    tie_embeddings: bool = True  # the output layer has the weights of the embedding
    seed: Annotated[int, Ge(0)] = 0  # of the random weights

    def __post_init__(self) -> None:
        if self.hidden_size % (2 * self.num_heads):
            raise ConfigError(
                f"hidden_size={self.hidden_size} over num_heads={self.num_heads} is not an even number of dimensions "
                f"per head; give a hidden_size that is a multiple of {2 * self.num_heads}"
            )

    def run(self, inputs: Inputs, ctx: TrainContext) -> Metrics:
        import torch
        from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

        from tasks.model.merging import golden_texts_for
        from tasks.train.models.load import require_output_loads

        tokenizer = train_tokenizer(inputs["rows"].path / TRAIN, self.vocab_size)
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_heads,
            max_position_embeddings=self.max_positions,
            tie_word_embeddings=self.tie_embeddings,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = LlamaForCausalLM(config)
        # A base model ends a document, a fine-tuned one ends a turn: generation stops at both.
        ends = [tokenizer.eos_token_id, tokenizer.pad_token_id]
        model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=tokenizer.pad_token_id)
        tokenizer.save_pretrained(ctx.output_dir)
        leave_out_deepspeed()
        model.save_pretrained(ctx.output_dir)
        require_output_loads(self.produces, model, ctx.output_dir, golden_texts_for(model, [ctx.output_dir]))
        return {"parameters": float(model.num_parameters()), "vocab_size": float(len(tokenizer))}


def train_tokenizer(rows: Path, vocab_size: int) -> "PreTrainedTokenizerFast":
    """Trains a byte-level BPE tokenizer on the column ``text``; deterministic."""
    import pyarrow.parquet as pq
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    texts = pq.read_table(rows, columns=["text"])["text"].to_pylist()
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_END_OF_TEXT, _START, _END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=_END, pad_token=_END_OF_TEXT)
    tokenizer.chat_template = CHATML
    return tokenizer
