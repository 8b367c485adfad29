"""Scores of reward models: one per row, read at the row's last token by a head that computes in fp32.

transformers reads the score at the last token that is not the pad token. Where the pad token is also the end of
sequence, that is the token before the end: a finished and a cut-off answer would score equal. Here the attention mask
tells which tokens belong to the row. Under bf16 autocast a head would round every score to 8 bits.

Shapes: B rows, T tokens of the longest, H hidden size.
"""

from collections.abc import Collection
from types import MethodType
from typing import TYPE_CHECKING

import torch
from transformers.modeling_outputs import SequenceClassifierOutputWithPast

from tasks.train.kernels.machine import plain
from tasks.train.kernels.padding_free import backbone
from tasks.train.sharding import through

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from tasks.train.kernels.padding_free import Batch, Collator, Example


def sequence_scores(
    model: "PreTrainedModel", input_ids_BT: "Tensor", attention_mask_BT: "Tensor", **seen: "Tensor"
) -> "Tensor":
    """The score (B) of each row in fp32, for a finished reward model or one in training.

    Args:
        attention_mask_BT: 1 on the row's own tokens; padding is on the right.
        seen: what the model reads of images.
    """

    def scores() -> "Tensor":
        hidden_BTH = model.base_model(
            input_ids=input_ids_BT, attention_mask=attention_mask_BT, use_cache=False, **seen
        ).last_hidden_state
        rows_B = torch.arange(len(input_ids_BT), device=hidden_BTH.device)
        return _score(model, hidden_BTH[rows_B, last_tokens(attention_mask_BT)])

    return through(model, scores)


def token_values(model: "PreTrainedModel", input_ids_BT: "Tensor") -> "Tensor":
    """The value (B, T) of each token in fp32 under a VALUE_MODEL: the output of its head at every token.

    Padding is on the right, and attention is causal, so that no mask is needed.
    """
    return through(
        model, lambda: _score(model, model.base_model(input_ids=input_ids_BT, use_cache=False).last_hidden_state)
    )


def last_tokens(attention_mask_BT: "Tensor") -> "Tensor":
    """Index (B) of each row's last token."""
    index_T = torch.arange(attention_mask_BT.shape[1], device=attention_mask_BT.device)
    return (index_T * attention_mask_BT.bool()).argmax(-1)


def install_scores(model: "PreTrainedModel | PeftModel") -> None:
    """Replaces a reward model's forward: its logits are the scores (B, 1) of ``sequence_scores``."""
    model = plain(model)
    model.forward = MethodType(_forward, model)


def _forward(
    self: "PreTrainedModel", *, input_ids: "Tensor", attention_mask: "Tensor", **inputs: "Tensor"
) -> SequenceClassifierOutputWithPast:
    """For a padded batch, or a padding-free one (``row_index``)."""
    row_index_BT = inputs.get("row_index")
    inputs |= {"input_ids": input_ids, "attention_mask": attention_mask}
    hidden = backbone(self, inputs).last_hidden_state
    last_B = last_tokens(attention_mask)
    if row_index_BT is None:
        last_BH = hidden[torch.arange(len(last_B), device=hidden.device), last_B]
    else:
        last_BH = torch.nn.functional.embedding(
            row_index_BT.gather(1, last_B.unsqueeze(1)).squeeze(1), hidden.squeeze(0)
        )
    return SequenceClassifierOutputWithPast(logits=_score(self, last_BH).unsqueeze(1))


def _score(model: "PreTrainedModel", hidden: "Tensor") -> "Tensor":
    with torch.autocast(hidden.device.type, enabled=False):
        return model.score(hidden.float()).squeeze(-1).float()


def whole_sequences(collate: "Collator") -> "Collator":
    """Collates prompt and answer as one sequence, which a reward model reads."""

    def joined(examples: "list[Example]") -> "Batch":
        answers = ("chosen_ids", "rejected_ids")
        return collate([{name: example["prompt_ids"] + example[name] for name in answers} for example in examples])

    return joined


def unset_pad(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", stops: Collection[int]) -> None:
    """Removes the pad token from a reward model's config where it also ends rows.

    transformers reads the score at the last token that is not the pad token, which would be the one before the end.
    Without a pad token it reads the last token of a row, and refuses several rows at once.
    """
    pad = tokenizer.pad_token_id
    if pad == tokenizer.eos_token_id or pad in stops:
        for config in (model.config, model.config.get_text_config()):
            config.pad_token_id = None
