"""The held-out rows that policies are measured on, as tokens."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lineage.artifact import Kind
from lineage.errors import DataError
from tasks.data.kinds import IGNORED
from tasks.data.preparing.row_split import HELD_OUT, canonical
from tasks.data.schema import messages_of, tools_of
from tasks.data.tokens.encoding import encoder_of
from tasks.data.tokens.fate import TokenRow
from tasks.data.tokens.rendering import Renderer
from tasks.data.tokens.tokenization import Tokenization
from tasks.data.tokens.tokenize_rows import RowTokenizer
from tasks.scoring import Scored

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tasks.method import Input, Inputs

Row = dict[str, object]
Message = dict[str, str]  # as a file of prepared rows holds it


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Preference pairs: each side with its answer's tokens masked, and what is wrong with the rejected one."""

    chosen: Sequence[Scored]
    rejected: Sequence[Scored]
    kinds: Sequence[str | None]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """What is asked, and with which tools.

    Args:
        tools: JSON text, as a file of prepared rows holds it; None: there are none.
    """

    messages: list[Message]
    tools: str | None

    @property
    def name(self) -> str:
        """A short one, the same for the same prompt in every evaluation."""
        asked = self.messages if self.tools is None else [self.messages, self.tools]
        return hashlib.sha256(canonical(asked).encode()).hexdigest()[:16]

    def text(self, renderer: Renderer, answer: str | None = None) -> str:
        """It and the answer; without one, up to where the assistant begins to speak."""
        messages = messages_of(self.messages)
        if answer is not None:
            messages.append({"role": "assistant", "content": answer})
        return renderer.text(
            messages, tools_of({"tools": self.tools}), row_id=f"prompt {self.name}", prompt=answer is None
        )


@dataclass(frozen=True, kw_only=True)
class Question:
    """A held-out conversation up to its last answer, which is the reference.

    Args:
        row_id: of the conversation.
        group: as in ``Scored``.
    """

    prompt: Prompt
    reference: str
    row_id: str
    group: str


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What every policy is asked.

    Args:
        prompts, prompt_ids: of the pairs.
        questions, question_ids: of the conversations: what an exact match is measured on.
    """

    text: Sequence[Scored]
    answers: Sequence[Scored]
    pairs: Pairs
    prompts: Sequence[Prompt]
    prompt_ids: Sequence[Sequence[int]]
    questions: Sequence[Question]
    question_ids: Sequence[Sequence[int]]


def draw(
    inputs: "Inputs",
    tokenizer: "PreTrainedTokenizerBase",
    *,
    num_rows: int,
    num_prompts: int,
    num_questions: int,
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
    questions = questions_of(draw_rows(inputs["conversations"], num_questions, seed))
    rows = Rows(
        text=text_tokens(text, tokenizer, max_length),
        answers=answer_tokens(conversations, tokenizer, max_length),
        pairs=pair_tokens(pairs, tokenizer, max_length),
        prompts=prompts,
        prompt_ids=prompt_tokens(prompts, tokenizer, max_length),
        questions=questions,
        question_ids=prompt_tokens([question.prompt for question in questions], tokenizer, max_length),
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
    cut = [
        (row, each.columns["input_ids"][:max_length]) for row, each in _tokens(Kind.TEXT, rows, tokenizer, max_length)
    ]
    return [
        Scored(input_ids=ids, mask=[1] * len(ids), row_id=str(row["row_id"]), group=_content(row))
        for row, ids in cut
        if len(ids) > 1
    ]


def answer_tokens(rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase", max_length: int) -> list[Scored]:
    """Each conversation; what the assistant says counts, as in training."""
    return [
        Scored(
            input_ids=each.columns["input_ids"],
            mask=[int(label != IGNORED) for label in each.columns["labels"]],
            row_id=str(row["row_id"]),
            group=_content(row),
        )
        for row, each in _tokens(Kind.CONVERSATIONS, rows, tokenizer, max_length)
    ]


def pair_tokens(rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase", max_length: int) -> Pairs:
    """Each pair's two conversations; the answers count, as in training."""
    found = list(_tokens(Kind.PREFERENCES, rows, tokenizer, max_length))
    sides = {
        side: [
            Scored(
                input_ids=[*each.columns["prompt_ids"], *each.columns[side]],
                mask=[0] * len(each.columns["prompt_ids"]) + [1] * len(each.columns[side]),
                row_id=str(row["row_id"]),
                group=prompt_of(row).name,
            )
            for row, each in found
        ]
        for side in ("chosen_ids", "rejected_ids")
    }
    kinds = [None if row["kind"] is None else str(row["kind"]) for row, _ in found]
    return Pairs(chosen=sides["chosen_ids"], rejected=sides["rejected_ids"], kinds=kinds)


def _tokens(
    kind: Kind, rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase", max_length: int
) -> Iterator[tuple[Row, TokenRow]]:
    """The tokens of each row that would be trained on."""
    tokenize = RowTokenizer.of(Tokenization(kind=kind, max_length=max_length), tokenizer)
    return ((row, each) for row, each in zip(rows, tokenize(rows), strict=True) if not each.fate.dropped)


def prompt_of(row: Row) -> Prompt:
    """That of a preference pair."""
    messages, tools = row["prompt"], row.get("tools")
    assert isinstance(messages, list)
    return Prompt(messages=messages, tools=None if tools is None else str(tools))


def questions_of(rows: Sequence[Row]) -> list[Question]:
    """Each conversation that has an answer in words, up to the last of them."""
    found = []
    for row in rows:
        messages, tools = row["messages"], row.get("tools")
        assert isinstance(messages, list)
        answers = [at for at, message in enumerate(messages) if message["role"] == "assistant" and message["content"]]
        if answers:
            prompt = Prompt(messages=messages[: answers[-1]], tools=None if tools is None else str(tools))
            reference = str(messages[answers[-1]]["content"])
            found.append(Question(prompt=prompt, reference=reference, row_id=str(row["row_id"]), group=_content(row)))
    return found


def _content(row: Row) -> str:
    """The name that a row shares with its duplicates, which say nothing new."""
    return str(row["row_id"]).partition("-")[0]


def distinct_prompts(rows: Sequence[Row], count: int) -> list[Prompt]:
    """The first ``count`` different prompts."""
    prompts = map(prompt_of, rows)
    return list({prompt.name: prompt for prompt in prompts}.values())[:count]


def prompt_tokens(prompts: Sequence[Prompt], tokenizer: "PreTrainedTokenizerBase", max_length: int) -> list[list[int]]:
    """Each prompt up to where the assistant begins to speak; a long one keeps its end."""
    renderer = Renderer.of(tokenizer)
    texts = [prompt.text(renderer) for prompt in prompts]
    return [each.ids[-max_length:] for each in encoder_of(tokenizer).encode(texts)]


def answered_tokens(
    prompts: Sequence[Prompt], answers: Sequence[str], tokenizer: "PreTrainedTokenizerBase", max_length: int
) -> list[list[int]]:
    """Each prompt with an answer to it, as a reward model reads them."""
    renderer = Renderer.of(tokenizer)
    texts = [prompt.text(renderer, answer) for prompt, answer in zip(prompts, answers, strict=True)]
    return [each.ids[:max_length] for each in encoder_of(tokenizer).encode(texts)]
