"""The held-out rows that policies are measured on, tokenized."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

from lineage.artifact import Kind
from lineage.errors import ConfigError, DataError
from tasks.data.formats.turns import canonical
from tasks.data.kinds import DOMAIN, HELD_OUT, IGNORED, PLACES, TRAINED, TokenRow, columns_of, messages_of, tools_of
from tasks.data.tokens.encoding import Rendered, common_prefix, encode_rendered, encoder_of
from tasks.data.tokens.rendering import Renderer
from tasks.data.tokens.template import Thinking
from tasks.data.tokens.tokenization import ControlText, Tokenization
from tasks.data.tokens.tokenize_rows import ANSWER_TOO_LONG, RowTokenizer
from tasks.evaluate.answers import Answer
from tasks.evaluate.scoring import Scored
from tasks.model.vision import Vision

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tasks.recipe import Input, Inputs

Row = dict[str, object]
_MAX_LABELS = 50
Message = dict[str, str]  # as in a file of prepared rows


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Preference pairs: both answers with their tokens masked, and the kind of flaw of the rejected one."""

    chosen: Sequence[Scored]
    rejected: Sequence[Scored]
    kinds: Sequence[str | None]


@dataclass(frozen=True, kw_only=True)
class Unpaired:
    """Single answers with their tokens masked, and which of them are desirable."""

    answers: Sequence[Scored] = ()
    desirable: Sequence[bool] = ()


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt with its tools.

    Args:
        tools: JSON text, as in a file of prepared rows; None: there are none.
        columns: further columns, for reward functions.
    """

    messages: list[Message]
    tools: str | None
    columns: Mapping[str, object] = dataclass_field(default_factory=dict)

    @property
    def name(self) -> str:
        """A short name, the same for the same prompt in every evaluation."""
        asked = self.messages if self.tools is None else [self.messages, self.tools]
        return hashlib.sha256(canonical(asked).encode()).hexdigest()[:16]

    def rendered(self, renderer: Renderer, answer: str | None = None) -> Rendered:
        """The prompt with an answer, as in training; without one, up to the start of the assistant's turn."""
        messages, tools, name = messages_of(self.messages), tools_of({"tools": self.tools}), f"prompt {self.name}"
        if answer is None:
            return renderer.prompt(messages, tools, name)
        conversation: list[dict[str, object]] = [*messages, {"role": "assistant", "content": answer}]
        (turns,) = renderer.turns(conversation, tools, name, first=len(messages))
        return turns


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
    """The rows that every policy is measured on.

    Args:
        prompts, prompt_ids: of the slot ``prompts`` where it is filled, else of the pairs, else of the single answers.
        questions, question_ids: of the conversations, for exact match.
        has_own_prompts: whether the slot ``prompts`` is filled.
        visions: slot -> how the images of its rows are read, if they have any.
        prompt_images, question_images: the places of the images of each prompt and question.
        asking: the slot of the prompts.
        lost: metric -> number of rows that were dropped or cut, per kind: ``pairs/rows_dropped``.
    """

    text: Sequence[Scored]
    answers: Sequence[Scored]
    pairs: Pairs
    prompts: Sequence[Prompt]
    prompt_ids: Sequence[Sequence[int]]
    questions: Sequence[Question]
    question_ids: Sequence[Sequence[int]]
    lost: Mapping[str, float]
    unpaired: Unpaired = Unpaired()
    has_own_prompts: bool = False
    visions: Mapping[str, Vision] = dataclass_field(default_factory=dict)
    prompt_images: Sequence[Sequence[int]] = ()
    question_images: Sequence[Sequence[int]] = ()
    asking: str = "prompts"

    @property
    def judged(self) -> tuple[Sequence[Prompt], Sequence[Sequence[int]], str]:
        """What a reward model scores answers to, with its images and slot: the prompts, else the questions."""
        if self.prompts:
            return self.prompts, self.prompt_images, self.asking
        return [each.prompt for each in self.questions], self.question_images, "conversations"

    @property
    def count(self) -> int:
        """Rows that a policy reads and prompts that it answers."""
        read = (self.text, self.answers, self.pairs.chosen, self.pairs.rejected, self.unpaired.answers)
        return sum(map(len, (*read, self.prompt_ids, self.question_ids)))


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """How many tokens of a row are measured, and how many rows may be cut or dropped.

    Args:
        max_length: of a row, prompt and answer.
        max_new_tokens: capacity that is reserved for an answer.
        max_dropped, max_cut: shares of the rows of a kind; ``max_cut`` also of the prompts and questions.
    """

    max_length: int
    max_new_tokens: int
    max_dropped: float = 1.0
    max_cut: float = 1.0

    def __post_init__(self) -> None:
        if self.max_new_tokens >= self.max_length:
            raise ConfigError(
                f"max_new_tokens={self.max_new_tokens} of evaluate leaves no capacity for a prompt in "
                f"max_length={self.max_length}; fewer new tokens than max_length are accepted; lower max_new_tokens, "
                "or raise max_length"
            )

    @property
    def max_prompt_length(self) -> int:
        return self.max_length - self.max_new_tokens


def draw(
    inputs: "Inputs", tokenizer: "PreTrainedTokenizerBase", *, num_rows: int, num_prompts: int, num_questions: int,
    lengths: Lengths, seed: int, thinking: Thinking | None = None, control_tokens: ControlText | None = None,
    visions: Mapping[str, Vision] = MappingProxyType({}),
) -> Rows:  # fmt: skip
    """Draws rows of each kind that has an input, at most as many as configured.

    Args:
        visions: as of ``Rows``.

    Raises:
        DataError: a kind has no rows, or too many of them are dropped or cut.
    """
    text, conversations, pairs, unpaired = (
        draw_rows(inputs[slot], num_rows, seed) if slot in inputs else []
        for slot in ("text", "conversations", "pairs", "unpaired")
    )
    _require_labels("text", text)
    _require_labels("conversations", conversations)
    asking = next((slot for slot in ("prompts", "pairs", "unpaired") if slot in inputs), "prompts")
    asked = draw_rows(inputs["prompts"], num_rows, seed) if "prompts" in inputs else pairs or unpaired
    prompts = distinct_prompts(asked, num_prompts)
    questions = questions_of(draw_rows(inputs["conversations"], num_questions, seed)) if conversations else []

    def of_chat(kind: Kind, slot: str, rows: Sequence[Row]) -> Tokens:
        options = Tokenization(
            kind=kind, max_length=lengths.max_length, thinking=thinking, control_tokens=control_tokens
        )  # fmt: skip
        return _tokens(options, rows, tokenizer, visions.get(slot))

    tokens = {
        "text": _text(text, tokenizer, lengths.max_length, control_tokens),
        "conversations": of_chat(Kind.CONVERSATIONS, "conversations", conversations),
        "pairs": of_chat(Kind.PREFERENCES, "pairs", pairs),
        **({"unpaired": of_chat(Kind.UNPAIRED, "unpaired", unpaired)} if unpaired else {}),
    }
    ask = partial(
        prompt_tokens, tokenizer=tokenizer, max_prompt_length=lengths.max_prompt_length, thinking=thinking,
        control_tokens=control_tokens,
    )  # fmt: skip
    prompt_ids, prompts_cut, prompt_images = ask(prompts, vision=visions.get(asking))
    question_ids, questions_cut, question_images = ask(
        [question.prompt for question in questions], vision=visions.get("conversations")
    )
    num_cut = prompts_cut + questions_cut
    for slot, found in tokens.items():
        if slot in inputs:
            _require_enough(inputs[slot].name, slot, [each for _, each in found], lengths)
    _require_whole(num_cut, len(prompts) + len(questions), lengths)
    return Rows(
        text=text_tokens(tokens["text"]), answers=answer_tokens(tokens["conversations"]),
        pairs=pair_tokens(tokens["pairs"]), unpaired=unpaired_tokens(tokens.get("unpaired", ())),
        prompts=prompts, prompt_ids=prompt_ids, questions=questions, question_ids=question_ids,
        lost={**_lost(tokens), "asked/prompts_cut": float(num_cut)}, has_own_prompts="prompts" in inputs,
        visions=visions, prompt_images=prompt_images, question_images=question_images, asking=asking,
    )  # fmt: skip


def draw_rows(rows: "Input", count: int, seed: int) -> list[Row]:
    """At most ``count`` held-out rows, chosen by a hash of their ids, so that additional rows change few of them."""
    import pyarrow.parquet as pq

    found: list[Row] = pq.read_table(rows.path / HELD_OUT).to_pylist()
    return sorted(found, key=lambda row: hashlib.sha256(f"{seed}:{row['row_id']}".encode()).digest())[:count]


_MADE_UP = 40  # rows of a data stage that has not run


def words_of_rows(
    inputs: Mapping[str, "Input | None"], *, num_rows: int, num_prompts: int, num_questions: int, seed: int
) -> Rows:
    """Rows whose words stand for their tokens: enough for stubs, and no model is needed.

    Args:
        inputs: slot -> rows; None: their data stage has not run, and the rows are made up.
    """

    def drawn(slot: str, count: int) -> list[Row]:
        if slot not in inputs:
            return []
        rows = inputs[slot]
        return [_made_up(slot, index) for index in range(_MADE_UP)] if rows is None else draw_rows(rows, count, seed)

    def scored(row: Row, text: object) -> Scored:
        length = len(str(text).split()) + 1
        of_row = partial(Scored, row_id=str(row["row_id"]), group=_content(row), domain=_domain(row))
        return of_row(input_ids=range(length), mask=[1] * length)

    pairs, unpaired = drawn("pairs", num_rows), drawn("unpaired", num_rows)
    questions = questions_of(drawn("conversations", num_questions))
    prompts = distinct_prompts(drawn("prompts", num_rows) or pairs or unpaired, num_prompts)
    return Rows(
        text=[scored(row, row["text"]) for row in drawn("text", num_rows)],
        answers=[scored(row, row["messages"]) for row in drawn("conversations", num_rows)],
        pairs=Pairs(
            chosen=[scored(row, row["chosen"]) for row in pairs],
            rejected=[scored(row, row["rejected"]) for row in pairs], kinds=[None] * len(pairs),
        ),
        unpaired=Unpaired(
            answers=[scored(row, row["completion"]) for row in unpaired],
            desirable=[bool(row["label"]) for row in unpaired],
        ),
        prompts=prompts, prompt_ids=[[0]] * len(prompts), questions=questions, question_ids=[[0]] * len(questions),
        lost={}, has_own_prompts="prompts" in inputs,
    )  # fmt: skip


def _made_up(slot: str, index: int) -> Row:
    """A row as in a file of prepared rows, whose answer shares no word with that of another."""
    asked = [{"role": "user", "content": f"What is {index}?"}]
    answered = [{"role": "assistant", "content": f"It{index} is{index} {index}."}]
    other = [{"role": "assistant", "content": f"It is not {index}, I think."}]
    found: dict[str, Row] = {
        "text": {"text": f"It is {index}."}, "conversations": {"messages": [*asked, *answered]},
        "pairs": {"prompt": asked, "chosen": answered, "rejected": other}, "prompts": {"prompt": asked},
        "unpaired": {"prompt": asked, "completion": answered, "label": index % 2},
    }  # fmt: skip
    return {"row_id": f"made-up-{index}-0", **found[slot]}


Tokens = Sequence[tuple[Row, TokenRow]]  # each drawn row with its tokens


def _text(
    rows: Sequence[Row],
    tokenizer: "PreTrainedTokenizerBase",
    max_length: int,
    control_tokens: ControlText | None = None,
) -> Tokens:
    options = Tokenization(kind=Kind.TEXT, max_length=max_length, control_tokens=control_tokens)
    found = list(RowTokenizer.of(options, tokenizer)(rows))
    for each in found:
        each.outcome.cut = len(each.columns["input_ids"]) > max_length
        del each.columns["input_ids"][max_length:]
        if len(each.columns["input_ids"]) < 2:  # the first token has nothing before it
            each.outcome.dropped = "one_token"
    return list(zip(rows, found, strict=True))


def _tokens(
    options: Tokenization, rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase", vision: Vision | None = None
) -> Tokens:
    """Tokenizes rows: a long one loses the beginning of its prompt. Where its answer leaves no capacity for a prompt,
    the prompt keeps half of ``max_length``, and the answer loses its end."""
    by_prompt = replace(options, too_long="cut_prompt")
    by_answer = replace(options, max_prompt_length=max(1, options.max_length // 2))
    found = list(RowTokenizer.of(by_prompt, tokenizer, vision)(rows))
    long = [index for index, each in enumerate(found) if each.outcome.dropped == ANSWER_TOO_LONG]
    again = RowTokenizer.of(by_answer, tokenizer, vision)([rows[index] for index in long])
    for index, each in zip(long, again, strict=True):
        found[index] = each
    return list(zip(rows, found, strict=True))


def _require_enough(name: str, slot: str, tokens: Sequence[TokenRow], lengths: Lengths) -> None:
    dropped = [each for each in tokens if each.outcome.dropped]
    measured = [each.outcome for each in tokens if not each.outcome.dropped and slot != "text"]
    reasons = ", ".join(sorted({str(each.outcome.dropped) for each in dropped}))
    if len(dropped) == len(tokens):
        raise DataError(
            f"no held-out row of {name!r} ({slot}) has a token to score within max_length={lengths.max_length}"
            f"{f' ({reasons})' if reasons else ''}; raise max_length of evaluate, or hold out more rows"
        )
    for count, what, limit, field in (
        (len(dropped), f"dropped ({reasons})", lengths.max_dropped, "max_dropped"),
        (sum(outcome.cut for outcome in measured), "cut in their answers", lengths.max_cut, "max_cut"),
        (sum(outcome.prompt_cut for outcome in measured), "cut in their prompts", lengths.max_cut, "max_cut"),
    ):
        if count > limit * len(tokens):
            raise DataError(
                f"{count} of {len(tokens)} held-out rows of {name!r} ({slot}) are {what} with "
                f"max_length={lengths.max_length}, and the result would not represent all rows; at most "
                f"{field}={limit:g} of the rows are accepted; raise max_length or {field} of evaluate"
            )


def _require_whole(num_cut: int, num_asked: int, lengths: Lengths) -> None:
    if num_cut > lengths.max_cut * num_asked:
        raise DataError(
            f"{num_cut} of {num_asked} prompts and questions have more than the {lengths.max_prompt_length} tokens "
            f"that max_length={lengths.max_length} leaves beside max_new_tokens={lengths.max_new_tokens}, and would be "
            f"answered without their beginning; at most max_cut={lengths.max_cut:g} of them are accepted; raise "
            "max_length or max_cut of evaluate, or lower max_new_tokens"
        )


def _lost(tokens: Mapping[str, Tokens]) -> dict[str, float]:
    lost: dict[str, float] = {}
    for slot, rows in tokens.items():
        outcomes = [each.outcome for _, each in rows]
        kept = [outcome for outcome in outcomes if not outcome.dropped]
        lost[f"{slot}/rows_dropped"] = float(len(outcomes) - len(kept))
        lost[f"{slot}/rows_cut"] = float(sum(outcome.cut for outcome in kept))
        if slot != "text":
            lost[f"{slot}/prompts_cut"] = float(sum(outcome.prompt_cut for outcome in kept))
    return lost


def text_tokens(rows: Tokens) -> list[Scored]:
    """Each document with its end token; all tokens but the first count."""
    kept = [(row, each.columns["input_ids"]) for row, each in _kept(rows)]
    return [
        Scored(
            input_ids=ids, mask=[1] * len(ids), row_id=str(row["row_id"]), group=_content(row), domain=_domain(row)
        )
        for row, ids in kept
    ]  # fmt: skip


def answer_tokens(rows: Tokens) -> list[Scored]:
    """Each conversation, in one text or several; the assistant's tokens count, as in training."""
    return [
        Scored(
            input_ids=columns["input_ids"], mask=[int(label != IGNORED) for label in columns["labels"]],
            row_id=str(row["row_id"]), group=_content(row), images=columns.get(PLACES, ()), domain=_domain(row),
        )
        for row, each in _kept(rows)
        for columns in (each.columns, *each.more)
    ]  # fmt: skip


def pair_tokens(rows: Tokens) -> Pairs:
    """The two conversations of each pair; the tokens of the answers count, as in training."""
    kinds = [None if row["kind"] is None else str(row["kind"]) for row, _ in _kept(rows)]
    return Pairs(chosen=_answered_rows(rows, "chosen"), rejected=_answered_rows(rows, "rejected"), kinds=kinds)


def unpaired_tokens(rows: Tokens) -> Unpaired:
    """The conversation of each single answer; the tokens of the answer count, as in training."""
    desirable = [bool(row["label"]) for row, _ in _kept(rows)]
    return Unpaired(answers=_answered_rows(rows, "completion"), desirable=desirable)


def _answered_rows(rows: Tokens, name: str) -> list[Scored]:
    """Prompts with their answers of a name; rows of one prompt are a group."""
    return [
        Scored.answer(
            each.columns["prompt_ids"], each.columns[f"{name}_ids"], str(row["row_id"]), prompt_of(row).name,
            trained=each.columns[f"{name}_{TRAINED}"], images=each.columns.get(PLACES, ()),
        )
        for row, each in _kept(rows)
    ]  # fmt: skip


def _kept(rows: Tokens) -> Tokens:
    return [(row, each) for row, each in rows if not each.outcome.dropped]


def prompt_of(row: Row) -> Prompt:
    """The prompt of a preference pair, a single answer, or a row of prompts."""
    messages, tools = row["prompt"], row.get("tools")
    assert isinstance(messages, list)
    return Prompt(messages=messages, tools=None if tools is None else str(tools), columns=columns_of(row))


def questions_of(rows: Sequence[Row]) -> list[Question]:
    """Each conversation that has an answer with text, up to the last such answer."""
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
    """The name that a row shares with its duplicates, which are not independent of it."""
    return str(row["row_id"]).partition("-")[0]


def _domain(row: Row) -> str | None:
    """The label of a row, of those that have one."""
    return None if row.get(DOMAIN) is None else str(row[DOMAIN])


def _require_labels(slot: str, rows: Sequence[Row]) -> None:
    found = {_domain(row) for row in rows}
    if len(found) > _MAX_LABELS:
        raise DataError(
            f"the {len(rows)} held-out rows of {slot} have {len(found)} labels, such as {max(map(str, found))!r}, and "
            f"a perplexity is reported for each; at most {_MAX_LABELS} are accepted; name another column in "
            f"columns.{DOMAIN} of their source, or none"
        )


def distinct_prompts(rows: Sequence[Row], count: int) -> list[Prompt]:
    """The first ``count`` different prompts."""
    prompts = map(prompt_of, rows)
    return list({prompt.name: prompt for prompt in prompts}.values())[:count]


def prompt_tokens(
    prompts: Sequence[Prompt],
    tokenizer: "PreTrainedTokenizerBase",
    max_prompt_length: int,
    thinking: Thinking | None = None,
    control_tokens: ControlText | None = None,
    vision: Vision | None = None,
) -> tuple[list[list[int]], int, list[list[int]]]:
    """Each prompt up to the start of the assistant's turn; how many are cut: a long one keeps its end; and its images.

    Raises:
        DataError: one with images is too long.
    """
    renderer = Renderer.of(tokenizer, thinking, keeps_control=control_tokens == "keep", images=vision is not None)
    rendered = [prompt.rendered(renderer) for prompt in prompts]
    if vision:
        pairs = zip(rendered, prompts, strict=True)
        rendered = [vision.expanded(each, messages_of(prompt.messages), prompt.name) for each, prompt in pairs]
    images = [[place for _, _, place in each.images] for each in rendered]
    whole = [each.ids for each in encode_rendered(encoder_of(tokenizer), rendered)]
    long = [len(ids) for ids, places in zip(whole, images, strict=True) if places and len(ids) > max_prompt_length]
    if long:
        raise DataError(
            f"{len(long)} of {len(prompts)} prompts and questions with images have up to {max(long)} tokens, of which "
            f"max_length and max_new_tokens of evaluate leave {max_prompt_length}, and an image is not cut; raise "
            "max_length"
        )
    cut = [without_beginning(ids, len(ids) - max_prompt_length, tokenizer.bos_token_id) for ids in whole]
    return cut, sum(len(ids) > max_prompt_length for ids in whole), images


def answered_tokens(
    prompts: Sequence[Prompt],
    answers: Sequence[Answer],
    tokenizer: "PreTrainedTokenizerBase",
    lengths: Lengths,
    thinking: Thinking | None = None,
    control_tokens: ControlText | None = None,
    vision: Vision | None = None,
) -> list[list[int]]:
    """The tokens of each prompt with its answer, for a reward model; only a finished answer ends its turn.

    A long prompt is cut as it was for the policy; where the answer's text has more tokens than were generated, the
    prompt loses more.
    """
    # A policy may think even if it was not trained to.
    renderer = Renderer.of(
        tokenizer, thinking or "keep", keeps_control=control_tokens == "keep", images=vision is not None
    )

    def seen(rendered: Rendered, prompt: Prompt) -> Rendered:
        return vision.expanded(rendered, messages_of(prompt.messages), prompt.name) if vision else rendered

    asked = [seen(prompt.rendered(renderer), prompt) for prompt in prompts]
    texts = [
        _answered(before.text, seen(prompt.rendered(renderer, answer.text), prompt), answer)
        for before, prompt, answer in zip(asked, prompts, answers, strict=True)
    ]
    found = []
    for before, text, each in zip(asked, texts, encode_rendered(encoder_of(tokenizer), texts), strict=True):
        prompt_length = each.tokens_before(common_prefix(before.text, text.text))
        over = max(prompt_length - lengths.max_prompt_length, len(each.ids) - lengths.max_length)
        found.append(without_beginning(each.ids, over, tokenizer.bos_token_id))
    return found


def _answered(before: str, rendered: Rendered, answer: Answer) -> Rendered:
    """A rendered conversation; where the answer was cut off, only up to its last word."""
    if answer.finished:
        return rendered
    whole = rendered.text
    text = answer.text.rstrip()
    start = common_prefix(before, whole)
    position = whole.rfind(text, start) if text else start
    if position < 0:  # the template rewrites the answer
        text = text.strip()
        position = max(whole.rfind(text, start), start)
    end = position + len(text)
    return Rendered(
        text=whole[:end], starts=[place for place in rendered.starts if place <= end],
        literal=[span for span in rendered.literal if span[1] <= end], spelled=rendered.spelled,
    )  # fmt: skip


def without_beginning(ids: Sequence[int], count: int, bos: int | None) -> list[int]:
    """Tokens without the first ``count``; a BOS is kept."""
    head = int(bos is not None and ids[:1] == [bos])
    return [*ids[:head], *ids[head + max(0, count) :]]
