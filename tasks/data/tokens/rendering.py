"""A conversation as text, through the model's chat template, with the borders of what the assistant says.

Each assistant turn is trained after the very prompt that generation of it starts from: the template's rendering of the
messages before it, up to where the assistant begins to speak. Where that prompt continues the rendering of the turn
before, both stand in one text. Where it does not, since the template renders earlier turns otherwise than the last one
(Qwen 3, DeepSeek R1 and gpt-oss drop their thinking), the turn is a text of its own.

What a template leaves out of a form of conversation is found once, and cached.

Texts of messages and tools that spell a control token are marked before they are rendered, so that the tokens that the
template writes and those that a row spells are told apart. Rows without any, nearly all, are rendered as they are.
"""

import json
import logging
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, pairwise
from typing import TYPE_CHECKING

from lineage.errors import ConfigError, DataError, PipelineError
from tasks.data.kinds import Message
from tasks.data.tokens import template as thinking
from tasks.data.tokens.encoding import Rendered, Span, any_of, common_prefix
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


@dataclass(frozen=True, kw_only=True)
class CachedTemplate:
    """The template's text for conversations of one sequence of roles.

    Args:
        written: the template's text before, between and after the contents: one more than there are messages.
        pieces: the same for the trained text, which may end elsewhere.
        borders: start and end of each assistant turn in the trained text, as (piece, position in that piece).
        starts: where the assistant begins to speak, in the same form.
    """

    written: Sequence[str]
    pieces: Sequence[str]
    borders: Sequence[tuple[tuple[int, int], tuple[int, int]]]
    starts: Sequence[tuple[int, int]]

    @staticmethod
    def slots(count: int) -> list[str]:
        """Placeholder contents that no template writes or splits: characters for private use."""
        return [f"\ue000{index}\ue001" for index in range(count)]

    @staticmethod
    def of(written: str, turns: "Turns", slots: Sequence[str]) -> "CachedTemplate | None":
        """From a rendering of slots; None unless each appears in it once, in order.

        Args:
            written: by the template.
        """
        found, pieces = _pieces(written, slots), _pieces(turns.text, slots)
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

        borders = [(begin, end) for span in turns.spans if (begin := border(span[0])) and (end := border(span[1]))]
        places = [begin for start in turns.starts if (begin := border(start))]
        if len(borders) < len(turns.spans) or len(places) < len(turns.starts):
            return None
        return CachedTemplate(written=found, pieces=pieces, borders=borders, starts=places)

    @property
    def rewrites(self) -> bool:
        """Whether the trained text has more than the template's before the last content."""
        return self.written[:-1] != self.pieces[:-1]

    def filled(self, written: str, contents: Sequence[str]) -> "Turns | None":
        """The trained text and its assistant turns; None where the template's text is not of this form."""
        if _joined(self.written, contents) != written:
            return None
        starts, place = [], 0
        for piece, content in zip(self.pieces, [*contents, ""], strict=True):
            starts.append(place)
            place += len(piece) + len(content)
        spans = [(starts[begin[0]] + begin[1], starts[end[0]] + end[1]) for begin, end in self.borders]
        text = written if self.written == self.pieces else _joined(self.pieces, contents)
        return Turns(text=text, spans=spans, starts=[starts[piece] + at for piece, at in self.starts])


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
class Turns(Rendered):
    """A rendered conversation, up to the end of the last turn that is trained.

    Args:
        spans: per trained turn of the assistant, the places in ``text`` where it begins and where it ends, the token
            that ends it included.
    """

    spans: Sequence[Span] = ()


_MARKS = [chr(code) for code in range(0xE010, 0xE0A0)]  # characters for private use


@dataclass(frozen=True, kw_only=True)
class ControlTokens:
    """The tokens that only a chat template may write: special tokens, and added ones with which it parts turns.

    Texts of the assistant may have those that begin and end thinking. Other added tokens, such as ``<tool_call>``, are
    text: their authors let a tokenizer find them in any text.
    """

    texts: frozenset[str]

    @staticmethod
    def of(template: Template, stops: StopTokens) -> "ControlTokens":
        found = set(stops.special)
        said: list[list[Message]] = [
            [{"role": role, "content": _SLOT} for role in roles]
            for roles in (("system", "user", "assistant", "user"), ("user", "assistant", "user"))
        ]
        for messages in said:
            try:
                (text,) = template.render([messages], None, "", prompt=True)
            except PipelineError:  # it takes no system message
                continue
            found |= set(any_of(stops.added).findall(text)) - {thinking.OPEN, thinking.CLOSE}
            break
        return ControlTokens(texts=frozenset(found))

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        return any_of(self.texts)

    @cached_property
    def _without_thinking(self) -> re.Pattern[str]:
        return any_of(self.texts - {thinking.OPEN, thinking.CLOSE})

    @cached_property
    def _by_first(self) -> dict[str, re.Pattern[str]]:
        """A pattern per first character: a search skips quickly to one character, and slowly to any of several."""
        return {first: any_of(text for text in self.texts if text[0] == first) for first in {t[0] for t in self.texts}}

    def _are_in(self, text: str) -> bool:
        return any(first in text and pattern.search(text) for first, pattern in self._by_first.items())

    def _pattern(self, role: object) -> re.Pattern[str]:
        return self._without_thinking if role == "assistant" else self.pattern

    def spelled(self, text: str) -> list[str]:
        """Those that a document spells."""
        return self.pattern.findall(text) if self._are_in(text) else []

    def spelled_by(self, messages: Sequence[Message], tools: Tools | None) -> list[str]:
        """Those that the texts of a row spell."""
        values = [value for message in messages for value in message.values()]
        texts = [value if isinstance(value, str) else "\n".join(_texts_of(value)) for value in values]
        if not self._are_in("\n".join(texts if tools is None else [*texts, *_texts_of(tools)])):
            return []
        found = list[str]()
        for message in messages:
            for name, value in message.items():
                if name != "role":
                    found += chain.from_iterable(map(self._pattern(message["role"]).findall, _texts_of(value)))
        return found + [token for text in _texts_of(tools) for token in self.pattern.findall(text)]

    def marked(
        self, messages: Sequence[Message], tools: Tools | None
    ) -> "tuple[list[Message], Tools | None, tuple[str, str]]":
        """Messages and tools with a mark before and behind each control token, and the two marks."""
        said = json.dumps([messages, tools], ensure_ascii=False)
        left, right = [mark for mark in _MARKS if mark not in said][:2]
        marked = [
            {
                name: value if name == "role" else _replaced(value, self._pattern(message["role"]), left, right)
                for name, value in message.items()
            }
            for message in messages
        ]
        others = _replaced(tools, self.pattern, left, right)
        assert others is None or isinstance(others, list)
        return marked, others, (left, right)


def _texts_of(value: object) -> Iterator[str]:
    """All texts in a value of JSON, without the names of objects."""
    match value:
        case str():
            yield value
        case Mapping():
            for each in value.values():
                yield from _texts_of(each)
        case list() | tuple():
            for each in value:
                yield from _texts_of(each)


def _replaced(value: object, pattern: re.Pattern[str], left: str, right: str) -> object:
    match value:
        case str():
            return pattern.sub(f"{left}\\g<0>{right}", value)
        case Mapping():
            return {name: _replaced(each, pattern, left, right) for name, each in value.items()}
        case list() | tuple():
            return [_replaced(each, pattern, left, right) for each in value]
    return value


def _unmarked(turns: Turns, marks: tuple[str, str], spelled: Sequence[str], *, keeps: bool) -> Turns:
    """A rendered conversation without the marks, and with the places of what is between them.

    A template that splits contents may part the two marks of a token; a single one is removed.
    """
    left, right = marks
    escapes = tuple(json.dumps(mark)[1:-1] for mark in marks)  # as filters write characters beyond ASCII
    found = list(re.finditer("|".join(map(re.escape, (*marks, *escapes))), turns.text))
    places, removed = [each.start() for each in found], [0]
    for each in found:
        removed.append(removed[-1] + len(each[0]))

    def moved(place: int) -> int:
        return place - removed[bisect_left(places, place)]

    literal = [
        (moved(first.end()), moved(last.start()))
        for first, last in pairwise(found)
        if first[0] in (left, escapes[0]) and last[0] in (right, escapes[1])
    ]
    text = re.sub("|".join(map(re.escape, (*marks, *escapes))), "", turns.text)
    return Turns(
        text=text, spans=[(moved(start), moved(end)) for start, end in turns.spans],
        starts=[moved(start) for start in turns.starts], literal=() if keeps else literal, spelled=spelled,
    )  # fmt: skip


@dataclass(kw_only=True)
class Renderer:
    """A chat template, and what is known of it by now. Can be pickled.

    Args:
        thinking: whether what the assistant thinks is trained; None: as the template has it, which must not lose it.
        thinks_in_field: the template takes thinking in a field of the message.
        control: the tokens that only the template may write.
        keeps_control: texts that spell them are these tokens all the same.
    """

    template: Template
    stops: StopTokens
    control: ControlTokens
    keeps_control: bool = False
    thinking: Thinking | None = None
    thinks_in_field: bool = False
    _cached: dict[tuple[object, ...], CachedTemplate | None] = field(default_factory=dict)

    @staticmethod
    def of(
        tokenizer: "PreTrainedTokenizerBase", thinking: Thinking | None = None, *, keeps_control: bool = False
    ) -> "Renderer":
        template, stops = Template.of(tokenizer), StopTokens.of(tokenizer)
        return Renderer(
            template=template, stops=stops, thinking=thinking, thinks_in_field=_thinks_in_field(template),
            control=ControlTokens.of(template, stops), keeps_control=keeps_control,
        )  # fmt: skip

    def prompt(self, messages: Sequence[Message], tools: Tools | None, row_id: str) -> Rendered:
        """A conversation up to where the assistant begins to speak.

        Raises:
            ConfigError, DataError: as ``Template.render``.
        """
        if not (spelled := self.control.spelled_by(messages, tools)):
            return self._prompt(messages, tools, row_id)
        marked, others, marks = self.control.marked(messages, tools)
        return _unmarked(self._prompt(marked, others, row_id), marks, spelled, keeps=self.keeps_control)

    def _prompt(self, messages: Sequence[Message], tools: Tools | None, row_id: str) -> Turns:
        text, messages = self.text(messages, tools, row_id=row_id, prompt=True), self._with_thinking(messages)
        before = [place for place, message in enumerate(messages) if place and message["role"] == "assistant"]
        prompts = self._prompts([messages[:place] for place in before], tools, row_id)
        return Turns(text=text, starts=[len(each) for each in prompts if text.startswith(each)])

    def _prompts(self, histories: Sequence[Sequence[Message]], tools: Tools | None, row_id: str) -> list[str]:
        """What answers in the past were generated from; empty where the template refuses that."""
        try:
            return self.template.render(histories, tools, row_id, prompt=True) if histories else []
        except PipelineError:
            return []

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
        messages = messages[: last + 1]
        if not (spelled := self.control.spelled_by(messages, tools)):
            return self._turns(messages, tools, row_id, first)
        marked, others, marks = self.control.marked(messages, tools)
        found = self._turns(marked, others, row_id, first)
        return [_unmarked(turns, marks, spelled, keeps=self.keeps_control) for turns in found]

    def _turns(self, messages: Sequence[Message], tools: Tools | None, row_id: str, first: int) -> list[Turns]:
        messages = self._with_thinking(messages)
        roles = tuple(str(message["role"]) for message in messages)
        # Only where contents are all that is said can one row's pieces be those of another.
        is_plain = tools is None and "tool" not in roles and all(len(message) == 2 for message in messages)
        form = (first, roles if is_plain else form_of(messages, tools))
        cached = self._cached.get(form)
        if cached and not (cached.rewrites and any(thinking.CLOSE in str(each["content"]) for each in messages)):
            found = cached.filled(self.text(messages, row_id=row_id), [str(each["content"]) for each in messages])
            if found is not None:
                return [found]
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
        prompts = list[str]()  # of the turns so far
        for at, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if at < first:
                prompts += self._prompts([messages[:at]] if at else [], tools, row_id)
                continue
            prompt, text = self._turn(messages[: at + 1], tools, row_id)
            span = (len(prompt), len(text))
            if found and prompt.startswith(found[-1].text):
                before = found.pop()
                spans, starts = [*before.spans, span], [*before.starts, span[0]]
            else:
                spans, starts = [span], sorted({span[0], *(len(each) for each in prompts if text.startswith(each))})
            found.append(Turns(text=text, spans=spans, starts=starts))
            prompts.append(prompt)
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
        return CachedTemplate.of(written, turns[0], contents) if len(turns) == 1 else None

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
