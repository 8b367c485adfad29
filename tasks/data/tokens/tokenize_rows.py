"""Rows of the data stages -> tokens that trainers read; nothing is lost without being counted and named."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lineage.errors import ConfigError
from tasks.data.preparing.row_split import TRAIN
from tasks.data.tokens.completion_mask import IGNORED, Message, common_prefix, labels_of, render, tokenize
from tasks.data.tokens.tokenized_rows import NUM_SAMPLES, TokenizedRows, marked

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tasks.method import Input

Row = dict[str, object]


def read_rows(rows: "Input") -> list[Row]:
    """The training rows that a data stage wrote."""
    import pyarrow.parquet as pq

    table: list[Row] = pq.read_table(rows.path / TRAIN).to_pylist()
    return table


def require_chat_template(tokenizer: "PreTrainedTokenizerBase", policy: "Input") -> None:
    """Refuses a model that cannot render a conversation."""
    if tokenizer.chat_template is None:
        raise ConfigError(
            f"the model of {policy.name!r} has no chat template, and conversations cannot be rendered without one; "
            "set chat_template=chatml on the sft stage (the template then travels with its output)"
        )


def tokenize_text(rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase", max_length: int) -> TokenizedRows:
    """Documents joined with the end-of-document token and cut in chunks of ``max_length``; every token is trained.

    The end of the stream that fills no chunk is left out: the document that it begins in is counted as
    cut, the documents wholly inside it as dropped.
    """
    end = tokenizer.convert_tokens_to_ids(end_of_document(tokenizer))
    texts = [str(row["text"]) for row in rows]
    tokens = tokenize(tokenizer, texts)
    stream: list[int] = []
    starts: list[int] = []
    for text in texts:
        starts.append(len(stream))
        stream += [*tokens[text], end]
    kept = len(stream) // max_length * max_length
    chunks = [stream[place : place + max_length] for place in range(0, kept, max_length)]
    ends = [*starts[1:], len(stream)]
    result = TokenizedRows(num_rows=len(rows), columns={"input_ids": chunks, "labels": chunks})
    for row, first, last in zip(rows, starts, ends, strict=True):
        if first >= kept:
            result.dropped.append(str(row["row_id"]))
        elif last > kept:
            result.cut.append(str(row["row_id"]))
    result.num_tokens = result.num_trained = kept
    result.samples = [f"⟦{tokenizer.decode(chunk)}⟧" for chunk in chunks[:NUM_SAMPLES]]
    return result


def end_of_document(tokenizer: "PreTrainedTokenizerBase") -> str:
    """``<|endoftext|>`` where the vocabulary has it (a chat model's eos ends a turn, not a document), else eos."""
    return "<|endoftext|>" if "<|endoftext|>" in tokenizer.get_vocab() else str(tokenizer.eos_token)


def tokenize_conversations(rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase", max_length: int) -> TokenizedRows:
    """Conversations as ``input_ids`` and ``labels``; every assistant turn is trained, and nothing else."""
    rendered = [render(tokenizer, _messages(row["messages"]), str(row["row_id"])) for row in rows]
    tokens = tokenize(tokenizer, [text for turns in rendered for text in (turns.text, *sum(turns.spans, ()))])
    result = TokenizedRows(num_rows=len(rows), columns={"input_ids": [], "labels": []})
    for row, turns in zip(rows, rendered, strict=True):
        row_id, ids = str(row["row_id"]), tokens[turns.text]
        labels = labels_of(turns, tokens)[:max_length]
        if len(ids) > max_length:
            result.cut.append(row_id)
        trained = sum(label != IGNORED for label in labels[1:])
        if not trained:
            result.dropped.append(row_id)
            continue
        result.columns["input_ids"].append(ids[:max_length])
        result.columns["labels"].append(labels)
        result.num_tokens += len(labels)
        result.num_trained += trained
        if len(result.samples) < NUM_SAMPLES:
            result.samples.append(marked(tokenizer, ids[:max_length], [label != IGNORED for label in labels]))
    return result


def tokenize_preferences(rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase", max_length: int) -> TokenizedRows:
    """Pairs as ``prompt_ids``, ``chosen_ids`` and ``rejected_ids``; prompt + completion fit ``max_length``."""
    pairs = [
        tuple(
            render(tokenizer, [*_messages(row["prompt"]), *_messages(row[side])], str(row["row_id"]))
            for side in ("chosen", "rejected")
        )
        for row in rows
    ]
    texts = [text for pair in pairs for turns in pair for text in (turns.text, turns.spans[-1][0])]
    tokens = tokenize(tokenizer, texts)
    result = TokenizedRows(num_rows=len(rows), columns={"prompt_ids": [], "chosen_ids": [], "rejected_ids": []})
    for row, pair in zip(rows, pairs, strict=True):
        chosen, rejected = (tokens[turns.text] for turns in pair)
        start = min(common_prefix(tokens[turns.spans[-1][0]], tokens[turns.text]) for turns in pair)
        if max(len(chosen), len(rejected)) > max_length:
            result.cut.append(str(row["row_id"]))
        prompt, *answers = chosen[:start], chosen[start:max_length], rejected[start:max_length]
        if start >= max_length or answers[0] == answers[1] or not all(answers):
            result.dropped.append(str(row["row_id"]))
            continue
        for name, ids in zip(result.columns, (prompt, *answers), strict=True):
            result.columns[name].append(ids)
        result.num_tokens += 2 * len(prompt) + len(answers[0]) + len(answers[1])
        result.num_trained += len(answers[0]) + len(answers[1])
        if len(result.samples) < NUM_SAMPLES:
            result.samples.append(
                tokenizer.decode(prompt) + "".join(f"⟦{tokenizer.decode(answer)}⟧" for answer in answers)
            )
    return result


def _messages(value: object) -> list[Message]:
    assert isinstance(value, list)
    return value
