"""What decides the tokens of prepared rows, beside the rows and the tokenizer."""

from dataclasses import dataclass
from typing import Literal

from lineage.artifact import Kind
from lineage.errors import ConfigError
from tasks.chat_template import check_name
from tasks.data.tokens.template import Thinking

TooLong = Literal["cut_answer", "cut_prompt", "drop", "refuse"]
Packing = Literal["best_fit"]


@dataclass(frozen=True, kw_only=True)
class Tokenization:
    """How a method has its rows made into tokens.

    Args:
        kind: of the rows.
        max_length: tokens per row, prompt and answer; per chunk, for text.
        too_long: what becomes of a longer row: its end is cut off; the beginning of its prompt is; it is left out; or
            it is an error. None: ``cut_answer``, and of prompts, which have no answer yet, ``cut_prompt``.
        max_prompt_length: a longer prompt keeps its last tokens; of a conversation, the prompt is what precedes the
            first answer.
        packing: rows share the ``max_length`` of one example; None: each is one.
        thinking: whether what the assistant thinks is trained; None: as the chat template has it, which must not lose
            it.
        chat_template: one of ``tasks.chat_template``; None: the tokenizer's own.
    """

    kind: Kind
    max_length: int
    too_long: TooLong | None = None
    max_prompt_length: int | None = None
    packing: Packing | None = None
    chat_template: str | None = None
    thinking: Thinking | None = None

    def __post_init__(self) -> None:
        check_name(self.chat_template)
        if self.max_prompt_length is not None and self.max_prompt_length >= self.max_length:
            raise ConfigError(
                f"max_prompt_length={self.max_prompt_length} leaves no room for an answer in "
                f"max_length={self.max_length}; a lower one is accepted"
            )
        if self.kind == Kind.PROMPTS and self.too_long == "cut_answer":
            raise ConfigError(
                "too_long=cut_answer: prompts have no answer yet; cut_prompt (the default), drop and refuse are "
                "accepted; state one of them"
            )
