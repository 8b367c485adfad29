"""Prepared rows -> the tokens that trainers read; what is lost of a row is said in its fate."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lineage.artifact import Kind
from lineage.errors import ConfigError, DataError
from tasks.data.schema import messages_of, tools_of
from tasks.data.tokens.encoding import Encoded, Encoder, common_prefix, encoder_of
from tasks.data.tokens.fate import Fate
from tasks.data.tokens.length_policy import REFUSED, keep
from tasks.data.tokens.rendering import Renderer, Turns
from tasks.data.tokens.skeleton import Span
from tasks.data.tokens.tokenization import Tokenization

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tasks.method import Input

Row = Mapping[str, object]
Columns = dict[str, list[int]]
IGNORED = -100  # label of a token that is not trained
NOTHING_TO_TRAIN = "nothing_to_train"
_NO_TEMPLATE = (
    "{model} has no chat template, and conversations cannot be rendered without one; set chat_template=chatml on the "
    "sft stage (the template then travels with its output)"
)


@dataclass(frozen=True, kw_only=True)
class TokenRow:
    """A row as a trainer reads it, unless its fate is to be left out.

    Args:
        examples: usually one; of a conversation whose template renders earlier turns otherwise, one per turn.
    """

    fate: Fate
    examples: Sequence[Columns]

    @property
    def columns(self) -> Columns:
        """Of a row that is one example."""
        (columns,) = self.examples
        return columns


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
        has_template = tokenizer.chat_template and tokenization.kind != Kind.TEXT
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
        """Conversations have ``input_ids`` and ``labels``: every assistant turn is trained, and nothing else.

        Pairs have ``prompt_ids``, ``chosen_ids`` and ``rejected_ids``: prompt and answer fit ``max_length``. A text has
        ``input_ids``, its beginning and end included and nothing cut.
        """
        kinds = {
            Kind.TEXT: self._texts, Kind.CONVERSATIONS: self._conversations, Kind.PREFERENCES: self._preferences,
        }  # fmt: skip
        return kinds[self.tokenization.kind](rows)

    def _texts(self, rows: Sequence[Row]) -> Iterator[TokenRow]:
        before = [self.bos] if self.adds_bos and self.bos is not None else []
        after = [] if self.end_of_document is None else [self.end_of_document]
        for row, encoded in zip(rows, self.encoder.encode([str(row["text"]) for row in rows]), strict=True):
            ids = [*before, *encoded.ids, *after]
            yield TokenRow(fate=Fate(row_id=str(row["row_id"]), length=len(ids)), examples=[{"input_ids": ids}])

    def _conversations(self, rows: Sequence[Row]) -> Iterator[TokenRow]:
        rendered = [self._render(row, ["messages"]) for row in rows]
        encoded = self.encoder.encode([turns.text for each in rendered for turns in each])
        for row, each in zip(rows, rendered, strict=True):
            made = [self._conversation(str(row["row_id"]), turns, next(encoded)) for turns in each]
            kept = [columns for fate, columns in made if not fate.dropped]
            yield TokenRow(fate=joined([fate for fate, _ in made]), examples=kept or [made[0][1]])

    def _conversation(self, row_id: str, turns: Turns, whole: Encoded) -> tuple[Fate, Columns]:
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

    def _preferences(self, rows: Sequence[Row]) -> Iterator[TokenRow]:
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
        return TokenRow(fate=fate, examples=[{"prompt_ids": prompt, "chosen_ids": good, "rejected_ids": bad}])

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
        if self.renderer is None:
            raise ConfigError(_NO_TEMPLATE.format(model="the model"))
        *before, messages = (messages_of(row[column]) for column in columns)
        prompt = [message for part in before for message in part]
        if not any(message["role"] == "assistant" for message in messages):
            raise DataError(
                f"row {row['row_id']}: the assistant says nothing in its {columns[-1]}; at least one message of the "
                "assistant is accepted; add the answer, or remove the row"
            )
        return self.renderer.turns([*prompt, *messages], tools_of(row), str(row["row_id"]), first=len(prompt))

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
