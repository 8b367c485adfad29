"""Rows of the data stages -> tokens that trainers read; nothing is lost without being counted and named."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from lineage.errors import ConfigError, DataError
from tasks.completion_mask import IGNORED, Message, common_prefix, labels_of, render, tokenize

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

    from tasks.method import Input

logger = logging.getLogger(__name__)
TRAIN_FILE = "train.parquet"
NUM_SAMPLES = 3
Columns = dict[str, list[list[int]]]


@dataclass(kw_only=True)
class TokenizedRows:
    """What a trainer is given, and what became of every row.

    Args:
        num_rows: rows that came in.
        columns: token lists, one entry per row that is trained on (per chunk, for raw text).
        samples: texts of the first rows as they are trained, the trained part in ⟦ ⟧.
        cut, dropped: row_ids of rows that lost their end, and of rows that are not trained on.
        num_tokens, num_trained: tokens in ``columns``, and those among them that are trained.
    """

    num_rows: int
    columns: Columns
    samples: list[str] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    num_tokens: int = 0
    num_trained: int = 0

    @property
    def metrics(self) -> dict[str, float]:
        return {
            "rows": float(self.num_rows),
            "rows_cut": float(len(self.cut)),
            "rows_dropped": float(len(self.dropped)),
            "trained_tokens_percent": 100.0 * self.num_trained / max(self.num_tokens, 1),
        }

    def dataset(self, order: Sequence[int]) -> "Dataset":
        """The rows in the order of training."""
        from datasets import Dataset

        return Dataset.from_dict(self.columns).select(order)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))


def read_rows(rows: "Input") -> list[dict[str, object]]:
    """The training rows that a data stage wrote."""
    import pyarrow.parquet as pq

    table: list[dict[str, object]] = pq.read_table(rows.path / TRAIN_FILE).to_pylist()
    return table


def require_chat_template(tokenizer: "PreTrainedTokenizerBase", policy: "Input") -> None:
    if tokenizer.chat_template is None:
        raise ConfigError(
            f"the model of {policy.name!r} has no chat template, and conversations cannot be rendered without one; "
            "set chat_template=chatml on the sft stage (the template then travels with its output)"
        )


def tokenize_text(rows: Sequence[dict[str, object]], tokenizer: "PreTrainedTokenizerBase", max_length: int) -> TokenizedRows:
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


def tokenize_conversations(
    rows: Sequence[dict[str, object]], tokenizer: "PreTrainedTokenizerBase", max_length: int
) -> TokenizedRows:
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


def tokenize_preferences(
    rows: Sequence[dict[str, object]], tokenizer: "PreTrainedTokenizerBase", max_length: int
) -> TokenizedRows:
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


def marked(tokenizer: "PreTrainedTokenizerBase", ids: Sequence[int], trained: Sequence[bool]) -> str:
    """The decoded text with every trained stretch in ⟦ ⟧."""
    text, place = "", 0
    while place < len(ids):
        end = place
        while end < len(ids) and trained[end] == trained[place]:
            end += 1
        piece = tokenizer.decode(ids[place:end])
        text += f"⟦{piece}⟧" if trained[place] else piece
        place = end
    return text


def show(result: TokenizedRows, rows: "Input", max_length: int) -> None:
    """Logs what is trained and what is not, before the first step.

    Raises:
        DataError: nothing would be trained.
    """
    if not len(result):
        raise DataError(
            f"no row of {rows.name!r} has a trained token within max_length={max_length}: all {result.num_rows} rows "
            "were left out; raise max_length, or check that the rows have answers that fit it"
        )
    shares = " ".join(f"{name}={value:g}" for name, value in result.metrics.items())
    logger.info("rows_of=%s max_length=%d %s", rows.name, max_length, shares)
    if result.cut:
        logger.warning("rows_cut=%d max_length=%d row_ids=%s", len(result.cut), max_length, ",".join(result.cut))
    if result.dropped:
        logger.warning("rows_dropped=%d reason=nothing_to_train row_ids=%s", len(result.dropped), ",".join(result.dropped))
    for sample in result.samples:
        logger.info("sample (trained tokens in ⟦ ⟧): %s", sample)


def _messages(value: object) -> list[Message]:
    assert isinstance(value, list)
    return value
