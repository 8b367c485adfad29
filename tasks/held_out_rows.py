"""The held-out rows that policies are measured on, as tokens."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lineage.errors import DataError
from tasks.data.preparing.row_split import HELD_OUT, canonical
from tasks.data.tokens.completion_mask import IGNORED, Message, render, tokenize
from tasks.data.tokens.tokenize_rows import end_of_document, tokenize_conversations, tokenize_preferences
from tasks.scoring import Scored

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tasks.method import Input, Inputs

Row = dict[str, object]


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Preference pairs: each side with its answer's tokens masked, and what is wrong with the rejected one."""

    chosen: Sequence[Scored]
    rejected: Sequence[Scored]
    kinds: Sequence[str | None]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What every policy is asked."""

    text: Sequence[Scored]
    answers: Sequence[Scored]
    pairs: Pairs
    prompts: Sequence[list[Message]]
    prompt_ids: Sequence[Sequence[int]]


def draw(
    inputs: "Inputs",
    tokenizer: "PreTrainedTokenizerBase",
    *,
    num_rows: int,
    num_prompts: int,
    max_length: int,
    seed: int,
) -> Rows:
    """At most so many rows of each kind.

    Raises:
        DataError: of one kind there is none.
    """
    text, conversations, pairs = (
        draw_rows(inputs[slot], num_rows, seed) for slot in ("text", "conversations", "pairs")
    )
    prompts = distinct_prompts(pairs, num_prompts)
    rows = Rows(
        text=text_tokens(text, tokenizer, max_length),
        answers=answer_tokens(conversations, tokenizer, max_length),
        pairs=pair_tokens(pairs, tokenizer, max_length),
        prompts=prompts,
        prompt_ids=prompt_tokens(prompts, tokenizer, max_length),
    )
    for slot, found in (("text", rows.text), ("conversations", rows.answers), ("pairs", rows.pairs.kinds)):
        if not found:
            raise DataError(
                f"no held-out row of {inputs[slot].name!r} has a token to score within max_length={max_length}; "
                "raise max_length of evaluate, or hold out more rows"
            )
    return rows


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
    return [
        Scored(input_ids=ids, mask=[1] * len(ids), row_id=str(row["row_id"]), group=_content(row))
        for row, ids in zip(rows, cut, strict=True)
        if len(ids) > 1
    ]


def answer_tokens(rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase", max_length: int) -> list[Scored]:
    """Each conversation; what the assistant says counts, as in training."""
    result = tokenize_conversations(rows, tokenizer, max_length)
    columns, kept = result.columns, _kept(rows, result.dropped)
    return [
        Scored(
            input_ids=ids,
            mask=[int(label != IGNORED) for label in labels],
            row_id=str(row["row_id"]),
            group=_content(row),
        )
        for row, ids, labels in zip(kept, columns["input_ids"], columns["labels"], strict=True)
    ]


def pair_tokens(rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase", max_length: int) -> Pairs:
    """Each pair's two conversations; the answers count, as in training."""
    result = tokenize_preferences(rows, tokenizer, max_length)
    columns, kept = result.columns, _kept(rows, result.dropped)
    sides = {
        side: [
            Scored(
                input_ids=[*prompt, *answer],
                mask=[0] * len(prompt) + [1] * len(answer),
                row_id=str(row["row_id"]),
                group=digest(row["prompt"]),
            )
            for row, prompt, answer in zip(kept, columns["prompt_ids"], columns[f"{side}_ids"], strict=True)
        ]
        for side in ("chosen", "rejected")
    }
    kinds = [None if row["kind"] is None else str(row["kind"]) for row in kept]
    return Pairs(chosen=sides["chosen"], rejected=sides["rejected"], kinds=kinds)


def digest(value: object) -> str:
    """A short name for a prompt."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()[:16]


def _content(row: Row) -> str:
    """The name that a row shares with its duplicates, which say nothing new."""
    return str(row["row_id"]).partition("-")[0]


def _kept(rows: Sequence[Row], dropped: Sequence[str]) -> list[Row]:
    left_out = set(dropped)
    return [row for row in rows if row["row_id"] not in left_out]


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
