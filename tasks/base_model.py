"""Creates a small Llama with random weights, which may read images, and its tokenizer: nothing is downloaded."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, MultipleOf

from lineage.artifact import Kind
from lineage.errors import ConfigError
from tasks.context import Metrics, TrainContext
from tasks.data.kinds import TRAIN
from tasks.model.chat_template import CHATML, CHATML_IMAGES
from tasks.recipe import Inputs, Method
from tasks.train.sharding import leave_out_deepspeed

if TYPE_CHECKING:
    from transformers import LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

_IMAGE, _PATCH, _FEATURES = "<image>", 8, "default"
_END_OF_TEXT, _START, _END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_BYTES = 256


@dataclass(frozen=True, kw_only=True)
class BaseModel(Method):
    """A byte-level BPE tokenizer trained on the rows, and a Llama (arXiv:2302.13971) with random weights.

    Args:
        image_size: pixels of the sides of images, which a tower of the same width reads in patches of 8 pixels: a
            LLaVA (arXiv:2304.08485). None: it reads text alone.
    """

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
    image_size: Annotated[int, Gt(0), MultipleOf(_PATCH)] | None = None

    def __post_init__(self) -> None:
        if self.hidden_size % (2 * self.num_heads):
            raise ConfigError(
                f"hidden_size={self.hidden_size} over num_heads={self.num_heads} is not an even number of dimensions "
                f"per head; give a hidden_size that is a multiple of {2 * self.num_heads}"
            )

    def run(self, inputs: Inputs, ctx: TrainContext) -> Metrics:
        import torch
        from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

        from tasks.model.merging import golden_texts_for
        from tasks.train.models.load import require_output_loads

        tokenizer = train_tokenizer(inputs["rows"].path / TRAIN, self.vocab_size, images=bool(self.image_size))
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
            model: PreTrainedModel = (
                self._with_tower(config, tokenizer) if self.image_size else LlamaForCausalLM(config)
            )
        # A base model ends a document, a fine-tuned one ends a turn: generation stops at both.
        ends = [tokenizer.eos_token_id, tokenizer.pad_token_id]
        model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=tokenizer.pad_token_id)
        tokenizer.save_pretrained(ctx.output_dir)
        if self.image_size:
            (ctx.output_dir / "processor_config.json").write_text(json.dumps(self._processor(), indent=2) + "\n")
        leave_out_deepspeed()
        model.save_pretrained(ctx.output_dir)
        require_output_loads(self.produces, model, ctx.output_dir, golden_texts_for(model, [ctx.output_dir]))
        return {"parameters": float(model.num_parameters()), "vocab_size": float(len(tokenizer))}

    def _with_tower(self, text: "LlamaConfig", tokenizer: "PreTrainedTokenizerFast") -> "PreTrainedModel":
        from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

        vision = CLIPVisionConfig(**self.tower())
        image = tokenizer.convert_tokens_to_ids(_IMAGE)
        config = LlavaConfig(
            text_config=text, vision_config=vision, image_token_index=image, vision_feature_layer=-1,
            vision_feature_select_strategy=_FEATURES, tie_word_embeddings=self.tie_embeddings,
        )  # fmt: skip
        return LlavaForConditionalGeneration(config)

    def tower(self) -> dict[str, object]:
        """The config of what reads images."""
        return {
            "hidden_size": self.hidden_size, "intermediate_size": self.intermediate_size, "num_hidden_layers": 2,
            "num_attention_heads": self.num_heads, "image_size": self.image_size, "patch_size": _PATCH,
        }  # fmt: skip

    def _processor(self) -> dict[str, object]:
        """The file of its processor: an image is brought to the size of the tower."""
        size = {"height": self.image_size, "width": self.image_size}
        return {
            "processor_class": "LlavaProcessor", "patch_size": _PATCH, "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": _FEATURES, "image_token": _IMAGE,
            "image_processor": {"image_processor_type": "CLIPImageProcessor", "size": size, "do_center_crop": False},
        }  # fmt: skip


def train_tokenizer(rows: Path, vocab_size: int, *, images: bool = False) -> "PreTrainedTokenizerFast":
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
        special_tokens=[_END_OF_TEXT, _START, _END, *([_IMAGE] if images else [])],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=_END, pad_token=_END_OF_TEXT)
    tokenizer.chat_template = CHATML_IMAGES if images else CHATML
    return tokenizer
