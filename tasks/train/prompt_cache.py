"""Reads the prompt of a group of completions once: its keys and values serve all of them.

Attention is causal, so that the hidden states of a prompt do not depend on what follows. The layers then read each
prompt once, and of a row its last prompt token and its completion; TRL's head, which on a CPU also projects positions
without a loss, reads the same. The numbers are those of whole rows up to the order of additions.

Shapes: B rows, P tokens of the longest prompt.
"""

import functools
import itertools
import math
from typing import TYPE_CHECKING

import torch
from peft import PeftModel

from tasks.train.padding_free import is_padding_free

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import Cache, PreTrainedModel

_TENSORS = {"input_ids", "attention_mask", "labels"}  # of TRL's fused forward


def prompt_cache(
    model: "PreTrainedModel", ids_BP: "Tensor", mask_BP: "Tensor", position_ids_BP: "Tensor | None" = None
) -> "Cache | None":
    """Keys and values of all tokens of the prompts but the last.

    Args:
        ids_BP: padded on the left; equal prompts side by side.
        position_ids_BP: None: those that the model counts, padding included.

    Returns:
        None: prompts have no such groups of one size, or the layers are not known to be plain causal attention.
    """
    if ids_BP.shape[1] < 2 or not is_padding_free(model):
        return None
    prompts = itertools.groupby(ids_BP.masked_fill(mask_BP == 0, -1).tolist())
    size = math.gcd(*(len(list(equal)) for _, equal in prompts))
    if size == 1:
        return None
    positions = {} if position_ids_BP is None else {"position_ids": position_ids_BP[::size, :-1]}
    cache: Cache = model.base_model(
        input_ids=ids_BP[::size, :-1], attention_mask=mask_BP[::size, :-1], use_cache=True, **positions
    ).past_key_values
    cache.batch_repeat_interleave(size)
    return cache


def read_prompts_once(model: "PreTrainedModel | PeftModel") -> None:
    """Replaces the forward that computes log-probabilities (``add_fused_lm_head``), not that of generation.

    Only where each row of a prompt computes the same: without noise of its own. A model that recomputes its
    activations has no cache, and reads whole rows.
    """
    plain = model.get_base_model() if isinstance(model, PeftModel) else model
    whole = plain.forward

    @functools.wraps(whole)
    def forward(*args: object, **inputs: object) -> object:
        given = {name: each for name, each in inputs.items() if isinstance(each, torch.Tensor)}
        recomputes = plain.training and plain.is_gradient_checkpointing
        if not inputs.get("fused_lm_head") or given.keys() != _TENSORS or recomputes:
            return whole(*args, **inputs)
        ids_BT, mask_BT, labels_BT = given["input_ids"], given["attention_mask"], given["labels"]
        length = int((labels_BT == -100).all(0).long().cumprod(0).sum())  # no row trains a token of the prompts
        some = length < labels_BT.shape[1]  # else each completion is masked, and the end of the prompts is unknown
        cache = prompt_cache(plain, ids_BT[:, :length], mask_BT[:, :length]) if some else None
        if cache is None:
            return whole(*args, **inputs)
        last = slice(length - 1, None)
        read = {"input_ids": ids_BT[:, last], "labels": labels_BT[:, last], "past_key_values": cache}
        return whole(*args, **{**inputs, **read})

    plain.forward = forward
