"""Rows as they are trained, as text."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tasks.data.tokens.tokenize_rows import IGNORED, Columns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def sample(tokenizer: "PreTrainedTokenizerBase", columns: Columns) -> str:
    """The decoded text of an example, every trained stretch in ⟦ ⟧."""
    if "labels" in columns:
        return _marked(tokenizer, columns["input_ids"], [label != IGNORED for label in columns["labels"]])
    answers = (tokenizer.decode(columns[name]) for name in ("chosen_ids", "rejected_ids"))
    return str(tokenizer.decode(columns["prompt_ids"])) + "".join(f"⟦{answer}⟧" for answer in answers)


def _marked(tokenizer: "PreTrainedTokenizerBase", ids: Sequence[int], trained: Sequence[bool]) -> str:
    text, place = "", 0
    while place < len(ids):
        end = place
        while end < len(ids) and trained[end] == trained[place]:
            end += 1
        piece = tokenizer.decode(ids[place:end])
        text += f"⟦{piece}⟧" if trained[place] else piece
        place = end
    return text
