"""Which tokens of a conversation are trained: what the assistant says, and nothing else."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lineage.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, str]
IGNORED = -100  # label of a token that is not trained


@dataclass(frozen=True, kw_only=True)
class Turns:
    """A rendered conversation.

    Args:
        text: all of it.
        spans: per assistant turn, the text before it and the text up to its end; both begin ``text``.
    """

    text: str
    spans: Sequence[tuple[str, str]]


def render(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], row_id: str) -> Turns:
    """Renders a conversation through the chat template, with the border of every assistant turn.

    Raises:
        ConfigError: the template renders the first messages otherwise when more follow, so that no border
            can be trusted.
        DataError: the template refuses the messages.
    """
    from jinja2 import TemplateError

    def text(count: int, *, prompt: bool = False) -> str:
        part = list(messages[:count])
        return str(tokenizer.apply_chat_template(part, tokenize=False, add_generation_prompt=prompt))

    try:
        whole, last = text(len(messages)), len(messages) - 1
        turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        spans = [(text(place, prompt=True), whole if place == last else text(place + 1)) for place in turns]
    except TemplateError as error:
        raise DataError(
            f"row {row_id}: the model's chat template refuses its messages: {error}; mend the row's roles and "
            "their order"
        ) from error
    for before, upto in spans:
        if not (whole.startswith(upto) and upto.startswith(before)):
            raise ConfigError(
                f"the model's chat template is not prefix-stable: on row {row_id} it renders the first messages "
                f"differently when others follow (...{before[-60:]!r} does not begin the whole), so the trained "
                "tokens cannot be told apart; use a template that renders each turn alone, such as "
                "chat_template=chatml of the sft stage"
            )
    return Turns(text=whole, spans=spans)


def tokenize(tokenizer: "PreTrainedTokenizerBase", texts: Iterable[str]) -> dict[str, list[int]]:
    """Tokens of each distinct text, in one call: as fast as many workers on all but huge data."""
    distinct = list(dict.fromkeys(texts))
    if not distinct:
        return {}
    return dict(zip(distinct, tokenizer(distinct, add_special_tokens=False)["input_ids"], strict=True))


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many first tokens two sequences share.

    A token that spans the border of a turn belongs to the turn, as in TRL.
    """
    for place, (left, right) in enumerate(zip(first, second, strict=False)):
        if left != right:
            return place
    return min(len(first), len(second))


def labels_of(turns: Turns, tokens: dict[str, list[int]]) -> list[int]:
    """Labels of ``turns.text``: its tokens where the assistant speaks (the end of turn included), else -100."""
    whole = tokens[turns.text]
    labels = [IGNORED] * len(whole)
    for before, upto in turns.spans:
        start, end = common_prefix(tokens[before], whole), common_prefix(tokens[upto], whole)
        labels[start:end] = whole[start:end]
    return labels
