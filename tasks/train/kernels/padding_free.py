"""The padding-free forward: runs a batch of rows of different lengths on its real tokens only.

TRL pads the rows of a micro batch to the longest, runs every layer on the padding too, and (where there is
no Triton) projects every position through the LM head although only completions are trained. Here the
tokens of a micro batch are concatenated: embeddings, projections, norms and MLPs see each token once, and
attention is computed per row. The results equal the padded forward's up to the order of additions; TRL's
trainers compute their losses from them unchanged. There are two layouts:

- ``pack``: from padded rows. The two answers of a preference pair share the tokens of their prompt, whose
  hidden states are equal because attention is causal. For the architectures in ``PADDING_FREE``.
- ``flattened_packs``: packed rows (``packing=best_fit``), end to end with position ids that restart at each.
  For the architectures in ``tasks.data.tokens.tokenization.PACKABLE``.

``choose_kernel`` selects the attention kernel. On a GPU in bf16 or fp16 it is FlashAttention over rows of
different lengths. In fp32 it is SDPA with repeated key and value heads: with fewer of them than query heads,
SDPA falls back to its quadratic math kernel. Only tests marked ``gpu`` run the kernels of a GPU; on a CPU the
selection is tested, and the arithmetic around the kernels.

Shapes: R rows, L longest row, T distinct tokens, S tokens of all rows, N trained tokens, V vocabulary, H hidden size.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from importlib import import_module
from types import MethodType
from typing import TYPE_CHECKING, Literal, cast
from unittest import mock

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, DataCollatorWithFlattening, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from trl.kernels import ChunkedLogProbFunction
from trl.trainer import utils as trl_utils
from trl.trainer.utils import FusedCausalLMOutput

from lineage.artifact import Kind
from lineage.errors import ConfigError
from tasks.data.kinds import MISMATCHED
from tasks.data.tokens.tokenization import SEEING, rows_of, why_not_packable
from tasks.train.kernels.machine import FLASH_PACKAGES, plain
from tasks.train.sharding import autocast, gather_again, through, whole_head

if TYPE_CHECKING:
    from datasets import Dataset
    from peft import PeftModel
    from torch import Tensor
    from transformers import Trainer
    from transformers.modeling_outputs import BaseModelOutput

    from tasks.recipe import TrainingRecipe

    Attended = tuple[Tensor, None]  # attention's output, and no weights

Example = dict[str, list[int]]
Batch = dict[str, "Tensor"]
Collator = Callable[[list[Example]], Batch]
Kernel = Literal["flash", "varlen", "sdpa", "eager"]

# Value of ``resources.attention`` -> name among those of transformers. ``sdpa`` stands for torch's own kernels.
ATTENTION: Mapping[str, str] = {
    "sdpa": "padding_free", "eager": "padding_free_eager", "flash_attention_2": "padding_free_fa2",
    "flash_attention_3": "padding_free_fa3",
}  # fmt: skip
# Plain causal attention over rotary positions: nothing in their layers depends on the padding.
PADDING_FREE = frozenset({
    "llama", "mistral", "qwen2", "qwen2_5_vl_text", "qwen2_vl_text", "qwen3", "qwen3_vl_text", "olmo2", "smollm3",
})  # fmt: skip
# Above this many logits (512 MB in fp32), TRL's chunked head: slower where there is no Triton, but small.
MAX_LOGITS = 2**27
CHUNK_COLUMNS = 32768
MIN_SAVED = 2**17  # scores of a head, for which another call of SDPA on a CPU pays
FLASH_CAPABILITY = (8, 0)  # of a GPU: Ampere
FLASH_HEAD_DIM = 256


def pack(attention_mask_RL: "Tensor", shared_R: "Tensor | None" = None) -> dict[str, "Tensor"]:
    """Index tensors that concatenate the real tokens of a right-padded batch, and restore the batch.

    Args:
        attention_mask_RL: 1 on real tokens.
        shared_R: how many first tokens a row has in common with the row R/2 before it; those are kept once.
    Returns:
        ``token_index`` (T): position of each kept token in the flattened batch (R * L);
        ``row_index`` (R, L): the kept token at each position of the batch (token 0 at padding);
        ``cu_seq_lens_q`` (R + 1): cumulative lengths of the rows;
        for pairs also ``row_tokens`` (S): the kept token at each position of the rows without padding, end to end;
        and ``token_rows`` (T): one such position of each kept token.
    """
    num_rows, length = attention_mask_RL.shape
    real_RL = attention_mask_RL.bool()
    kept_RL = real_RL
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
    layout = {
        "token_index": token_index_T,
        "row_index": row_index_RL,
        "cu_seq_lens_q": F.pad(real_RL.sum(1).cumsum(0), (1, 0)).int(),
    }
    if shared_R is not None:
        places = real_RL.reshape(-1).cumsum(0) - 1
        layout |= {"row_tokens": row_index_RL[real_RL], "token_rows": places[token_index_T]}
    return layout


def choose_kernel(
    attention: str,
    device: str,
    dtype: torch.dtype,
    head_dim: int,
    capability: tuple[int, int],
    dropout: float,
    softcap: float | None,
) -> Kernel:
    """Selects the attention kernel for rows of different lengths.

    Args:
        attention: of ``ATTENTION``.
        device: its type, ``cpu`` or ``cuda``.
        dtype: of the computation: autocast's where it is on.
        capability: of the GPU; (0, 0) on a CPU.

    Returns:
        ``flash``: FlashAttention of a package; ``varlen``: that of torch, all rows at once; ``sdpa``: SDPA; ``eager``:
        plain matrix products, also because neither of torch's own supports capped scores.
    """
    if attention.startswith("flash"):
        return "flash"
    if attention == "eager" or softcap is not None:
        return "eager"
    is_flash = dtype in (torch.float16, torch.bfloat16) and head_dim <= FLASH_HEAD_DIM and head_dim % 8 == 0
    return "varlen" if device == "cuda" and capability >= FLASH_CAPABILITY and is_flash and not dropout else "sdpa"


def padding_free_attention(
    module: torch.nn.Module, query: "Tensor", key: "Tensor", value: "Tensor", attention_mask: "Tensor | None",
    dropout: float = 0.0, scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None,
    cu_seq_lens_q: "Tensor | None" = None, max_length_q: int | None = None, token_index: "Tensor | None" = None,
    row_index: "Tensor | None" = None, row_tokens: "Tensor | None" = None, token_rows: "Tensor | None" = None,
    image_groups: "Tensor | None" = None, attention: str = "sdpa", **kwargs: object,
) -> "Attended":  # fmt: skip
    """Causal attention of (1, heads, T, d) within each row; plain SDPA for a padded batch.

    Args:
        image_groups: (1, T): the image of each token, whose tokens attend to each other in both directions; -1: none.
        attention: of ``ATTENTION``.
    """
    kernel = choose_kernel(
        attention, query.device.type, _dtype(query), query.shape[-1], _capability(query), dropout, softcap
    )
    attend = partial(
        _attend, dropout=dropout, scaling=scaling, window=sliding_window, softcap=softcap, plain=kernel == "eager"
    )
    flash = partial(
        _flash, attention=attention, dropout=dropout, scaling=scaling, window=sliding_window, softcap=softcap
    )
    if cu_seq_lens_q is None and attention_mask is None and query.shape[2] == key.shape[2]:  # rows of one length
        if kernel == "flash":
            return _of_one_length(flash, query, key, value), None
        return attend(query, key, value).transpose(1, 2).contiguous(), None
    if cu_seq_lens_q is None:
        padded: Attended = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, softcap=softcap, **kwargs
        )
        return padded
    states = (query, key, value)
    if kernel in ("flash", "varlen") and image_groups is None:
        longest = max_length_q if row_index is None else row_index.shape[1]
        states_S = (_line(each) if row_tokens is None else _line(each)[row_tokens] for each in states)
        varlen = flash if kernel == "flash" else partial(_varlen, scaling=scaling, window=sliding_window)
        output_S = varlen(*states_S, ends=cu_seq_lens_q, longest=longest)
        output = output_S if token_rows is None else output_S[token_rows]
    elif row_index is None:
        lengths = cu_seq_lens_q.diff().tolist()
        rows = zip(*(each.split(lengths, dim=2) for each in states), strict=True)
        images = [None] * len(lengths) if image_groups is None else image_groups.squeeze(0).split(lengths)
        output = _line(torch.cat([attend(*row, images_L=own) for row, own in zip(rows, images, strict=True)], dim=2))
    else:
        assert token_index is not None
        whole = [(torch.arange(len(row_index), device=row_index.device), row_index.shape[1])]
        groups = whole if row_index.is_cuda else groups_of(cu_seq_lens_q.diff().tolist())
        output = _in_grid(attend, states, row_index, token_index, groups)
    return output.unsqueeze(0), None


def _in_grid(
    attend: "Callable[..., Tensor]",
    states: "Sequence[Tensor]",
    row_index: "Tensor",
    token_index: "Tensor",
    groups: "Sequence[tuple[Tensor, int]]",
) -> "Tensor":
    """Attention of rows padded on the right, so that no real token attends to padding: (T, heads, d).

    Args:
        groups: rows, and the length that they are padded to.
    """
    (heads, head_dim), length = states[0].shape[1::2], row_index.shape[1]
    sizes = [len(rows) * longest for rows, longest in groups]
    index_P = torch.cat([row_index[rows, :longest].flatten() for rows, longest in groups])
    padded = (F.embedding(index_P, _line(each).flatten(1)).unflatten(1, (-1, head_dim)).split(sizes) for each in states)
    attended, starts_R, start = list["Tensor"](), torch.empty_like(row_index[:, 0]), 0
    for (rows, longest), size, *of_group in zip(groups, sizes, *padded, strict=True):
        grid = (each.unflatten(0, (-1, longest)).transpose(1, 2) for each in of_group)
        attended.append(attend(*grid).transpose(1, 2).reshape(size, -1))
        starts_R[rows] = torch.arange(start, start + size, longest, device=starts_R.device)
        start += size
    places_T = starts_R[token_index // length] + token_index % length
    return F.embedding(places_T, torch.cat(attended)).unflatten(1, (heads, head_dim))


def groups_of(lengths: Sequence[int]) -> "list[tuple[Tensor, int]]":
    """Rows that attention pads to one length, and that length: each split saves ``MIN_SAVED`` scores or more."""
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    groups = [[order[0]]]
    for place, row in enumerate(order[1:], start=1):
        saved = (lengths[groups[-1][0]] ** 2 - lengths[row] ** 2) * (len(order) - place)
        if saved >= MIN_SAVED:
            groups.append([])
        groups[-1].append(row)
    return [(torch.tensor(sorted(rows)), lengths[rows[0]]) for rows in groups]


def _line(states: "Tensor") -> "Tensor":
    """(1, heads, T, d) as (T, heads, d)."""
    return states.squeeze(0).transpose(0, 1)


def _of_one_length(flash: "Callable[..., Tensor]", query: "Tensor", key: "Tensor", value: "Tensor") -> "Tensor":
    """(R, L, heads, d) of rows of one length, laid end to end for FlashAttention."""
    num_rows, _, length, _ = query.shape
    ends = torch.arange(0, (num_rows + 1) * length, length, device=query.device, dtype=torch.int32)
    states = (each.transpose(1, 2).flatten(0, 1) for each in (query, key, value))
    return flash(*states, ends=ends, longest=length).unflatten(0, (num_rows, length))


def _flash(
    query: "Tensor",
    key: "Tensor",
    value: "Tensor",
    *,
    ends: "Tensor",
    longest: int | None,
    attention: str,
    dropout: float,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> "Tensor":
    """FlashAttention of (S, heads, d) by the package of FlashAttention 2 or 3."""
    attend = import_module(FLASH_PACKAGES[attention]).flash_attn_varlen_func
    states = (each.to(_dtype(query)).contiguous() for each in (query, key, value))
    output: Tensor | tuple[Tensor, ...] = attend(
        *states, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=longest, max_seqlen_k=longest,
        softmax_scale=scaling, causal=True, window_size=(-1 if window is None else window - 1, 0),
        softcap=softcap or 0.0, deterministic=torch.are_deterministic_algorithms_enabled(),
        **({"dropout_p": dropout} if dropout else {}),
    )  # fmt: skip
    return output[0] if isinstance(output, tuple) else output


def _varlen(
    query: "Tensor",
    key: "Tensor",
    value: "Tensor",
    *,
    ends: "Tensor",
    longest: int | None,
    scaling: float | None,
    window: int | None,
) -> "Tensor":
    """FlashAttention of (S, heads, d); casts its inputs, because autocast does not."""
    dtype, few_heads = _dtype(query), key.shape[1] < query.shape[1]
    query, key, value = (each.to(dtype).contiguous() for each in (query, key, value))
    output: Tensor = varlen_attn(
        query, key, value, ends, ends, longest, longest, scale=scaling, enable_gqa=few_heads,
        window_size=(-1 if window is None else window - 1, 0),
    )  # fmt: skip
    return output


def _attend(
    query: "Tensor",
    key: "Tensor",
    value: "Tensor",
    *,
    dropout: float,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    plain: bool,
    images_L: "Tensor | None" = None,
) -> "Tensor":
    """Causal attention of (R, heads, L, d), by a kernel of SDPA with linear memory; by products where ``plain``.

    Args:
        images_L: of one row: as ``image_groups``.
        window: how many tokens each token attends to, itself included; None: all before it.
        softcap: Gemma 2, arXiv:2408.00118, section 2.
    """
    length, groups = query.shape[2], query.shape[1] // key.shape[1]
    is_masked = plain or (window is not None and window < length) or images_L is not None
    mask = _causal(length, window or length, query.device, images_L) if is_masked else None
    few = takes_few_heads(query.device.type, _dtype(query), query.shape[-1], _capability(query), is_masked=is_masked)
    if groups > 1 and not few:
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    if not plain or mask is None:
        return F.scaled_dot_product_attention(
            query, key, value, mask, dropout, is_causal=mask is None, scale=scaling,
            enable_gqa=key.shape[1] < query.shape[1],
        )  # fmt: skip
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~mask, -torch.inf)
    return F.dropout(F.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype), dropout) @ value


def takes_few_heads(
    device: str, dtype: torch.dtype, head_dim: int, capability: tuple[int, int], *, is_masked: bool
) -> bool:
    """Whether SDPA has a kernel for fewer key than query heads; else it falls back to the math kernel.

    On a GPU that is FlashAttention alone: no mask, no fp32, no wide heads.
    """
    if is_masked or head_dim > FLASH_HEAD_DIM:
        return False
    return device != "cuda" or (dtype != torch.float32 and capability >= FLASH_CAPABILITY)


def _causal(length: int, window: int, device: torch.device, images_L: "Tensor | None" = None) -> "Tensor":
    """(L, L): true where a token attends to another."""
    places = torch.arange(length, device=device)
    distance = places.unsqueeze(1) - places
    seen = distance >= 0
    if images_L is not None:
        seen |= (images_L.unsqueeze(1) == images_L) & (images_L >= 0)
    return seen & (distance < window)


def _capability(states: "Tensor") -> tuple[int, int]:
    return torch.cuda.get_device_capability(states.device) if states.is_cuda else (0, 0)


def _dtype(states: "Tensor") -> torch.dtype:
    """The dtype in which attention is computed."""
    device = states.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype


def is_padding_free(model: PreTrainedModel) -> bool:
    """Whether the architecture is known to compute the same numbers without padding."""
    config = model.config.get_text_config()
    layers = config.layer_types if "layer_types" in config else None
    sliding = "sliding_window" in config and config.sliding_window is not None
    known = config.model_type in PADDING_FREE and not sliding and set(layers or ()) <= {"full_attention"}
    return known and not has_own_head(model)


def backbone(model: PreTrainedModel, inputs: dict[str, "Tensor"]) -> "BaseModelOutput":
    """The backbone's output; its last hidden states are (R, L, H), or (1, T, H) for a padding-free batch."""
    token_index = inputs.get("token_index")
    if token_index is None:
        return model.base_model(**inputs)
    of_tokens = [name for name in inputs if name == "input_ids" or name.endswith("token_type_ids")]
    line = {
        **inputs,
        **{name: inputs[name].reshape(1, -1)[:, token_index] for name in of_tokens},
        "position_ids": (token_index % inputs["input_ids"].shape[1]).unsqueeze(0),
    }
    return model.base_model(**line)


def before_trained(hidden: "Tensor", trained_RL: "Tensor", row_index: "Tensor | None") -> "Tensor":
    """The last hidden states from which the trained tokens are predicted: (N, H).

    Args:
        trained_RL: whether the token after each position is trained; without the last position.
        row_index: of a padding-free batch.
    """
    if row_index is None:
        return hidden[:, :-1][trained_RL]
    return F.embedding(row_index[:, :-1][trained_RL], hidden.squeeze(0))


def _as_line(
    backbone: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]] | None:
    """What a line of rows needs where transformers makes it of padded rows alone.

    transformers takes a mask of four dimensions as finished, and builds none of T x T, which our attention does not
    read. Images have positions of three dimensions in Qwen-VL, and are read in both directions in Gemma 3.
    """
    ends = kwargs.get("cu_seq_lens_q")
    if not isinstance(ends, torch.Tensor):
        return None
    found = {**kwargs, "attention_mask": torch.empty(1, 1, 1, 1, device=ends.device)}
    if kwargs.get("image_grid_thw") is not None:
        found["position_ids"] = _positions_of_grids(backbone, cast("Batch", kwargs), ends)
    if isinstance(types := kwargs.get("token_type_ids"), torch.Tensor):
        from transformers.models.gemma3.modeling_gemma3 import get_block_sequence_ids_for_mask

        found["image_groups"] = get_block_sequence_ids_for_mask(types)
    return args, found


def _positions_of_grids(backbone: torch.nn.Module, line: Batch, ends: "Tensor") -> "Tensor":
    """Positions (4, 1, T): by number, and by time, height and width as the model computes them of padded rows."""
    lengths_R = ends.diff()
    real_RL = torch.arange(int(lengths_R.max()), device=ends.device) < lengths_R.unsqueeze(1)
    padded = {
        name: line[name].new_zeros(real_RL.shape).masked_scatter(real_RL, line[name])
        for name in ("input_ids", "mm_token_type_ids")
    }
    found_3RL, _ = backbone.get_rope_index(
        **padded, image_grid_thw=line["image_grid_thw"], attention_mask=real_RL.long()
    )
    return torch.cat([line["position_ids"].unsqueeze(0), found_3RL[:, real_RL].unsqueeze(1)])


def score(
    hidden_NH: "Tensor", head: torch.nn.Linear, targets_N: "Tensor", *, squares: bool = False
) -> tuple["Tensor", "Tensor", "Tensor | None"]:
    """Log-probability of each target, whether it is the most likely token, and ``squares``: see ``install``."""
    if len(hidden_NH) * head.weight.shape[0] > MAX_LOGITS:
        more = ("is_top1", "log_sum_sq_probs") if squares else ("is_top1",)
        outputs = ChunkedLogProbFunction.apply(
            hidden_NH, head.weight, head.bias, targets_N, 1.0, CHUNK_COLUMNS, None, 1.0, more
        )
        return outputs[0], outputs[4], outputs[2]
    logits_NV = head(hidden_NH).float()
    logps_N = -F.cross_entropy(logits_NV, targets_N, reduction="none")
    with torch.no_grad():
        is_top1_N = logits_NV.gather(1, targets_N.unsqueeze(1)).squeeze(1) >= logits_NV.amax(-1)
        squares_N = (2 * logits_NV).logsumexp(-1) - 2 * logits_NV.logsumexp(-1) if squares else None
    return logps_N, is_top1_N, squares_N


_SCALES = ("logit_scale", "output_multiplier", "lm_head_multiplier")  # names of a factor of the logits
_OWN_HEAD = "has_own_head"  # attribute of a model
_PROBES, _LARGE = 4, 30.0  # random states, and about the size of their logits, so that a cap changes them
_SAME = 0.02  # largest difference of logits, of the largest one


def logits(model: PreTrainedModel, hidden_NH: "Tensor") -> "Tensor":
    """The logits that the model's forward computes from its last hidden states, in fp32."""
    return _by_forward(model, hidden_NH) if has_own_head(model) else _by_weights(model, hidden_NH)


def _by_weights(model: PreTrainedModel, hidden_NH: "Tensor") -> "Tensor":
    """As TRL's fused head: the product with its weights, a factor whose name depends on the model, and a cap."""
    config = model.config.get_text_config()
    scale = next((float(found) for name in _SCALES if (found := getattr(config, name, None)) is not None), None)
    divisor = getattr(config, "logits_scaling", None)
    if scale is None and divisor is not None:
        scale = float(divisor if config.model_type == "hyperclovax" else 1 / divisor)
    found = model.get_output_embeddings()(hidden_NH).float() * (1.0 if scale is None else scale)
    cap = getattr(config, "final_logit_softcapping", None)
    return found if cap is None else torch.tanh(found / cap) * cap


class _States:
    """The output of a backbone: its last hidden states, and None for all else."""

    def __init__(self, hidden_1NH: "Tensor") -> None:
        self.last_hidden_state = hidden_1NH

    def __getitem__(self, index: int) -> "Tensor":
        return self.last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None


def _by_forward(model: PreTrainedModel, hidden_NH: "Tensor") -> "Tensor":
    """By the forward of the model's class, around a backbone that returns these states."""
    ids_1N = torch.zeros(1, len(hidden_NH), dtype=torch.long, device=hidden_NH.device)
    with ExitStack() as stack:
        # Some classes call the decoder alone; of ModernBERT's it is the name of the head.
        for each in {model.base_model, model.get_decoder()} - {model.get_output_embeddings()}:
            stack.enter_context(mock.patch.object(each, "forward", return_value=_States(hidden_NH.unsqueeze(0))))
        found: Tensor = type(model).forward(model, input_ids=ids_1N, use_cache=False).logits
    return found.squeeze(0).float()


def has_own_head(model: PreTrainedModel) -> bool:
    """Whether the model's forward makes its logits of more than its last hidden states and the weights of the head.

    So do models with layers between the two (ModernBERT's decoder), with a cap or a factor of another name
    (RecurrentGemma, xLSTM), with a head in few bits, and code of a model's own. Both are compared on random states.
    """
    if _OWN_HEAD not in vars(model):
        with whole_head(model):
            vars(model)[_OWN_HEAD] = through(model, lambda: _differs_from_weights(model))
        gather_again(model)  # else an adapter would freeze the gathered weights alone, and the divided ones be trained
    return bool(vars(model)[_OWN_HEAD])


def _differs_from_weights(model: PreTrainedModel) -> bool:
    head = model.get_output_embeddings()
    if head is None or model.base_model is model or not head.weight.numel():  # divided by DeepSpeed
        return False
    size = getattr(head, "in_features", head.weight.shape[-1])
    if not head.weight.is_floating_point() or head.weight.shape[-1] != size:
        return True
    drawn_NH = torch.randn(_PROBES, size, generator=torch.Generator().manual_seed(0)).to(head.weight)
    with torch.no_grad():
        large_NH = drawn_NH * (_LARGE / _by_forward(model, drawn_NH).std().clamp(min=1e-3)).to(drawn_NH)
        found, expected = _by_forward(model, large_NH), _by_weights(model, large_NH)
    return bool((found - expected).abs().max() > _SAME * found.abs().max())


class _Scores:
    """Stands for TRL's function of states and the head's weights: the same values, from a model's own logits."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def apply(
        self, hidden_NH: "Tensor", _weight: object, _bias: object, targets_N: "Tensor", temperature: float,
        *_settings: object,
    ) -> "tuple[Tensor, ...]":  # fmt: skip
        logits_NV = logits(self.model, hidden_NH) / temperature
        all_NV = logits_NV.log_softmax(-1)
        logps_N = all_NV.gather(1, targets_N.unsqueeze(1)).squeeze(1)
        entropy_N = -(all_NV.exp() * all_NV).sum(-1)
        with torch.no_grad():
            return logps_N, entropy_N, (2 * all_NV).logsumexp(-1), logits_NV.mean(-1), logps_N >= all_NV.amax(-1)


def keep_own_head(model: "PreTrainedModel | PeftModel") -> None:
    """Has TRL's fused head compute the logits of a model as its own forward does; after TRL installed it."""
    base = plain(model)
    if not has_own_head(base):
        return
    fused, scores = base.forward, _Scores(base)

    @functools.wraps(fused)
    def forward(*args: object, **inputs: object) -> object:
        with mock.patch.object(trl_utils, "_ChunkedLogProbFunction", scores):
            return fused(*args, **inputs)

    base.forward = forward


def _causal_lm_forward(
    self: PreTrainedModel, *, labels: "Tensor", fused_lm_head: bool = True, squares: bool = False, **inputs: "Tensor"
) -> FusedCausalLMOutput:
    """TRL's fused forward (``add_fused_lm_head``) on the kept tokens; entropy and mean logits are not computed."""
    trained_RL = labels[:, 1:] != -100
    hidden_NH = before_trained(backbone(self, inputs).last_hidden_state, trained_RL, inputs.get("row_index"))
    logps_N, is_top1_N, squares_N = score(
        hidden_NH, self.get_output_embeddings(), labels[:, 1:][trained_RL], squares=squares
    )
    logps_RL = logps_N.new_zeros(trained_RL.shape).masked_scatter(trained_RL, logps_N)
    is_top1_RL = is_top1_N.new_zeros(trained_RL.shape).masked_scatter(trained_RL, is_top1_N)
    zeros_RL = torch.zeros_like(logps_RL)
    squares_RL = None if squares_N is None else zeros_RL.masked_scatter(trained_RL, squares_N)
    return FusedCausalLMOutput(
        log_probs=logps_RL, entropy=zeros_RL, mean_logits=zeros_RL, is_top1=is_top1_RL, label_mask=trained_RL,
        log_sum_sq_probs=squares_RL,
    )  # fmt: skip


def install(
    model: "PreTrainedModel | PeftModel", attention: str | None = None, *, packs: bool = False, squares: bool = False
) -> None:
    """Installs padding-free attention in a model, and replaces its forward for training (not for generation).

    With ``squares`` the forward also computes the logarithm of the sum of all tokens' squared probabilities (WPO).

    A model whose architecture is not known to compute the same numbers without padding keeps TRL's forward; with
    ``packs`` only its attention is replaced.
    """
    model = plain(model)
    if not is_padding_free(model) and not packs:
        if attention:
            model.set_attn_implementation(attention)
        return
    is_text = model.config.get_text_config() is model.config
    name = ATTENTION[attention or "sdpa"]
    AttentionInterface.register(name, partial(padding_free_attention, attention=attention or "sdpa"))
    AttentionMaskInterface.register(name, sdpa_mask)
    model.set_attn_implementation(name if is_text else {"text_config": name})  # a tower's attention is not causal
    model.base_model.register_forward_pre_hook(_as_line, with_kwargs=True)
    # tasks/train/losses/rewards.py replaces the forward of a reward model.
    if is_padding_free(model) and model.get_output_embeddings() is not None:
        model.forward = MethodType(partial(_causal_lm_forward, squares=squares), model)


def line_collator(collate: Collator, *, pairs: bool = False) -> Collator:
    """Collates like ``collate``, then adds the indices of the real tokens (``pack``), of mismatched answers too.

    Args:
        pairs: row i + R/2 has the same prompt as row i; common first tokens are kept once.
    """

    def collated(examples: list[Example]) -> Batch:
        batch = collate(examples)
        shared = common_tokens(batch["input_ids"], batch["attention_mask"]) if pairs else None
        layout = pack(batch["attention_mask"], shared)
        mismatched = batch.get(f"{MISMATCHED}attention_mask")
        if mismatched is not None:
            layout |= {f"{MISMATCHED}{name}": each for name, each in pack(mismatched).items()}
        return {**batch, **layout}

    return collated


def flattened_packs() -> Collator:
    """Collates packs: the tokens of all rows end to end, position ids that restart, and where rows end."""
    flatten: Collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    return lambda examples: flatten([row for example in examples for row in rows_of(example)])


def common_tokens(ids_RL: "Tensor", attention_RL: "Tensor") -> "Tensor":
    """Per row, how many first tokens equal those of the row R/2 before it; 0 in the first half."""
    half = len(ids_RL) // 2
    equal = (ids_RL[:half] == ids_RL[half:]) & attention_RL[:half].bool() & attention_RL[half:].bool()
    shared_R = ids_RL.new_zeros(len(ids_RL))
    shared_R[half:] = equal.long().cumprod(1).sum(1)
    return shared_R


def collator_for(model: "PreTrainedModel", collate: Collator, *, pairs: bool = False, packs: bool = False) -> Collator:
    """``collate`` for the padding-free forward, where the model's architecture supports it; else unchanged.

    Args:
        packs: examples are packs, whose rows must not attend to each other.

    Raises:
        ConfigError: the model cannot keep the rows of a pack apart.
    """
    if packs:
        reason = why_not_packable(model.config.to_dict())
        if reason is not None:
            raise ConfigError(f"packing=best_fit: {reason}; set packing=null: each row is then one of a batch")
        return flattened_packs()
    return line_collator(collate, pairs=pairs) if is_padding_free(model) else collate


# Trainers of TRL on rows that are tokens already.

# Modules whose trainers tokenize prompts as they generate.
_GENERATE = {f"trl.trainer.{each}_trainer" for each in ("grpo", "rloo", "distillation")}


def reads_lines(trainer_class: type, method: "TrainingRecipe", model: PreTrainedModel, *, packs: bool) -> bool:
    """Whether a training uses the padding-free forward: its trainer needs only log-probabilities, or only scores.

    On a line of all rows, NEFTune's noise would shrink with the rows of a micro batch. Of rows with images, a line has
    the positions of the models in ``SEEING`` alone, and pairs, which share the tokens of their prompts, no images.
    """
    from trl import DPOTrainer, RewardTrainer, SFTTrainer

    ours = getattr(trainer_class, "is_padding_free", False)
    seeing = model.config.model_type in SEEING and type(method).reads.kind == Kind.CONVERSATIONS
    padded = method.neftune_alpha or (getattr(method, "images", None) is not None and not seeing)
    known = ours or issubclass(trainer_class, (SFTTrainer, DPOTrainer, RewardTrainer))
    return bool(known and (packs or not padded))


def on_tokens(trainer_class: "type[Trainer]") -> "type[Trainer]":
    """The trainer without TRL's preparation of data: the rows are already tokens."""
    if _GENERATE & {base.__module__ for base in trainer_class.__mro__}:
        return _on_prompt_tokens(trainer_class)
    if not hasattr(trainer_class, "_prepare_dataset"):
        return trainer_class

    class OnTokens(trainer_class):
        def _prepare_dataset(self, dataset: "Dataset", *args: object, **kwargs: object) -> "Dataset":
            return dataset

        def _precompute_ref_logps(self, dataset: "Dataset", *args: object, **kwargs: object) -> "Dataset":
            return dataset  # its rows have them (``tasks.train.losses.reference_logps``)

        def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> AbstractContextManager[None]:
            """Also for a LoRA's reference, the policy without its adapter, which is not called through DeepSpeed."""
            if hasattr(self, "ref_model"):
                return autocast(self.args)
            plain: AbstractContextManager[None] = super().autocast_smart_context_manager(cache_enabled)
            return plain

    OnTokens.__name__, OnTokens.__qualname__ = trainer_class.__name__, trainer_class.__qualname__
    return OnTokens


def _on_prompt_tokens(trainer_class: "type[Trainer]") -> "type[Trainer]":
    """The trainer, generating from the tokens of prompts: TRL would render them again, uncut and without tools."""

    class OnPromptTokens(trainer_class):
        def _generate_and_score_completions(self, inputs: list[dict[str, object]]) -> object:
            self._prompt_tokens = [example["prompt_ids"] for example in inputs if "prompt_ids" in example]
            return super()._generate_and_score_completions(inputs)

        def _tokenize_prompts(self, prompts: Sequence[object]) -> tuple[object, object, dict[str, object]]:
            if len(self._prompt_tokens) == len(prompts) and not getattr(self, "tools", None):
                return self._prompt_tokens, None, {}
            rendered: tuple[object, object, dict[str, object]] = super()._tokenize_prompts(prompts)
            return rendered

    OnPromptTokens.__name__, OnPromptTokens.__qualname__ = trainer_class.__name__, trainer_class.__qualname__
    return OnPromptTokens
