"""A conversation as one text, through the model's chat template, with the borders of what the assistant says."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lineage.errors import ConfigError, DataError
from tasks.data.schema import Message
from tasks.data.tokens.skeleton import Skeleton

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]
Tools = Sequence[Mapping[str, object]]


@dataclass(frozen=True, kw_only=True)
class Turns:
    """A rendered conversation.

    Args:
        spans: per assistant turn, the places in ``text`` where it begins and where it ends, its end token included.
    """

    text: str
    spans: Sequence[Span]


@dataclass(kw_only=True)
class Renderer:
    """A chat template with the tokens that it names. Can be pickled.

    Args:
        template, tools_template: for a conversation without and with tools; models may have one for each.
    """

    template: str
    tools_template: str
    special_tokens: Mapping[str, object]
    _skeletons: dict[tuple[str, ...], Skeleton | None] = field(default_factory=dict)

    @staticmethod
    def of(tokenizer: "PreTrainedTokenizerBase") -> "Renderer":
        return Renderer(
            template=tokenizer.get_chat_template(),
            tools_template=tokenizer.get_chat_template(tools=[{}]),
            special_tokens=dict(tokenizer.special_tokens_map),
        )

    def turns(self, messages: Sequence[Message], tools: Tools | None, row_id: str) -> Turns:
        """Renders a conversation.

        Raises:
            ConfigError: the template renders the first messages otherwise when more follow, so that no border can be
                trusted; or it leaves out tools or their calls.
            DataError: the template refuses the messages, or nothing precedes an answer.
        """
        from jinja2 import TemplateError

        try:
            return self._turns(messages, tools, row_id)
        except TemplateError as error:
            raise DataError(
                f"row {row_id}: the model's chat template refuses its messages: {error}; mend the row's roles and "
                "their order"
            ) from error

    def _turns(self, messages: Sequence[Message], tools: Tools | None, row_id: str) -> Turns:
        if messages[0]["role"] == "assistant":
            raise DataError(
                f"row {row_id}: its first message is of the assistant; a prompt before each answer is accepted; "
                "add the prompt, or remove the message"
            )
        if tools is not None or any(len(message) > 2 or message["role"] == "tool" for message in messages):
            turns = self._proven(messages, tools, row_id)
            self._require_tools(turns, messages, tools, row_id)
            return turns
        roles = tuple(str(message["role"]) for message in messages)
        skeleton = self._skeletons.get(roles)
        if skeleton:
            text = self.text(messages)
            spans = skeleton.spans(text, [str(message["content"]) for message in messages])
            if spans is not None:
                return Turns(text=text, spans=spans)
        turns = self._proven(messages, tools, row_id)
        if roles not in self._skeletons:
            self._skeletons[roles] = self._skeleton(roles)
        return turns

    def _proven(self, messages: Sequence[Message], tools: Tools | None, row_id: str) -> Turns:
        """Each assistant turn's borders, from renderings that end there: as many as there are messages."""
        answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        befores = self._render([messages[:place] for place in answers], tools, prompt=True)
        *uptos, whole = self._render([*(messages[: place + 1] for place in answers), messages], tools)
        for before, upto in zip(befores, uptos, strict=True):
            if not (whole.startswith(upto) and upto.startswith(before)):
                raise ConfigError(
                    f"the model's chat template is not prefix-stable: on row {row_id} it renders the first messages "
                    f"differently when others follow (...{before[-60:]!r} does not begin the whole), so the trained "
                    "tokens cannot be told apart; use a template that renders each turn alone, such as "
                    "chat_template=chatml of the sft stage"
                )
        return Turns(text=whole, spans=[(len(b), len(u)) for b, u in zip(befores, uptos, strict=True)])

    def _skeleton(self, roles: tuple[str, ...]) -> Skeleton | None:
        """What conversations of these roles have in common; None where that cannot be told."""
        from jinja2 import TemplateError

        contents = Skeleton.slots(len(roles))
        messages: list[Message] = [{"role": role, "content": slot} for role, slot in zip(roles, contents, strict=True)]
        try:
            turns = self._proven(messages, None, "")
        except (TemplateError, ConfigError):
            return None
        return Skeleton.of(turns.text, turns.spans, contents)

    def _require_tools(self, turns: Turns, messages: Sequence[Message], tools: Tools | None, row_id: str) -> None:
        """That tools, calls and results are in the text: a template that knows none leaves them out in silence."""
        missing = []
        if tools and self.text(messages) == turns.text:
            missing.append("the tools")
        other = [{**each, "content": f"{each['content']}."} if each["role"] == "tool" else each for each in messages]
        if other != messages and self.text(other, tools) == turns.text:
            missing.append("what a tool answers")
        answers = (message for message in messages if message["role"] == "assistant")
        for message, (start, end) in zip(answers, turns.spans, strict=True):
            missing += [f"the call of {name}" for name in _called(message) if name not in turns.text[start:end]]
        if missing:
            raise ConfigError(
                f"the model's chat template leaves out {missing[0]} on row {row_id}; a template that renders tools "
                "and their calls is accepted; set chat_template=hermes on the sft stage, or start from a model whose "
                "template has them"
            )

    def text(self, messages: Sequence[Message], tools: Tools | None = None, *, prompt: bool = False) -> str:
        """A conversation as text.

        Args:
            prompt: up to where the assistant begins to speak.
        """
        return self._render([messages], tools, prompt=prompt)[0]

    def _render(
        self, conversations: Sequence[Sequence[Message]], tools: Tools | None, *, prompt: bool = False
    ) -> list[str]:
        # What `apply_chat_template` calls, without its checks of what never changes: those take as long again.
        from transformers.utils.chat_template_utils import render_jinja_template

        texts: list[str] = render_jinja_template(
            conversations=conversations,
            tools=tools,
            chat_template=self.template if tools is None else self.tools_template,
            add_generation_prompt=prompt,
            **self.special_tokens,
        )[0]
        return texts


def _called(message: Message) -> list[str]:
    """Names of the functions that a message calls."""
    calls = message.get("tool_calls", [])
    assert isinstance(calls, list)
    return [str(call["function"]["name"]) for call in calls]
