"""A conversation as one text, through the model's chat template, with the borders of what the assistant says."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lineage.errors import ConfigError, DataError, PipelineError
from tasks.data.schema import Message
from tasks.data.tokens.losses import form_of, lost
from tasks.data.tokens.skeleton import Skeleton
from tasks.data.tokens.template import Template, Tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]


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
    """A chat template, and what is known of it by now. Can be pickled."""

    template: Template
    _skeletons: dict[tuple[object, ...], Skeleton | None] = field(default_factory=dict)

    @staticmethod
    def of(tokenizer: "PreTrainedTokenizerBase") -> "Renderer":
        return Renderer(template=Template.of(tokenizer))

    def turns(self, messages: Sequence[Message], tools: Tools | None, row_id: str) -> Turns:
        """Renders a conversation.

        Raises:
            ConfigError: the template renders the first messages otherwise when more follow, so that no border can be
                trusted; or it leaves out something of conversations of this form; or it cannot be used.
            DataError: the template refuses the messages, or nothing precedes an answer.
        """
        if messages[0]["role"] == "assistant":
            raise DataError(
                f"row {row_id}: its first message is of the assistant; a prompt before each answer is accepted; "
                "add the prompt, or remove the message"
            )
        roles = tuple(str(message["role"]) for message in messages)
        # Only where contents are all that is said can one row's pieces be those of another.
        is_plain = tools is None and "tool" not in roles and all(len(message) == 2 for message in messages)
        form = roles if is_plain else form_of(messages, tools)
        skeleton = self._skeletons.get(form)
        if skeleton:
            text = self.text(messages, row_id=row_id)
            spans = skeleton.spans(text, [str(message["content"]) for message in messages])
            if spans is not None:
                return Turns(text=text, spans=spans)
        turns = self._proven(messages, tools, row_id)
        if form not in self._skeletons:
            self._require_whole(messages, tools, row_id, "chatml" if is_plain else "hermes")
            self._skeletons[form] = self._skeleton(roles) if is_plain else None
        return turns

    def _proven(self, messages: Sequence[Message], tools: Tools | None, row_id: str) -> Turns:
        """Each assistant turn's borders, from renderings that end there: as many as there are messages."""
        answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        befores = self.template.render([messages[:place] for place in answers], tools, row_id, prompt=True)
        *uptos, whole = self.template.render([*(messages[: at + 1] for at in answers), messages], tools, row_id)
        for before, upto in zip(befores, uptos, strict=True):
            if not (whole.startswith(upto) and upto.startswith(before)):
                raise ConfigError(
                    f"the model's chat template is not prefix-stable: on row {row_id} it rewrites earlier turns when "
                    f"others follow (...{before[-60:]!r} does not begin the whole), so the trained tokens cannot be "
                    "told apart; rows that are split into single-turn ones are accepted, and templates that render "
                    "each turn alone; split the rows, or set chat_template=chatml on the sft stage"
                )
        return Turns(text=whole, spans=[(len(b), len(u)) for b, u in zip(befores, uptos, strict=True)])

    def _skeleton(self, roles: tuple[str, ...]) -> Skeleton | None:
        """What conversations of these roles have in common; None where that cannot be told."""
        contents = Skeleton.slots(len(roles))
        messages: list[Message] = [{"role": role, "content": slot} for role, slot in zip(roles, contents, strict=True)]
        try:
            turns = self._proven(messages, None, "")
        except PipelineError:
            return None
        return Skeleton.of(turns.text, turns.spans, contents)

    def _require_whole(self, messages: Sequence[Message], tools: Tools | None, row_id: str, instead: str) -> None:
        missing = lost(self.template, messages, tools, row_id)
        if missing:
            raise ConfigError(
                f"the model's chat template leaves out {missing} on row {row_id}; a template that renders all that a "
                f"row says, tools and calls included, is accepted; set chat_template={instead} on the sft stage, or "
                "start from a model whose template does"
            )

    def text(
        self, messages: Sequence[Message], tools: Tools | None = None, *, row_id: str = "", prompt: bool = False
    ) -> str:
        """A conversation as text.

        Args:
            row_id: of its row, for messages.
            prompt: up to where the assistant begins to speak.
        Raises:
            ConfigError, DataError: as ``Template.render``.
        """
        return self.template.render([messages], tools, row_id, prompt=prompt)[0]
