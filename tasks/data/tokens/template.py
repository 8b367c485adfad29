"""A model's chat template: messages in, text out, the same text on every day."""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING

from lineage.errors import ConfigError, DataError, PipelineError
from tasks.data.schema import Message
from tasks.data.tokens import render_limits
from tasks.data.tokens.render_limits import Limited, OverTimeError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Tools = Sequence[Mapping[str, object]]
DATE = "26 Jul 2024"  # what the templates of Llama 3 write where they cannot ask for the day
_DAY = datetime(2024, 7, 26)
_WORD = "zq0qz"  # such as no template writes by itself
_REFUSED: dict[tuple[str, str], str] = {}  # templates that went beyond their limits, and what was said


@dataclass(frozen=True, kw_only=True)
class Template:
    """A chat template with the tokens that it names. Can be pickled.

    Args:
        name: of the model that it came with, for messages.
        plain, with_tools: for a conversation without and with tools; models may have one for each.
        in_blocks: it takes contents as lists of ``{"type": "text", "text": ...}``, as those of vision models do.
    """

    plain: str
    with_tools: str
    special_tokens: Mapping[str, object]
    in_blocks: bool = False
    name: str = ""

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
        template = Template(
            plain=_on_one_day(plain),
            with_tools=_on_one_day(with_tools),
            special_tokens=dict(tokenizer.special_tokens_map),
            name=tokenizer.name_or_path,
        )
        blocks = replace(template, in_blocks=True)
        return blocks if blocks.writes() and not template.writes() else template

    def writes(self) -> bool:
        """Whether it writes what a user says."""
        try:
            return _WORD in self.render([[{"role": "user", "content": _WORD}]], None, "")[0]
        except PipelineError:
            return False

    def render(
        self,
        conversations: Sequence[Sequence[Message]],
        tools: Tools | None,
        row_id: str,
        *,
        prompt: bool = False,
        thinks: bool = False,
    ) -> list[str]:
        """Conversations as texts.

        Args:
            row_id: of the row that they are of, for messages.
            prompt: up to where the assistant begins to speak.
            thinks: the assistant will think, which some templates must be told.
        Raises:
            DataError: the template refuses the messages.
            ConfigError: the template itself is wrong, or takes more time or memory than it may.
        """
        from jinja2 import TemplateError

        if (self.plain, self.with_tools) in _REFUSED:  # it is not tried twice
            raise ConfigError(_REFUSED[self.plain, self.with_tools])
        if self.in_blocks:
            conversations = [[_in_blocks(message) for message in messages] for messages in conversations]
        try:
            with Limited():
                try:
                    return self._texts(conversations, tools, prompt=prompt, thinks=thinks)
                except TypeError:  # a few, such as DeepSeek's, take the arguments of calls as JSON text alone
                    texts = [[_with_json_arguments(message) for message in messages] for messages in conversations]
                    return self._texts(texts, tools, prompt=prompt, thinks=thinks)
        except (OverTimeError, MemoryError) as error:
            time, memory = f"{render_limits.SECONDS} s of CPU time", f"{render_limits.MEMORY_BYTES // 2**20} MiB"
            limit = time if isinstance(error, OverTimeError) else memory
            refusal = (
                f"the chat template of {self.name or 'the model'} takes more than {limit} for one conversation"
                f"{f' (row {row_id})' if row_id else ''}, and was stopped; one that takes less is accepted; mend the "
                "template, or set chat_template=chatml on the sft stage"
            )
            _REFUSED[self.plain, self.with_tools] = refusal
            raise ConfigError(refusal) from error
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

    def _texts(
        self, conversations: Sequence[Sequence[Message]], tools: Tools | None, *, prompt: bool, thinks: bool
    ) -> list[str]:
        # What `apply_chat_template` calls, without its checks of what never changes: those take as long again.
        from transformers.utils.chat_template_utils import render_jinja_template

        template = self.plain if tools is None else self.with_tools
        texts: list[str] = render_jinja_template(
            conversations=conversations, tools=tools, chat_template=template, add_generation_prompt=prompt,
            **self._variables(template), **({"enable_thinking": True} if thinks else {}),
        )[0]  # fmt: skip
        return texts

    def _variables(self, template: str) -> Mapping[str, object]:
        if "date_string" in template:
            return {**self.special_tokens, "date_string": DATE}
        return self.special_tokens


def _on_one_day(template: str) -> str:
    """A template that writes the same day for ever, where it writes today's date.

    Raises:
        ConfigError: it cannot be told how it writes the date.
    """
    if "strftime_now" not in template:
        return template
    logger.info("chat_template=writes_a_date date=%r: the same in every run", DATE)
    dated = re.sub(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)", lambda call: repr(_DAY.strftime(call[2])), template)
    if "strftime_now(" in dated and "date_string" not in template:
        raise ConfigError(
            "the model's chat template writes today's date (strftime_now): the same rows would be other tokens "
            "tomorrow; one that names the form of the date, such as strftime_now('%d %b %Y'), or that takes it from "
            "date_string is accepted; mend the template, or set chat_template=chatml on the sft stage"
        )
    return dated


def _in_blocks(message: Message) -> Message:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _with_json_arguments(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    texts = [
        {
            **call,
            "function": {
                **call["function"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            },
        }
        for call in calls
    ]
    return {**message, "tool_calls": texts}
