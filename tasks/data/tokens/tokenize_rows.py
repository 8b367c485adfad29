"""Prepared rows -> the tokens that trainers read; what is lost of a row is said in its fate."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lineage.errors import ConfigError, DataError
from tasks.data.kinds import IGNORED, ROW_KINDS, Row
from tasks.data.schema import messages_of, tools_of
from tasks.data.tokens.encoding import Encoder, common_prefix, encoder_of
from tasks.data.tokens.fate import Fate, TokenRow
from tasks.data.tokens.length_policy import keep, keep_end
from tasks.data.tokens.rendering import Renderer, Turns
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
        end_of_document: the token after a text.
    """

    tokenization: Tokenization
    encoder: Encoder
    renderer: Renderer | None
    bos: int | None
    end_of_document: int

    @staticmethod
    def of(tokenization: Tokenization, tokenizer: "PreTrainedTokenizerBase") -> "RowTokenizer":
        return RowTokenizer(
            tokenization=tokenization,
            encoder=encoder_of(tokenizer),
            renderer=Renderer.of(tokenizer) if tokenizer.chat_template and ROW_KINDS[tokenization.kind].chat else None,
            bos=tokenizer.bos_token_id,
            end_of_document=tokenizer.convert_tokens_to_ids(end_of_document(tokenizer)),
        )

    def __call__(self, rows: Sequence[Row]) -> Iterator[TokenRow]:
        """The tokens of rows of the stated kind."""
        return ROW_KINDS[self.tokenization.kind].tokenize(self, rows)

    def texts(self, rows: Sequence[Row]) -> Iterator[TokenRow]:
        """``input_ids``: a text with its end, nothing cut."""
        for row, encoded in zip(rows, self.encoder.encode([str(row["text"]) for row in rows]), strict=True):
            ids = [*encoded.ids, self.end_of_document]
            yield TokenRow(fate=Fate(row_id=str(row["row_id"]), length=len(ids)), columns={"input_ids": ids})

    def conversations(self, rows: Sequence[Row]) -> Iterator[TokenRow]:
        """``input_ids`` and ``labels``: every assistant turn is trained, and nothing else."""
        rendered = [self._render(row, "messages") for row in rows]
        encoded = self.encoder.encode([turns.text for turns in rendered])
        for row, turns, whole in zip(rows, rendered, encoded, strict=True):
            places = [[whole.tokens_before(place) for place in span] for span in turns.spans]
            labels = [IGNORED] * len(whole.ids)
            for start, end in places:
                labels[start:end] = whole.ids[start:end]
            fate = Fate(row_id=str(row["row_id"]), length=len(whole.ids))
            kept = keep(self.tokenization, fate, places[0][0], self._head(whole.ids))
            columns = {"input_ids": kept.of(whole.ids), "labels": kept.of(labels)}
            predicted = columns["labels"][1:]
            fate.tokens, fate.trained = len(columns["labels"]), len(predicted) - predicted.count(IGNORED)
            if not fate.trained:
                fate.dropped = fate.dropped or NOTHING_TO_TRAIN
            yield TokenRow(fate=fate, columns=columns)

    def preferences(self, rows: Sequence[Row]) -> Iterator[TokenRow]:
        """``prompt_ids``, ``chosen_ids`` and ``rejected_ids``: prompt and answer fit ``max_length``."""
        rendered = [self._render(row, "prompt", side) for row in rows for side in ("chosen", "rejected")]
        encoded = self.encoder.encode([turns.text for turns in rendered])
        sides = zip(rendered, encoded, strict=True)
        for row in rows:
            answers = sum(message["role"] == "assistant" for message in messages_of(row["prompt"]))
            chosen, rejected = (
                (whole.ids, whole.tokens_before(turns.spans[answers][0])) for turns, whole in (next(sides), next(sides))
            )
            yield self._pair(str(row["row_id"]), chosen, rejected)

    def _pair(self, row_id: str, chosen: tuple[list[int], int], rejected: tuple[list[int], int]) -> TokenRow:
        """A pair from the tokens of each side and the place where its answer begins; the prompt is what both share."""
        fate = Fate(row_id=row_id, length=max(len(chosen[0]), len(rejected[0])))
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
        rendered = [self._render(row, "prompt", "completion") for row in rows]
        encoded = self.encoder.encode([turns.text for turns in rendered])
        for row, turns, whole in zip(rows, rendered, encoded, strict=True):
            answers = sum(message["role"] == "assistant" for message in messages_of(row["prompt"]))
            start, label = whole.tokens_before(turns.spans[answers][0]), bool(row["label"])
            fate = Fate(row_id=str(row["row_id"]), length=len(whole.ids), label=label)
            kept = keep(self.tokenization, fate, start, self._head(whole.ids))
            ids = kept.of(whole.ids)
            prompt, answer = ids[: start - kept.removed], ids[start - kept.removed :]
            fate.tokens, fate.trained = len(ids), len(answer)
            if not answer:
                fate.dropped = fate.dropped or NOTHING_TO_TRAIN
            yield TokenRow(
                fate=fate, columns={"prompt_ids": prompt, "completion_ids": answer}, rest={"label": label}
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

    def _render(self, row: Row, *columns: str) -> Turns:
        renderer = self._required_renderer()
        messages = [message for column in columns for message in messages_of(row[column])]
        if not any(message["role"] == "assistant" for message in messages_of(row[columns[-1]])):
            raise DataError(
                f"row {row['row_id']}: the assistant says nothing in its {columns[-1]}; at least one message of the "
                "assistant is accepted; add the answer, or remove the row"
            )
        return renderer.turns(messages, tools_of(row), str(row["row_id"]))

    def _head(self, ids: Sequence[int]) -> int:
        """How many first tokens stay whatever is cut."""
        return int(self.bos is not None and ids[0] == self.bos)


def end_of_document(tokenizer: "PreTrainedTokenizerBase") -> str:
    """``<|endoftext|>`` where the vocabulary has it (a chat model's eos ends a turn, not a document), else eos."""
    return "<|endoftext|>" if "<|endoftext|>" in tokenizer.get_vocab() else str(tokenizer.eos_token)


def require_chat_template(tokenizer: "PreTrainedTokenizerBase", policy: "Input") -> None:
    """Refuses a model that cannot render a conversation."""
    if tokenizer.chat_template is None:
        raise ConfigError(_NO_TEMPLATE.format(model=f"the model of {policy.name!r}"))
