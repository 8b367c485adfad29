"""A conversation as text, through the model's chat template, with the borders of what the assistant says.

Each assistant turn is trained after the very prompt that generation of it starts from: the template's rendering of the
messages before it, up to where the assistant begins to speak. Where that prompt continues the rendering of the turn
before, both stand in one text. Where it does not, since the template renders earlier turns otherwise than the last one
(Qwen 3, DeepSeek R1 and gpt-oss drop their thinking), the turn is a text of its own.

What a template leaves out of a form of conversation is found once, and cached.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lineage.errors import ConfigError, DataError, PipelineError
from tasks.data.kinds import Message
from tasks.data.tokens import template as thinking
from tasks.data.tokens.encoding import common_prefix
from tasks.data.tokens.template import StopTokens, Template, Thinking, Tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SAID = {"system": "what the system message says", "tool": "what a tool answers"}
_FIRST_NUMBER = 7_000_000_001  # such as no template writes by itself


@dataclass(frozen=True, kw_only=True)
class Marks:
    """Words and numbers that no template writes by itself, takes apart or escapes.

    Args:
        stands_for: mark -> what stands in its place.
    """

    stands_for: dict[str, str] = field(default_factory=dict)

    def word(self, stands_for: str) -> str:
        mark = f"zq{len(self.stands_for)}qz"
        self.stands_for[mark] = stands_for
        return mark

    def number(self, stands_for: str) -> int:
        mark = _FIRST_NUMBER + len(self.stands_for)
        self.stands_for[str(mark)] = stands_for
        return mark

    def lost(self, text: str) -> str | None:
        """The first thing whose mark a text lacks."""
        return next((stands_for for mark, stands_for in self.stands_for.items() if mark not in text), None)


def form_of(messages: Sequence[Message], tools: Tools | None) -> tuple[object, ...]:
    """What decides which parts of a conversation a template looks at: roles, calls, and where nothing is said."""
    turns = (
        (str(each["role"]), bool(each["content"]), tuple(bool(call["function"]["arguments"]) for call in _calls(each)))
        for each in messages
    )
    return (tools and len(tools), *turns)


def lost(template: Template, messages: Sequence[Message], tools: Tools | None, row_id: str) -> str | None:
    """Something that conversations of this form say, and the template does not; None: it says everything."""
    marks = Marks()
    marked = [_message(message, marks) for message in messages]
    marked_tools = None if tools is None else [_tool(tool, marks) for tool in tools]
    try:
        (text,) = template.render([marked], marked_tools, row_id)
    except PipelineError:  # it takes the row and not our words: nothing is known
        return None
    return marks.lost(text)


def _calls(message: Message) -> list[dict[str, dict[str, object]]]:
    calls = message.get("tool_calls", [])
    assert isinstance(calls, list)
    return calls


def _message(message: Message, marks: Marks) -> Message:
    marked, calls = dict(message), _calls(message)
    if message["content"] or not calls:
        said = _SAID.get(str(message["role"]), f"what the {message['role']} says")
        marked["content"] = marks.word(f"{said} beside a call" if calls else said)
    if calls:
        marked["tool_calls"] = [{**call, "function": _function(call["function"], marks)} for call in calls]
    return marked


def _function(called: Mapping[str, object], marks: Marks) -> dict[str, object]:
    name = marks.word(f"the call of {called['name']}")
    arguments = _argument(called["arguments"], f"an argument of the call of {called['name']}", marks)
    return {**called, "name": name, "arguments": arguments}


def _argument(value: object, stands_for: str, marks: Marks) -> object:
    match value:
        case str():
            return marks.word(stands_for)
        case int() if not isinstance(value, bool):
            return marks.number(stands_for)
        case list():
            return [_argument(each, stands_for, marks) for each in value]
        case dict():
            return {name: _argument(each, stands_for, marks) for name, each in value.items()}
        case _:
            return value


def _tool(tool: Mapping[str, object], marks: Marks) -> Mapping[str, object]:
    function = tool["function"]
    assert isinstance(function, Mapping)
    return {**tool, "function": {**function, "name": marks.word(f"the tool {function['name']}")}}


Span = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class CachedTemplate:
    """The template's text for conversations of one sequence of roles.

    Args:
        written: the template's text before, between and after the contents: one more than there are messages.
        pieces: the same for the trained text, which may end elsewhere.
        borders: start and end of each assistant turn in the trained text, as (piece, position in that piece).
    """

    written: Sequence[str]
    pieces: Sequence[str]
    borders: Sequence[tuple[tuple[int, int], tuple[int, int]]]

    @staticmethod
    def slots(count: int) -> list[str]:
        """Placeholder contents that no template writes or splits: characters for private use."""
        return [f"\ue000{index}\ue001" for index in range(count)]

    @staticmethod
    def of(written: str, text: str, spans: Sequence[Span], slots: Sequence[str]) -> "CachedTemplate | None":
        """From a rendering of slots; None unless each appears in it once, in order.

        Args:
            written: by the template.
            text: the trained text.
        """
        found, pieces = _pieces(written, slots), _pieces(text, slots)
        if found is None or pieces is None:
            return None
        starts, place = [], 0
        for piece, slot in zip(pieces, [*slots, ""], strict=True):
            starts.append(place)
            place += len(piece) + len(slot)

        def border(at: int) -> tuple[int, int] | None:
            for piece, start in enumerate(starts):
                if start <= at <= start + len(pieces[piece]):
                    return piece, at - start
            return None  # within a content

        borders = [(begin, end) for span in spans if (begin := border(span[0])) and (end := border(span[1]))]
        return CachedTemplate(written=found, pieces=pieces, borders=borders) if len(borders) == len(spans) else None

    @property
    def rewrites(self) -> bool:
        """Whether the trained text has more than the template's before the last content."""
        return self.written[:-1] != self.pieces[:-1]

    def filled(self, written: str, contents: Sequence[str]) -> tuple[str, list[Span]] | None:
        """The trained text and its assistant turns; None where the template's text is not of this form."""
        if _joined(self.written, contents) != written:
            return None
        starts, place = [], 0
        for piece, content in zip(self.pieces, [*contents, ""], strict=True):
            starts.append(place)
            place += len(piece) + len(content)
        spans = [(starts[begin[0]] + begin[1], starts[end[0]] + end[1]) for begin, end in self.borders]
        return (written if self.written == self.pieces else _joined(self.pieces, contents)), spans


def _joined(pieces: Sequence[str], contents: Sequence[str]) -> str:
    return "".join(part for pair in zip(pieces, [*contents, ""], strict=True) for part in pair)


def _pieces(text: str, slots: Sequence[str]) -> list[str] | None:
    pieces, place = [], 0
    for slot in slots:
        found = text.find(slot, place)
        if found < 0 or text.count(slot) != 1:
            return None
        pieces.append(text[place:found])
        place = found + len(slot)
    return [*pieces, text[place:]]


logger = logging.getLogger(__name__)

_SLOT = "\ue000"  # a content that no template writes by itself


@dataclass(frozen=True, kw_only=True)
class Turns:
    """A rendered conversation, up to the end of the last turn that is trained.

    Args:
        spans: per trained turn of the assistant, the places in ``text`` where it begins and where it ends, the token
            that ends it included.
    """

    text: str
    spans: Sequence[Span]


@dataclass(kw_only=True)
class Renderer:
    """A chat template, and what is known of it by now. Can be pickled.

    Args:
        thinking: whether what the assistant thinks is trained; None: as the template has it, which must not lose it.
        thinks_in_field: the template takes thinking in a field of the message.
    """

    template: Template
    stops: StopTokens
    thinking: Thinking | None = None
    thinks_in_field: bool = False
    _cached: dict[tuple[object, ...], CachedTemplate | None] = field(default_factory=dict)

    @staticmethod
    def of(tokenizer: "PreTrainedTokenizerBase", thinking: Thinking | None = None) -> "Renderer":
        template = Template.of(tokenizer)
        return Renderer(
            template=template, stops=StopTokens.of(tokenizer), thinking=thinking,
            thinks_in_field=_thinks_in_field(template),
        )  # fmt: skip

    def turns(self, messages: Sequence[Message], tools: Tools | None, row_id: str, first: int = 0) -> list[Turns]:
        """Renders a conversation: one text, or several where the template renders earlier turns otherwise.

        Args:
            first: assistant turns before this message are not trained.
        Raises:
            ConfigError: the template leaves out something of conversations of this form, or of what the assistant
                thinks; or it cannot be used.
            DataError: the template refuses the messages, or nothing precedes an answer.
        """
        if messages[0]["role"] == "assistant":
            raise DataError(
                f"row {row_id}: its first message is of the assistant; a prompt before each answer is accepted; "
                "add the prompt, or remove the message"
            )
        last = max(place for place, message in enumerate(messages) if message["role"] == "assistant")
        messages = self._with_thinking(messages[: last + 1])
        roles = tuple(str(message["role"]) for message in messages)
        # Only where contents are all that is said can one row's pieces be those of another.
        is_plain = tools is None and "tool" not in roles and all(len(message) == 2 for message in messages)
        form = (first, roles if is_plain else form_of(messages, tools))
        cached = self._cached.get(form)
        if cached and not (cached.rewrites and any(thinking.CLOSE in str(each["content"]) for each in messages)):
            found = cached.filled(self.text(messages, row_id=row_id), [str(each["content"]) for each in messages])
            if found is not None:
                return [Turns(text=found[0], spans=found[1])]
        turns = self._proven(messages, tools, row_id, first)
        if form not in self._cached:
            self._require_whole(messages, tools, row_id, "chatml" if is_plain else "hermes")
            self._cached[form] = self._cache_template(roles, first) if is_plain else None
        return turns

    def _with_thinking(self, messages: Sequence[Message]) -> Sequence[Message]:
        if self.thinking == "drop":
            return thinking.without(messages)
        return thinking.in_field(messages) if self.thinks_in_field else messages

    def _proven(self, messages: Sequence[Message], tools: Tools | None, row_id: str, first: int) -> list[Turns]:
        """Each assistant turn after its own prompt; turns whose prompt continues a text are in that text."""
        found: list[Turns] = []
        for at, message in enumerate(messages):
            if at < first or message["role"] != "assistant":
                continue
            prompt, text = self._turn(messages[: at + 1], tools, row_id)
            span = (len(prompt), len(text))
            if found and prompt.startswith(found[-1].text):
                found[-1] = Turns(text=text, spans=[*found[-1].spans, span])
            else:
                found.append(Turns(text=text, spans=[span]))
        return found

    def _turn(self, messages: Sequence[Message], tools: Tools | None, row_id: str) -> tuple[str, str]:
        """What the last message is generated from, and that with the message, up to the token that ends it."""
        (prompt,) = self.template.render([messages[:-1]], tools, row_id, prompt=True)
        (text,) = self.template.render([messages], tools, row_id)
        thought, _ = thinking.split(messages[-1])
        if thought and not text.startswith(prompt):
            (thinks,) = self.template.render([messages[:-1]], tools, row_id, prompt=True, thinks=True)
            prompt = thinks if text.startswith(thinks) else prompt
        is_kept = text.startswith(prompt) and thought in text[len(prompt) :]
        if not is_kept:
            if thought and self.thinking is None and thought not in text:
                raise ConfigError(
                    f"the model's chat template leaves out what the assistant thinks ({thinking.OPEN}) on row {row_id};"
                    " rows without it are accepted, and a choice; set thinking=keep to train it, or thinking=drop to "
                    "train the answers alone"
                )
            text = self._after_prompt(prompt, messages, tools, row_id, thought)
        return prompt, self.stops.ended(self.template, text, len(prompt), messages, tools, row_id)

    def _after_prompt(
        self, prompt: str, messages: Sequence[Message], tools: Tools | None, row_id: str, thought: str
    ) -> str:
        """The last message behind the prompt, though the template writes another end of the prompt before it."""
        *before, last = messages
        _, plain = thinking.split(last)
        slot, text = self.template.render([[*before, {**plain, "content": _SLOT}], [*before, plain]], tools, row_id)
        shared = prompt[: common_prefix(prompt, slot)]
        if prompt[len(shared) :].strip() not in ("", thinking.OPEN) or not text.startswith(shared):
            raise ConfigError(
                f"the model's chat template does not render answers after the prompt that it generates them from: on "
                f"row {row_id} the prompt ends in {prompt[-60:]!r}, and the answer follows {slot[-90:]!r}; a template "
                "that begins the assistant's turn with its generation prompt is accepted; correct the template, or set "
                "chat_template=chatml on the sft stage"
            )
        return thinking.answer_after(prompt, text[len(shared) :], thought)

    def _cache_template(self, roles: tuple[str, ...], first: int) -> CachedTemplate | None:
        """The template's text for conversations of these roles; None where it cannot be cached."""
        contents = CachedTemplate.slots(len(roles))
        messages: list[Message] = [{"role": role, "content": slot} for role, slot in zip(roles, contents, strict=True)]
        try:
            turns = self._proven(messages, None, "", first)
            written = self.text(messages)
        except PipelineError:
            return None
        return CachedTemplate.of(written, turns[0].text, turns[0].spans, contents) if len(turns) == 1 else None

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
        """A conversation as the template writes it.

        Args:
            row_id: of its row, for messages.
            prompt: up to where the assistant begins to speak.
        Raises:
            ConfigError, DataError: as ``Template.render``.
        """
        return self.template.render([self._with_thinking(messages)], tools, row_id, prompt=prompt)[0]


def _thinks_in_field(template: Template) -> bool:
    """Whether a template writes what a field of an assistant's message says it thinks."""
    messages: list[Message] = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": f"{thinking.OPEN}\n{_SLOT}\n{thinking.CLOSE}\n\na"},
    ]
    try:
        return _SLOT in template.render([thinking.in_field(messages)], None, "")[0]
    except PipelineError:
        return False


_QUESTION: Message = {"role": "user", "content": "zq0qz"}
_CALL: Message = {
    "role": "assistant", "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "zq1qz", "arguments": {"zq2qz": "zq3qz"}}}],
}  # fmt: skip
_TOOL: Mapping[str, object] = {
    "type": "function",
    "function": {
        "name": "zq1qz", "description": "zq4qz",
        "parameters": {"type": "object", "properties": {"zq2qz": {"type": "string", "description": "zq5qz"}}},
    },
}  # fmt: skip


def turn_ends(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """The tokens that end the assistant's turns by the chat template alone, whatever rows say: of an answer, and of a
    turn that calls a tool, where that is a special token. Empty: there is no template, or it ends turns in none.
    """
    if not tokenizer.chat_template:
        return []
    renderer, found, answered = Renderer.of(tokenizer), list[str](), ""
    answer: Message = {"role": "assistant", "content": "zq1qz"}
    for last, tools, known in ((answer, None, renderer.stops.added), (_CALL, [_TOOL], renderer.stops.special)):
        try:
            prompt, text = renderer._turn([_QUESTION, last], tools, "")
        except PipelineError:  # it refuses such turns, or ends them in no token of its own
            continue
        end = next((end for end in known if text.endswith(end)), "")
        if end and end not in answered:  # a token within an answer cannot end it (Cohere's <|END_RESPONSE|>)
            found.append(end)
        answered = answered or text[len(prompt) :]
    ends: list[int] = tokenizer.convert_tokens_to_ids(found)
    return ends
