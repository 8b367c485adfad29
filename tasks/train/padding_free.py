"""Runs a batch of rows of different lengths on its real tokens only.

TRL pads the rows of a micro batch to the longest, runs every layer on the padding too, and (where there is
no Triton) projects every position through the LM head although only completions are trained. Here the
tokens of a micro batch are laid in one line: embeddings, projections, norms and MLPs see each token once;
attention alone works on the padded grid. The two answers of a preference pair share the tokens of their
prompt, whose hidden states are equal because attention is causal. The numbers are those of the padded
forward up to the order of additions; TRL's trainers compute their losses from them unchanged.

Shapes: R rows, L longest row, T distinct tokens, N trained tokens, V vocabulary, H hidden size.
"""

from collections.abc import Callable, Iterator
from types import MethodType
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from peft import PeftModel
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from trl.kernels import ChunkedLogProbFunction
from trl.trainer.utils import FusedCausalLMOutput

if TYPE_CHECKING:
    from torch import Tensor

    Attended = tuple[Tensor, None]  # attention's output, and no weights

Example = dict[str, list[int]]
Batch = dict[str, "Tensor"]
Collator = Callable[[list[Example]], Batch]

ATTENTION = "packed_sdpa"
# Plain causal attention over rotary positions: nothing in their layers depends on the padded grid.
PACKABLE = frozenset({"llama", "mistral", "qwen2", "qwen3", "olmo2", "smollm3"})
# Above this many logits (512 MB in fp32), TRL's chunked head: slower where there is no Triton, but small.
MAX_LOGITS = 2**27
CHUNK_COLUMNS = 32768


def pack(attention_mask_RL: "Tensor", shared_R: "Tensor | None" = None) -> dict[str, "Tensor"]:
    """Lays the real tokens of a right-padded batch in one line.

    Args:
        attention_mask_RL: 1 on real tokens.
        shared_R: how many first tokens a row has in common with the row R/2 before it; those are kept once.
    Returns:
        ``token_index`` (T): the slot of the grid that each kept token comes from;
        ``row_index`` (R, L): the kept token that each slot of the grid shows (padding shows token 0).
    """
    num_rows, length = attention_mask_RL.shape
    kept_RL = attention_mask_RL.bool()
    if shared_R is not None:
        kept_RL = kept_RL & (torch.arange(length) >= shared_R.unsqueeze(1))
    token_index_T = kept_RL.reshape(-1).nonzero().squeeze(1)
    row_index_RL = torch.zeros(num_rows * length, dtype=torch.long)
    row_index_RL[token_index_T] = torch.arange(len(token_index_T))
    row_index_RL = row_index_RL.view(num_rows, length)
    if shared_R is not None:
        half = num_rows // 2
        is_shared = torch.arange(length) < shared_R[half:].unsqueeze(1)
        row_index_RL[half:] = torch.where(is_shared, row_index_RL[:half], row_index_RL[half:])
    return {"token_index": token_index_T, "row_index": row_index_RL}


def packed_attention(
    module: torch.nn.Module,
    query: "Tensor",
    key: "Tensor",
    value: "Tensor",
    attention_mask: "Tensor | None",
    token_index: "Tensor | None" = None,
    row_index: "Tensor | None" = None,
    **kwargs: object,
) -> "Attended":
    """Causal attention of a packed batch, on its padded grid; plain SDPA where the batch is not packed.

    Padding stands to the right of every row, so that no real token ever looks at it.
    """
    if row_index is None or token_index is None:
        plain: Attended = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return plain

    def grid(states: "Tensor") -> "Tensor":  # (1, heads, T, d) -> (R, heads, L, d)
        _, heads, tokens, width = states.shape
        flat = states.transpose(1, 2).reshape(tokens, heads * width)
        return F.embedding(row_index, flat).view(*row_index.shape, heads, width).transpose(1, 2)

    output, _ = sdpa_attention_forward(module, grid(query), grid(key), grid(value), None, is_causal=True, **kwargs)
    return F.embedding(token_index, output.flatten(0, 1).flatten(1)).view(1, len(token_index), *output.shape[2:]), None


def is_packable(model: PreTrainedModel) -> bool:
    """Whether the architecture is known to give the same numbers packed."""
    config = model.config.get_text_config()
    layers = config.layer_types if "layer_types" in config else None
    sliding = "sliding_window" in config and config.sliding_window is not None
    return config.model_type in PACKABLE and not sliding and set(layers or ()) <= {"full_attention"}


def hidden_states(model: PreTrainedModel, inputs: dict[str, "Tensor"]) -> "Tensor":
    """The backbone's last hidden states: (R, L, H), or (1, T, H) where the batch is packed."""
    token_index = inputs.get("token_index")
    if token_index is None:
        return model.base_model(**inputs).last_hidden_state
    input_ids_RL = inputs["input_ids"]
    packed = {
        **inputs,
        "input_ids": input_ids_RL.reshape(1, -1)[:, token_index],
        "position_ids": (token_index % input_ids_RL.shape[1]).unsqueeze(0),
        # Four dimensions: transformers takes it for a finished mask and builds none. Our attention ignores it.
        "attention_mask": torch.empty(1, 1, 1, 1, device=input_ids_RL.device),
    }
    return model.base_model(**packed).last_hidden_state


def score(hidden_NH: "Tensor", head: torch.nn.Linear, targets_N: "Tensor") -> tuple["Tensor", "Tensor"]:
    """Log-probability of each target, and whether it is the most likely token."""
    if len(hidden_NH) * head.weight.shape[0] > MAX_LOGITS:
        outputs = ChunkedLogProbFunction.apply(
            hidden_NH, head.weight, head.bias, targets_N, 1.0, CHUNK_COLUMNS, None, 1.0, ("is_top1",)
        )
        return outputs[0], outputs[4]
    logits_NV = head(hidden_NH).float()
    logps_N = -F.cross_entropy(logits_NV, targets_N, reduction="none")
    with torch.no_grad():
        is_top1_N = logits_NV.gather(1, targets_N.unsqueeze(1)).squeeze(1) >= logits_NV.amax(-1)
    return logps_N, is_top1_N


def _causal_lm_forward(
    self: PreTrainedModel, *, labels: "Tensor", fused_lm_head: bool = True, **inputs: "Tensor"
) -> FusedCausalLMOutput:
    """TRL's fused forward (``add_fused_lm_head``) on packed tokens; entropy and mean logits are not computed."""
    hidden = hidden_states(self, inputs)
    trained_RL = labels[:, 1:] != -100
    row_index = inputs.get("row_index")
    if row_index is None:
        hidden_NH = hidden[:, :-1][trained_RL]
    else:
        hidden_NH = F.embedding(row_index[:, :-1][trained_RL], hidden.squeeze(0))
    logps_N, is_top1_N = score(hidden_NH, self.get_output_embeddings(), labels[:, 1:][trained_RL])
    logps_RL = logps_N.new_zeros(trained_RL.shape).masked_scatter(trained_RL, logps_N)
    is_top1_RL = is_top1_N.new_zeros(trained_RL.shape).masked_scatter(trained_RL, is_top1_N)
    zeros_RL = torch.zeros_like(logps_RL)
    return FusedCausalLMOutput(
        log_probs=logps_RL, entropy=zeros_RL, mean_logits=zeros_RL, is_top1=is_top1_RL, label_mask=trained_RL
    )


def install(model: "PreTrainedModel | PeftModel") -> None:
    """Replaces a model's forward for training (not for generation) and lets its attention take packed batches.

    A model whose architecture is not known to give the same numbers packed keeps TRL's forward.
    """
    if isinstance(model, PeftModel):
        model = model.get_base_model()
    if not is_packable(model):
        return
    AttentionInterface.register(ATTENTION, packed_attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    model.set_attn_implementation(ATTENTION)
    if model.get_output_embeddings() is not None:  # of a reward model, tasks/train/rewards.py replaces it
        model.forward = MethodType(_causal_lm_forward, model)


class PackedCollator:
    """Collates like ``collate``, then adds where the real tokens stand.

    Args:
        pairs: the second half of a batch answers what the first half answers; common first tokens are kept once.
    """

    def __init__(self, collate: Collator, *, pairs: bool = False) -> None:
        self.collate = collate
        self.pairs = pairs

    def __call__(self, examples: list[Example]) -> Batch:
        batch = self.collate(examples)
        shared = common_tokens(batch["input_ids"], batch["attention_mask"]) if self.pairs else None
        return {**batch, **pack(batch["attention_mask"], shared)}


def unpacked(collate: Collator) -> Collator:
    """Collates the rows of packs, each as a row of its own: a row that is not in the grid of another cannot see it."""

    def rows(example: Example) -> Iterator[Example]:
        place = 0
        for length in example["seq_lengths"]:
            yield {name: example[name][place : place + length] for name in ("input_ids", "labels")}
            place += length

    return lambda examples: collate([row for example in examples for row in rows(example)])


def common_tokens(ids_RL: "Tensor", attention_RL: "Tensor") -> "Tensor":
    """Per row, how many first tokens equal those of the row R/2 before it; 0 in the first half."""
    half = len(ids_RL) // 2
    equal = (ids_RL[:half] == ids_RL[half:]) & attention_RL[:half].bool() & attention_RL[half:].bool()
    shared_R = ids_RL.new_zeros(len(ids_RL))
    shared_R[half:] = equal.long().cumprod(1).sum(1)
    return shared_R


def collator_for(model: "PreTrainedModel", collate: Collator, *, pairs: bool = False) -> Collator:
    """``collate``, packed where the model's architecture is known to give the same numbers packed."""
    return PackedCollator(collate, pairs=pairs) if is_packable(model) else collate
