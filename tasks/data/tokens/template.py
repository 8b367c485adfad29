"""A model's chat template: messages in, text out, the same text on every day."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lineage.errors import ConfigError, DataError
from tasks.data.schema import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Tools = Sequence[Mapping[str, object]]
DATE = "26 Jul 2024"  # what the templates of Llama 3 write where they cannot ask for the day


@dataclass(frozen=True, kw_only=True)
class Template:
    """A chat template with the tokens that it names. Can be pickled.

    Args:
        plain, with_tools: for a conversation without and with tools; models may have one for each.
    """

    plain: str
    with_tools: str
    special_tokens: Mapping[str, object]

    @staticmethod
    def of(tokenizer: "PreTrainedTokenizerBase") -> "Template":
        """That of a tokenizer which has one.

        Raises:
            ConfigError: it has several, and none of them is for all conversations.
        """
        try:
            plain, with_tools = tokenizer.get_chat_template(), tokenizer.get_chat_template(tools=[{}])
        except ValueError as error:
            raise ConfigError(
                f"the model has several chat templates and none of them is named default ({error}); one for all "
                "conversations is accepted; name it default, or set chat_template=chatml on the sft stage"
            ) from error
        if _asks_for_the_day(plain):
            logger.info("chat_template=writes_a_date date=%r: the same in every run", DATE)
        return Template(plain=plain, with_tools=with_tools, special_tokens=dict(tokenizer.special_tokens_map))

    def render(
        self, conversations: Sequence[Sequence[Message]], tools: Tools | None, row_id: str, *, prompt: bool = False
    ) -> list[str]:
        """Conversations as texts.

        Args:
            row_id: of the row that they are of, for messages.
            prompt: up to where the assistant begins to speak.
        Raises:
            DataError: the template refuses the messages.
            ConfigError: the template itself is wrong, or writes the date of the day.
        """
        from jinja2 import TemplateError

        # What `apply_chat_template` calls, without its checks of what never changes: those take as long again.
        from transformers.utils.chat_template_utils import render_jinja_template

        template = self.plain if tools is None else self.with_tools
        variables = self._variables(template)
        try:
            texts: list[str] = render_jinja_template(
                conversations=conversations, tools=tools, chat_template=template, add_generation_prompt=prompt,
                **variables,
            )[0]  # fmt: skip
        except Exception as error:  # a template is a program: it can raise whatever Python can
            if type(error) is TemplateError:  # its `raise_exception`
                raise DataError(
                    f"row {row_id}: the model's chat template refuses its messages: {error}; mend the row's roles and "
                    "their order"
                ) from error
            raise ConfigError(
                f"the model's chat template fails on row {row_id}: {type(error).__name__}: {error}; one that renders "
                "every row, or says itself which it refuses, is accepted; mend the template, or set "
                "chat_template=chatml on the sft stage"
            ) from error
        return texts

    def _variables(self, template: str) -> Mapping[str, object]:
        if "date_string" in template:
            return {**self.special_tokens, "date_string": DATE}
        if _asks_for_the_day(template):
            raise ConfigError(
                "the model's chat template writes today's date (strftime_now): the same rows would be other tokens "
                "tomorrow; one that takes its date from date_string is accepted; mend the template, or set "
                "chat_template=chatml on the sft stage"
            )
        return self.special_tokens


def _asks_for_the_day(template: str) -> bool:
    return "strftime_now" in template
