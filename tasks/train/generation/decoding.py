"""Sampling on a GPU without its launch times: each token's operations are one CUDA graph over fixed buffers.

``transformers.generate`` starts some hundred kernels per token and layer from Python, which a GPU waits for. Here keys
and values are in buffers of the final length, so that every token runs the same kernels on the same memory. They are
captured once for each generation, which takes as long as one token without it.

Shapes: B completions, P prompt tokens, N new tokens, L = P + N rounded up, V vocabulary.
"""

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, Cache, DynamicCache
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from tasks.model.positions import scales_by_length
from tasks.train.generation.one_policy import token_logps
from tasks.train.kernels.padding_free import is_padding_free
from tasks.train.models.quantized_base import is_quantized
from tasks.train.sharding import is_divided

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from transformers import LogitsProcessor, PreTrainedModel

_ATTENTION = "decoding"
_MULTIPLE = 16  # of L, for aligned masks
_BLOCK = 8  # tokens whose noise is drawn at once, and between two checks whether all completions have ended

Draw = Callable[["Tensor"], None]  # fills (B, V) with the noise of the next token


def decodes(model: "PreTrainedModel") -> bool:
    """Whether its layers are known to be plain causal attention, on one GPU as a whole, and not in few bits."""
    on_gpu = model.device.type == "cuda" and is_padding_free(model) and not is_quantized(model)
    return on_gpu and not is_divided(model) and not scales_by_length(model)


@torch.no_grad()
def decode(
    model: "PreTrainedModel", ids_BP: "Tensor", mask_BP: "Tensor", cache: Cache | None, *, max_new_tokens: int,
    pad_token_id: int, stop_tokens: Sequence[int], warpers: "Sequence[LogitsProcessor]", draw: Draw,
    temperature: float,
) -> tuple["Tensor", "Tensor"]:  # fmt: skip
    """Samples after prompts of at least two tokens what ``generate`` gives for the same noise.

    Args:
        model: in evaluation mode, under autocast where that is used.
        ids_BP: padded on the left.
        cache: of all prompt tokens but the last; None: it is computed.
        warpers: of the logits; they must not read the tokens.
        temperature: of the log-probabilities.

    Returns:
        The tokens, and their log-probabilities under the softmax over all tokens: (B, N) each.
    """
    positions_BP = (mask_BP.cumsum(1) - 1).clamp(min=0)
    if cache is None:
        cache = model.base_model(
            input_ids=ids_BP[:, :-1], attention_mask=mask_BP[:, :-1], position_ids=positions_BP[:, :-1],
            cache=DynamicCache(), use_cache=True,
        ).cache  # fmt: skip
    state = _State(model, ids_BP, mask_BP, positions_BP, cache, max_new_tokens)
    stops = torch.tensor([*stop_tokens], device=model.device)

    def step() -> None:
        logits_BV = model.get_output_embeddings()(state.hidden(model)).float()
        whole_BV = logits_BV
        for warper in warpers:
            logits_BV = warper(state.tokens_B1, logits_BV)
        # The logarithm of exponential noise is Gumbel noise: the largest sum is a sample of the softmax.
        token_B = (logits_BV - state.noise()).argmax(-1)
        logps_B = token_logps(whole_BV, token_B, temperature)
        state.add(token_B.where(~state.ended_B, pad_token_id), logps_B, stops)

    with _attention(model):
        run = _captured(step, state) if model.device.type == "cuda" else step
        for number in range(max_new_tokens):
            if number % _BLOCK == 0:
                if bool(state.ended_B.all()):
                    break
                state.draw(draw)
            run()
    return state.found_BN, state.logps_BN


def _captured(step: Callable[[], None], state: "_State") -> Callable[[], None]:
    """The step as a CUDA graph; a first run outside of it loads kernels and casts weights."""
    before = state.copy()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    state.restore(before)
    replay: Callable[[], None] = graph.replay
    return replay


class _State(Cache):
    """Everything that a token changes, in place, and the keys and values of all layers as transformers' cache."""

    def __init__(
        self, model: "PreTrainedModel", ids_BP: "Tensor", mask_BP: "Tensor", positions_BP: "Tensor", cache: Cache,
        max_new_tokens: int,
    ) -> None:  # fmt: skip
        (rows, length), device = ids_BP.shape, model.device
        whole = -(-(length + max_new_tokens) // _MULTIPLE) * _MULTIPLE
        autocast = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if autocast else None
        super().__init__(layers=[])
        self.keys, self.values = (
            [_longer(each, whole, dtype) for each in states]
            for states in zip(*((layer.keys, layer.values) for layer in cache.layers), strict=True)
        )
        self.tokens_B1, self.positions_B1 = ids_BP[:, -1:].clone(), positions_BP[:, -1:].clone()
        self.mask_B11L = torch.zeros(rows, 1, 1, whole, dtype=torch.bool, device=device)
        self.mask_B11L[:, 0, 0, :length] = mask_BP.bool()
        self.place = torch.tensor([length - 1], device=device)
        self.number = torch.zeros(1, dtype=torch.long, device=device)
        self.ended_B = torch.zeros(rows, dtype=torch.bool, device=device)
        self.found_BN = torch.zeros(rows, max_new_tokens, dtype=torch.long, device=device)
        self.logps_BN = torch.zeros(rows, max_new_tokens, device=device)
        vocabulary = model.get_output_embeddings().weight.shape[0]
        self._noise = torch.ones(_BLOCK, rows, vocabulary, device=device)

    def hidden(self, model: "PreTrainedModel") -> "Tensor":
        """The last hidden states (B, H) of the newest tokens."""
        self.mask_B11L.index_fill_(3, self.place, True)
        found: Tensor = model.base_model(
            input_ids=self.tokens_B1, position_ids=self.positions_B1, attention_mask=self.mask_B11L,
            cache=self, use_cache=True,
        ).last_hidden_state[:, -1]  # fmt: skip
        return found

    def update(
        self, key_states: "Tensor", value_states: "Tensor", layer_idx: int, *args: object, **kwargs: object
    ) -> tuple["Tensor", "Tensor"]:
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        keys.index_copy_(2, self.place, key_states.to(keys.dtype))
        values.index_copy_(2, self.place, value_states.to(values.dtype))
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # positions and mask are given

    def draw(self, draw: Draw) -> None:
        for noise_BV in self._noise:
            draw(noise_BV)
        self._noise.clamp_(min=torch.finfo(torch.float32).tiny).log_()

    def noise(self) -> "Tensor":
        return self._noise.index_select(0, self.number % _BLOCK)[0]

    def add(self, token_B: "Tensor", logps_B: "Tensor", stops: "Tensor") -> None:
        """Continues with the next token."""
        self.logps_BN.index_copy_(1, self.number, logps_B.unsqueeze(1))
        self.found_BN.index_copy_(1, self.number, token_B.unsqueeze(1))
        self.ended_B.logical_or_((token_B.unsqueeze(1) == stops).any(1))
        self.tokens_B1.copy_(token_B.unsqueeze(1))
        for each in (self.positions_B1, self.number, self.place):
            each.add_(1)

    @property
    def _small(self) -> list["Tensor"]:
        return [
            self.tokens_B1, self.positions_B1, self.mask_B11L, self.place, self.number, self.ended_B, self.found_BN
        ]  # fmt: skip

    def copy(self) -> list["Tensor"]:
        return [each.clone() for each in self._small]

    def restore(self, before: list["Tensor"]) -> None:
        for each, saved in zip(self._small, before, strict=True):
            each.copy_(saved)


def _longer(states: "Tensor", length: int, dtype: torch.dtype | None) -> "Tensor":
    """Keys or values (B, heads, P - 1, d) in a buffer for L tokens."""
    rows, heads, known, size = states.shape
    whole = torch.zeros(rows, heads, length, size, dtype=dtype or states.dtype, device=states.device)
    whole[:, :, :known] = states
    return whole


def _attend(
    module: torch.nn.Module, query: "Tensor", key: "Tensor", value: "Tensor", attention_mask: "Tensor",
    scaling: float | None = None, **kwargs: object,
) -> tuple["Tensor", None]:  # fmt: skip
    """Attention of one new token; a group's query heads stand in for positions, so that no key is repeated."""
    rows, heads, _, size = query.shape
    query = query.view(rows, key.shape[1], heads // key.shape[1], size).to(value.dtype)
    found = F.scaled_dot_product_attention(query, key.to(value.dtype), value, attention_mask, scale=scaling)
    return found.reshape(rows, 1, heads, size), None


@contextmanager
def _attention(model: "PreTrainedModel") -> "Iterator[None]":
    AttentionInterface.register(_ATTENTION, _attend)
    AttentionMaskInterface.register(_ATTENTION, sdpa_mask)
    config = model.config.get_text_config()
    before = config._attn_implementation
    model.set_attn_implementation(_ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
