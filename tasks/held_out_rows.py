"""The held-out rows that policies are measured on, as tokens."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tasks.completion_mask import IGNORED, Message, render, tokenize
from tasks.row_split import HELD_OUT
from tasks.scoring import Scored
from tasks.tokenize_rows import end_of_document, tokenize_conversations, tokenize_preferences

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tasks.method import Input

Row = dict[str, object]


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Preference pairs: each side with its answer's tokens masked, and what is wrong with the rejected one."""

    chosen: Sequence[Scored]
    rejected: Sequence[Scored]
    kinds: Sequence[str | None]


def draw_rows(rows: "Input", count: int, seed: int) -> list[Row]:
    """At most ``count`` held-out rows: which, is decided by their ids, so that more rows change few of them."""
    import pyarrow.parquet as pq

    found: list[Row] = pq.read_table(rows.path / HELD_OUT).to_pylist()
    return sorted(found, key=lambda row: hashlib.sha256(f"{seed}:{row['row_id']}".encode()).digest())[:count]


def text_tokens(rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase", max_length: int) -> list[Scored]:
    """Each document with its end; every token but the first counts."""
    end = tokenizer.convert_tokens_to_ids(end_of_document(tokenizer))
    texts = [str(row["text"]) for row in rows]
    tokens = tokenize(tokenizer, texts)
    cut = [[*tokens[text], end][:max_length] for text in texts]
    return [Scored(input_ids=ids, mask=[1] * len(ids)) for ids in cut if len(ids) > 1]


def answer_tokens(rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase", max_length: int) -> list[Scored]:
    """Each conversation; what the assistant says counts, as in training."""
    columns = tokenize_conversations(rows, tokenizer, max_length).columns
    return [
        Scored(input_ids=ids, mask=[int(label != IGNORED) for label in labels])
        for ids, labels in zip(columns["input_ids"], columns["labels"], strict=True)
    ]


def pair_tokens(rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase", max_length: int) -> Pairs:
    """Each pair's two conversations; the answers count, as in training."""
    result = tokenize_preferences(rows, tokenizer, max_length)
    left_out = set(result.dropped)
    sides = {
        side: [
            Scored(input_ids=[*prompt, *answer], mask=[0] * len(prompt) + [1] * len(answer))
            for prompt, answer in zip(result.columns["prompt_ids"], result.columns[f"{side}_ids"], strict=True)
        ]
        for side in ("chosen", "rejected")
    }
    kinds = [None if row["kind"] is None else str(row["kind"]) for row in rows if row["row_id"] not in left_out]
    return Pairs(chosen=sides["chosen"], rejected=sides["rejected"], kinds=kinds)


def distinct_prompts(rows: Sequence[Row], count: int) -> list[list[Message]]:
    """The first ``count`` different prompts."""
    seen: dict[str, list[Message]] = {}
    for row in rows:
        prompt = row["prompt"]
        assert isinstance(prompt, list)
        seen.setdefault(str(prompt), prompt)
    return list(seen.values())[:count]


def prompt_tokens(
    prompts: Sequence[list[Message]], tokenizer: "PreTrainedTokenizerBase", max_length: int
) -> list[list[int]]:
    """Each prompt up to where the assistant begins to speak; a long one keeps its end."""
    texts = [str(tokenizer.apply_chat_template(p, tokenize=False, add_generation_prompt=True)) for p in prompts]
    tokens = tokenize(tokenizer, texts)
    return [tokens[text][-max_length:] for text in texts]


def answered_tokens(
    prompts: Sequence[list[Message]], answers: Sequence[str], tokenizer: "PreTrainedTokenizerBase", max_length: int
) -> list[list[int]]:
    """Each prompt with an answer to it, as a reward model reads them."""
    texts = [
        render(tokenizer, [*prompt, {"role": "assistant", "content": answer}], f"prompt {index}").text
        for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    tokens = tokenize(tokenizer, texts)
    return [tokens[text][:max_length] for text in texts]
