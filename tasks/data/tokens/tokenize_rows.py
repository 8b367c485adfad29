"""Prepared rows -> the tokens that trainers read; what is lost of a row is said in its fate."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lineage.errors import ConfigError, DataError
from tasks.data.kinds import IGNORED, ROW_KINDS, Row
from tasks.data.schema import messages_of, tools_of
from tasks.data.tokens.encoding import Encoded, Encoder, common_prefix, encoder_of
from tasks.data.tokens.fate import Fate, TokenRow
from tasks.data.tokens.length_policy import REFUSED, keep, keep_end
from tasks.data.tokens.rendering import Renderer, Turns
from tasks.data.tokens.skeleton import Span
from tasks.data.tokens.tokenization import Tokenization

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tasks.recipe import Input

NOTHING_TO_TRAIN = "nothing_to_train"
_NO_TEMPLATE = (
    "{model} has no chat template, and conversations cannot be rendered without one; set chat_template=chatml on the "
    "sft stage (the template then travels with its output)"
)


@dataclass(frozen=True, kw_only=True)
class RowTokenizer:
    """Makes tokens of rows, each for itself. Can be pickled.

    Args:
        renderer: None: the tokenizer has no chat template, or texts need none.
        bos: the token that begins every text of the model; None: it has none.
        adds_bos: the tokenizer puts it before a text by itself.
        end_of_document: the token after a text; None: the tokenizer has none.
    """

    tokenization: Tokenization
    encoder: Encoder
    renderer: Renderer | None
    bos: int | None
    adds_bos: bool
    end_of_document: int | None

    @staticmethod
    def of(tokenization: Tokenization, tokenizer: "PreTrainedTokenizerBase") -> "RowTokenizer":
        has_template = tokenizer.chat_template and ROW_KINDS[tokenization.kind].chat
        end = end_of_document(tokenizer)
        return RowTokenizer(
            tokenization=tokenization,
            encoder=encoder_of(tokenizer),
            renderer=Renderer.of(tokenizer, tokenization.thinking) if has_template else None,
            bos=tokenizer.bos_token_id,
            adds_bos=adds_bos(tokenizer),
            end_of_document=None if end is None else tokenizer.convert_tokens_to_ids(end),
        )

    def __call__(self, rows: Sequence[Row]) -> Iterator[TokenRow]:
        """The tokens of rows of the stated kind."""
        return ROW_KINDS[self.tokenization.kind].tokenize(self, rows)

    def texts(self, rows: Sequence[Row]) -> Iterator[TokenRow]:
        """``input_ids``: a text with what begins and ends it, nothing cut."""
        before = [self.bos] if self.adds_bos and self.bos is not None else []
        after = [] if self.end_of_document is None else [self.end_of_document]
        for row, encoded in zip(rows, self.encoder.encode([str(row["text"]) for row in rows]), strict=True):
            ids = [*before, *encoded.ids, *after]
            yield TokenRow(fate=Fate(row_id=str(row["row_id"]), length=len(ids)), columns={"input_ids": ids})

    def conversations(self, rows: Sequence[Row]) -> Iterator[TokenRow]:
        """``input_ids`` and ``labels``: every assistant turn is trained, and nothing else."""
        rendered = [self._render(row, ["messages"]) for row in rows]
        encoded = self.encoder.encode([turns.text for each in rendered for turns in each])
        for row, each in zip(rows, rendered, strict=True):
            made = [self._conversation(str(row["row_id"]), turns, next(encoded)) for turns in each]
            kept = [columns for fate, columns in made if not fate.dropped] or [made[0][1]]
            yield TokenRow(fate=joined([fate for fate, _ in made]), columns=kept[0], more=kept[1:])

    def _conversation(self, row_id: str, turns: Turns, whole: Encoded) -> tuple[Fate, dict[str, list[int]]]:
        fate = Fate(row_id=row_id, length=len(whole.ids))
        labels = [IGNORED] * len(whole.ids)
        places = [self._tokens_of(turns, span, whole, fate) for span in turns.spans]
        for start, end in places:
            labels[start:end] = whole.ids[start:end]
        kept = keep(self.tokenization, fate, places[0][0], self._head(whole.ids))
        columns = {"input_ids": kept.of(whole.ids), "labels": kept.of(labels)}
        predicted = columns["labels"][1:]
        fate.tokens, fate.trained = len(columns["labels"]), len(predicted) - predicted.count(IGNORED)
        if not fate.trained:
            fate.dropped = fate.dropped or NOTHING_TO_TRAIN
        return fate, columns

    def _tokens_of(self, turns: Turns, span: Span, whole: Encoded, fate: Fate) -> tuple[int, int]:
        """Where a turn begins and ends in the tokens; notes the token that ends it.

        Raises:
            ConfigError: the tokenizer takes that token apart.
        """
        assert self.renderer
        start, end = (whole.tokens_before(place) for place in span)
        stops = self.renderer.stops.ids
        if end < len(whole.ids) and whole.ids[end] in stops and (end == start or whole.ids[end - 1] not in stops):
            end += 1  # it stands for the blanks behind it too, and so ends later
        if end == start or whole.ids[end - 1] not in stops:
            raise ConfigError(
                f"row {fate.row_id}: the assistant's turn ends in {turns.text[span[0] : span[1]][-20:]!r}, and the "
                "tokenizer makes no token of its own of that, so the model would never learn to stop; a tokenizer that "
                "has the special tokens of its chat template is accepted; add them, or set chat_template=chatml on the "
                "sft stage"
            )
        fate.stops.add(whole.ids[end - 1])
        return start, end

    def preferences(self, rows: Sequence[Row]) -> Iterator[TokenRow]:
        """``prompt_ids``, ``chosen_ids`` and ``rejected_ids``: prompt and answer fit ``max_length``."""
        rendered = [self._render_answer(row, "prompt", side) for row in rows for side in ("chosen", "rejected")]
        encoded = self.encoder.encode([turns.text for turns in rendered])
        sides = zip(rendered, encoded, strict=True)
        for row in rows:
            fate = Fate(row_id=str(row["row_id"]), length=0)
            chosen, rejected = (self._answer(*next(sides), fate) for _ in ("chosen", "rejected"))
            yield self._pair(fate, chosen, rejected)

    def _answer(self, turns: Turns, whole: Encoded, fate: Fate) -> tuple[list[int], int]:
        """The tokens of a prompt with its answer, and where the answer begins."""
        places = [self._tokens_of(turns, span, whole, fate) for span in turns.spans]
        return whole.ids[: places[-1][1]], places[0][0]

    def _pair(self, fate: Fate, chosen: tuple[list[int], int], rejected: tuple[list[int], int]) -> TokenRow:
        """A pair from the tokens of each side and the place where its answer begins; the prompt is what both share."""
        fate.length = max(len(chosen[0]), len(rejected[0]))
        start = min(chosen[1], rejected[1], common_prefix(chosen[0], rejected[0]))
        kept = keep(self.tokenization, fate, start, self._head(chosen[0]))
        left, right = kept.of(chosen[0]), kept.of(rejected[0])
        start -= kept.removed
        prompt, good, bad = left[:start], left[start:], right[start:]
        fate.tokens, fate.trained = 2 * len(prompt) + len(good) + len(bad), len(good) + len(bad)
        if not (good and bad):
            fate.dropped = fate.dropped or NOTHING_TO_TRAIN
        elif good == bad:
            fate.dropped = fate.dropped or "equal_after_the_cut"
        return TokenRow(fate=fate, columns={"prompt_ids": prompt, "chosen_ids": good, "rejected_ids": bad})

    def unpaired(self, rows: Sequence[Row]) -> Iterator[TokenRow]:
        """``prompt_ids``, ``completion_ids`` and ``label``: prompt and answer fit ``max_length``."""
        rendered = [self._render_answer(row, "prompt", "completion") for row in rows]
        encoded = self.encoder.encode([turns.text for turns in rendered])
        for row, turns, whole in zip(rows, rendered, encoded, strict=True):
            fate = Fate(row_id=str(row["row_id"]), length=0, label=bool(row["label"]))
            told, start = self._answer(turns, whole, fate)
            fate.length = len(told)
            kept = keep(self.tokenization, fate, start, self._head(told))
            ids = kept.of(told)
            prompt, answer = ids[: start - kept.removed], ids[start - kept.removed :]
            fate.tokens, fate.trained = len(ids), len(answer)
            if not answer:
                fate.dropped = fate.dropped or NOTHING_TO_TRAIN
            yield TokenRow(
                fate=fate, columns={"prompt_ids": prompt, "completion_ids": answer}, rest={"label": fate.label}
            )  # fmt: skip

    def prompts(self, rows: Sequence[Row]) -> Iterator[TokenRow]:
        """``prompt_ids`` up to where the assistant begins to speak, its ``prompt`` and ``columns`` as JSON text.

        A prompt of more than ``max_prompt_length`` tokens, or else ``max_length``, keeps its last ones.
        """
        renderer, texts = self._required_renderer(), list[str]()
        for row in rows:
            messages, tools = messages_of(row["prompt"]), tools_of(row)
            texts.append(renderer.text(messages, tools, row_id=str(row["row_id"]), prompt=True))
        for row, whole in zip(rows, self.encoder.encode(texts), strict=True):
            fate = Fate(row_id=str(row["row_id"]), length=len(whole.ids))
            ids = keep_end(self.tokenization, fate, self._head(whole.ids)).of(whole.ids)
            fate.tokens = len(ids)
            prompt = json.dumps(messages_of(row["prompt"]), ensure_ascii=False)
            yield TokenRow(
                fate=fate, columns={"prompt_ids": ids}, rest={"prompt": prompt, "columns": row.get("columns")}
            )  # fmt: skip

    def _required_renderer(self) -> Renderer:
        if self.renderer is None:
            raise ConfigError(_NO_TEMPLATE.format(model="the model"))
        return self.renderer

    def _render_answer(self, row: Row, *columns: str) -> Turns:
        """A prompt and its answer, in one text.

        Raises:
            DataError: the answer is of several turns, and no text has them all.
        """
        turns = self._render(row, columns)
        if len(turns) > 1:
            raise DataError(
                f"row {row['row_id']}: its {columns[-1]} has several turns of the assistant, and the model's chat "
                "template renders the earlier ones otherwise than the last one; answers of one turn, or of turns and "
                "calls that the template renders in one way, are accepted; split the row"
            )
        return turns[0]

    def _render(self, row: Row, columns: Sequence[str]) -> list[Turns]:
        """The messages of columns, one after the other; the assistant is trained in the last column."""
        renderer = self._required_renderer()
        *before, messages = (messages_of(row[column]) for column in columns)
        prompt = [message for part in before for message in part]
        if not any(message["role"] == "assistant" for message in messages):
            raise DataError(
                f"row {row['row_id']}: the assistant says nothing in its {columns[-1]}; at least one message of the "
                "assistant is accepted; add the answer, or remove the row"
            )
        return renderer.turns([*prompt, *messages], tools_of(row), str(row["row_id"]), first=len(prompt))

    def _head(self, ids: Sequence[int]) -> int:
        """How many first tokens stay whatever is cut."""
        return int(self.bos is not None and ids[0] == self.bos)


def joined(fates: Sequence[Fate]) -> Fate:
    """The fate of a row from those of its examples: it is dropped where all of them are, and cut where one is."""
    first, *others = fates
    if not others:
        return first
    kept = [fate for fate in fates if not fate.dropped]
    refused = next((fate for fate in fates if fate.dropped == REFUSED), None)
    return Fate(
        row_id=first.row_id,
        length=max(fate.length for fate in fates),
        tokens=sum(fate.tokens for fate in kept),
        trained=sum(fate.trained for fate in kept),
        cut=any(fate.cut or fate.dropped for fate in fates),
        prompt_cut=any(fate.prompt_cut for fate in kept),
        dropped=REFUSED if refused else None if kept else first.dropped,
        stops=set().union(*(fate.stops for fate in fates)),
        num_examples=len(kept),
    )


def adds_bos(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Whether a tokenizer puts its BOS before a text, as those of Gemma, Llama and Mistral do."""
    return tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id


def end_of_document(tokenizer: "PreTrainedTokenizerBase") -> str | None:
    """``<|endoftext|>`` where the vocabulary has it (a chat model's eos ends a turn, not a document), else eos."""
    if "<|endoftext|>" in tokenizer.get_vocab():
        return "<|endoftext|>"
    return None if tokenizer.eos_token is None else str(tokenizer.eos_token)


def require_chat_template(tokenizer: "PreTrainedTokenizerBase", policy: "Input") -> None:
    """Refuses a model that cannot render a conversation."""
    if tokenizer.chat_template is None:
        raise ConfigError(_NO_TEMPLATE.format(model=f"the model of {policy.name!r}"))
