"""A conversation as text, through the model's chat template, with the borders of what the assistant says.

Each assistant turn is trained after the very prompt that generation of it starts from: the template's rendering of the
messages before it, up to where the assistant begins to speak. Where that prompt continues the rendering of the turn
before, both stand in one text. Where it does not, since the template renders earlier turns otherwise than the last one
(Qwen 3, DeepSeek R1 and gpt-oss drop their thinking), the turn is a text of its own.

What a template leaves out of a form of conversation is found once, and cached.

Texts of messages and tools that spell a control token are marked before they are rendered, so that the tokens that the
template writes and those that a row spells are distinguished. Rows without any, nearly all, are rendered as they are.
"""

import json
import logging
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Self

from lineage.errors import ConfigError, DataError, PipelineError
from tasks.data.images import MARK
from tasks.data.kinds import Message
from tasks.data.tokens.encoding import ImageSpan, Rendered, Span, any_of, common_prefix
from tasks.data.tokens.template import Limited, OverTimeError, Thinking, Tools, form_of, limit_of, lost

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

OPEN, CLOSE = "<think>", "</think>"
FIELD = "reasoning_content"  # transformers gives it to templates under the other names that they ask for, too
_THOUGHT = re.compile(rf"\s*(?:{OPEN})?(.*?){CLOSE}\s*", re.DOTALL)


def split(message: Message) -> tuple[str, Message]:
    """The thinking of a message, in its content or in a field, and the message without it; empty: there is none."""
    if FIELD in message:
        return str(message[FIELD]), {name: value for name, value in message.items() if name != FIELD}
    content = str(message.get("content") or "")
    found = _THOUGHT.match(content) if message["role"] == "assistant" and CLOSE in content else None
    if found is None:
        return "", message
    return found[1].strip(), {**message, "content": content[found.end() :]}


def without(messages: Sequence[Message]) -> list[Message]:
    """Messages without what the assistant thinks."""
    return [split(message)[1] for message in messages]


def in_field(messages: Sequence[Message]) -> list[Message]:
    """Thinking in a field of its own, as some templates take it."""
    parts = [split(message) for message in messages]
    return [{**rest, FIELD: thought} if thought else rest for thought, rest in parts]


def answer_after(prompt: str, answer: str, thought: str) -> str:
    """A prompt and its answer, with the thinking that belongs between them.

    The prompt may have opened the thinking. Where the answer neither has a thought nor closes that, an empty thought
    is closed before it: so the answer follows the very prompt that generation starts from.

    Args:
        answer: what the template writes behind the place up to which it and the prompt agree.
    """
    is_open = prompt.rstrip().endswith(OPEN)
    closing = re.match(rf"\s*{CLOSE}\s*", answer)
    if not thought:
        return prompt + (f"\n{CLOSE}\n\n" if is_open and not closing else "") + answer
    rest = answer[closing.end() :] if closing else answer
    opening = "" if is_open else f"{OPEN}\n"
    return f"{prompt}{opening}{thought}\n{CLOSE}\n\n{rest}"


logger = logging.getLogger(__name__)

DATE = "26 Jul 2024"  # the date that templates of Llama 3 write without strftime_now
_DAY = datetime(2024, 7, 26)
_WORD = "zq0qz"  # not written by any template
_REFUSED: dict[tuple[str, str], str] = {}  # templates that exceeded their limits -> the message


@dataclass(frozen=True, kw_only=True)
class Template:
    """A chat template with the tokens that it names. Can be pickled.

    Args:
        name: of the model that it came with, for messages.
        plain, with_tools: for a conversation without and with tools; models may have one for each.
        in_blocks: it takes contents as lists of ``{"type": "text", "text": ...}``, as those of vision models do.
        images: marks in contents are images, ``{"type": "image"}`` in such lists.
    """

    plain: str
    with_tools: str
    special_tokens: Mapping[str, object]
    in_blocks: bool = False
    images: bool = False
    name: str = ""

    @staticmethod
    def of(tokenizer: "PreTrainedTokenizerBase") -> "Template":
        """The template of a tokenizer that has one (ConfigError: it has several, and none is the default)."""
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
        """Whether it writes the content of a user's message."""
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
            row_id: of their row, for messages.
            prompt: up to where the assistant begins to speak.
            thinks: the assistant will think; some templates take it as an argument.
        Raises:
            DataError: the template refuses the messages.
            ConfigError: the template itself is wrong, or takes more time or memory than it may.
        """
        from jinja2 import TemplateError

        if (self.plain, self.with_tools) in _REFUSED:  # not tried again
            raise ConfigError(_REFUSED[self.plain, self.with_tools])
        conversations = [self._in_blocks(messages) for messages in conversations]
        try:
            with Limited():
                try:
                    return self._texts(conversations, tools, prompt=prompt, thinks=thinks)
                except TypeError:  # a few, such as DeepSeek's, take the arguments of calls as JSON text alone
                    texts = [[_with_json_arguments(message) for message in messages] for messages in conversations]
                    return self._texts(texts, tools, prompt=prompt, thinks=thinks)
        except (OverTimeError, MemoryError) as error:
            refusal = (
                f"the chat template of {self.name or 'the model'} takes more than {limit_of(error)} for one "
                f"conversation{f' (row {row_id})' if row_id else ''}, and was stopped; one that takes less is "
                "accepted; correct the template, or set chat_template=chatml on the sft stage"
            )
            _REFUSED[self.plain, self.with_tools] = refusal
            raise ConfigError(refusal) from error
        except Exception as error:  # a template is a program: it can raise whatever Python can
            if type(error) is TemplateError:  # its `raise_exception`
                raise DataError(
                    f"row {row_id}: the model's chat template refuses its messages: {error}; correct the row's roles "
                    "and their order"
                ) from error
            raise ConfigError(
                f"the model's chat template fails on row {row_id}: {type(error).__name__}: {error}; one that renders "
                "every row, or says itself which it refuses, is accepted; correct the template, or set "
                "chat_template=chatml on the sft stage"
            ) from error

    def _in_blocks(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Messages as the template takes them: contents are lists where it wants that, and in a row with images."""
        has_images = self.images and any(MARK.search(str(message["content"])) for message in messages)
        if not (self.in_blocks or has_images):
            return messages
        blocks = blocks_of if has_images else _text_block
        return [{**message, "content": blocks(str(message["content"]))} for message in messages]

    def _texts(
        self, conversations: Sequence[Sequence[Message]], tools: Tools | None, *, prompt: bool, thinks: bool
    ) -> list[str]:
        # What `apply_chat_template` calls, without its repeated checks, which would double the time.
        from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

        template = self.plain if tools is None else self.with_tools
        variables: dict[str, object] = {"date_string": DATE} if "date_string" in template else {}
        variables |= {"enable_thinking": True} if thinks else {}
        variables |= {"add_generation_prompt": prompt, **self.special_tokens}
        if tools is None and all(message.keys() == _PLAIN for messages in conversations for message in messages):
            render = _compile_jinja_template(template).render  # all else that is called below copies what is plain JSON
            return [render(messages=messages, tools=None, documents=None, **variables) for messages in conversations]
        texts: list[str] = render_jinja_template(
            conversations=conversations, tools=tools, chat_template=template, **variables
        )[0]
        return texts


def _text_block(content: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}]


def blocks_of(content: str) -> list[dict[str, str]]:
    """A content with marks of images as a list of texts and images."""
    texts = MARK.split(content)[::2]  # between them are digests
    blocks = [block for text in texts for block in ({"type": "image"}, {"type": "text", "text": text})][1:]
    return [block for block in blocks if block.get("text") != ""] or _text_block("")


def _on_one_day(template: str) -> str:
    """A template that always writes ``DATE`` where it would write today's date.

    Raises:
        ConfigError: it is unknown how it writes the date.
    """
    if "strftime_now" not in template:
        return template
    logger.info("chat_template=writes_a_date date=%r: the same in every run", DATE)
    dated = re.sub(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)", lambda call: repr(_DAY.strftime(call[2])), template)
    if "strftime_now(" in dated and "date_string" not in template:
        raise ConfigError(
            "the model's chat template writes today's date (strftime_now): the same rows would be other tokens "
            "tomorrow; one that names the form of the date, such as strftime_now('%d %b %Y'), or that takes it from "
            "date_string is accepted; correct the template, or set chat_template=chatml on the sft stage"
        )
    return dated


def _with_json_arguments(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    texts = [json.dumps(call["function"]["arguments"], ensure_ascii=False) for call in calls]
    functions = [{**call["function"], "arguments": text} for call, text in zip(calls, texts, strict=True)]
    return {**message, "tool_calls": [{**call, "function": each} for call, each in zip(calls, functions, strict=True)]}


_PLAIN = {"role", "content"}  # the keys of a message without thinking and calls
_PROBE = "\ue002"  # content that no template writes by itself


def stop_at(generation: "GenerationConfig", tokens: Iterable[int]) -> None:
    """Lets generation stop at these tokens too."""
    ends = generation.eos_token_id
    ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    more = [token for token in tokens if token not in ends]
    if more:
        generation.eos_token_id = [*more, *ends]


@dataclass(kw_only=True)
class StopTokens:
    """Finds the end of assistant turns in the text of a template. Can be pickled.

    Args:
        special: special tokens of the tokenizer, as text.
        added: all tokens that it never takes apart: the special ones, and marks such as ``</tool_call>``.
        ids: of the latter.
    """

    special: Sequence[str]
    added: Sequence[str]
    ids: frozenset[int]
    _known: dict[tuple[bool, tuple[str, ...]], str] = field(default_factory=dict)

    @staticmethod
    def of(tokenizer: "PreTrainedTokenizerBase") -> "StopTokens":
        added = tokenizer.added_tokens_decoder.values()
        special = {*tokenizer.all_special_tokens, *(token.content for token in added if token.special)}
        texts = special | {token.content for token in added}
        ids = frozenset(tokenizer.convert_tokens_to_ids(sorted(texts)))
        return StopTokens(special=_longest_first(special), added=_longest_first(texts), ids=ids)

    def ended(
        self, template: Template, text: str, start: int, messages: Sequence[Message], tools: Tools | None, row_id: str
    ) -> str:
        """A rendered conversation up to the stop token of its last turn, which is appended where the template writes
        it as the beginning of the next turn.

        Args:
            start: where the last turn begins in the text.
            messages: what the text says, the last one of the assistant.
        Raises:
            ConfigError: the turn ends in no token of its own.
        """
        body, ends = _tail(text[start:], self.special)
        key = (bool(messages[-1].get("tool_calls")), tuple(ends))
        if key not in self._known:
            plain = [*messages[:-1], split(messages[-1])[1]]
            self._known[key] = self._stop(template, ends, plain, tools, row_id)
        stop = self._known[key]
        if not stop:
            body, ends = _tail(text[start:], self.added)
            stop = "".join(ends).rstrip()
        if not stop:
            raise ConfigError(
                f"the model's chat template ends the assistant's turn on row {row_id} in no token of its own "
                f"(...{text[-40:]!r}), so the model would never learn to stop; a template that writes a special token "
                "of the tokenizer, such as its eos_token, after each answer is accepted; add it to the template, or "
                "set chat_template=chatml on the sft stage"
            )
        return text[:start] + body + stop

    def _stop(
        self, template: Template, ends: Sequence[str], messages: Sequence[Message], tools: Tools | None, row_id: str
    ) -> str:
        """The end of a turn after its last word, up to the stop token; empty: no special token is known."""
        calls = bool(messages[-1].get("tool_calls"))
        within = calls and len(ends) == 1 and self._ends_each_call(template, ends[0].strip(), messages, tools, row_id)
        if len(ends) == 1 and not within:
            return ends[0].rstrip()
        follows: Message = {"role": "tool" if calls else "user", "content": _PROBE}
        try:
            whole, history = template.render([messages, [*messages, follows]], tools, row_id)
        except PipelineError:  # it refuses what follows: nothing more is known
            return "".join(ends[:1]).rstrip()
        if ends and not within:
            # Some templates write an end of the whole behind that of the turn, which history lacks.
            past = history.rpartition(_PROBE)[0]
            counts = (n for n in range(len(ends), 1, -1) if "".join(ends[:n]).rstrip() in past)
            return "".join(ends[: next(counts, 1)]).rstrip()
        special = "|".join(map(re.escape, self.special)) or "(?!)"
        found = re.match(rf"\s*(?:{special})", history[len(whole) :]) if history.startswith(whole) else None
        return "".join(ends) + found[0] if found else ""

    def _ends_each_call(
        self, template: Template, end: str, messages: Sequence[Message], tools: Tools | None, row_id: str
    ) -> bool:
        """Whether a token ends each call in a turn, rather than the turn."""
        *before, last = messages
        calls = last["tool_calls"]
        assert isinstance(calls, list)
        try:
            once, twice = template.render(
                [[*before, {**last, "tool_calls": calls[:1] * number}] for number in (1, 2)], tools, row_id
            )
        except PipelineError:  # it accepts only one call
            return False
        return twice.count(end) > once.count(end)


def _longest_first(tokens: Iterable[str]) -> list[str]:
    return sorted(filter(None, tokens), key=lambda token: (-len(token), token))


def _tail(text: str, tokens: Sequence[str]) -> tuple[str, list[str]]:
    """A text without the tokens that end it; and those tokens, each with the blanks after it."""
    ends: list[str] = []
    while True:
        bare = text.rstrip()
        token = next((token for token in tokens if bare.endswith(token)), None)
        if not token:
            return text, ends
        ends.insert(0, text[len(bare) - len(token) :])
        text = bare[: -len(token)]


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

    def moved(self, text: str, moved: Callable[[int], int], images: Sequence[ImageSpan]) -> Self:
        spans = [(moved(start), moved(end)) for start, end in self.spans]
        return replace(super().moved(text, moved, images), spans=spans)


_MARKS = [chr(code) for code in range(0xE010, 0xE0A0)]  # characters for private use


@dataclass(frozen=True, kw_only=True)
class ControlTokens:
    """The tokens that only a chat template may write: special tokens, and added ones with which it parts turns.

    Texts of the assistant may have those that begin and end thinking. Other added tokens, such as ``<tool_call>``, are
    text: their authors let a tokenizer find them in any text. So are added blanks and words, which a template writes
    too: Gemma's newlines are such tokens.
    """

    texts: frozenset[str]

    @staticmethod
    def of(template: Template, stops: StopTokens) -> "ControlTokens":
        found = set(stops.special)
        conversations: list[list[Message]] = [
            [{"role": role, "content": _SLOT} for role in roles]
            for roles in (("system", "user", "assistant", "user"), ("user", "assistant", "user"))
        ]
        for messages in conversations:
            try:
                (text,) = template.render([messages], None, "", prompt=True)
            except PipelineError:  # it takes no system message
                continue
            marks = set(any_of(stops.added).findall(text)) - {OPEN, CLOSE}
            found |= {each for each in marks if not each.replace(" ", "").isalnum() and not each.isspace()}
            break
        return ControlTokens(texts=frozenset(found))

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        return any_of(self.texts)

    @cached_property
    def _without_thinking(self) -> re.Pattern[str]:
        return any_of(self.texts - {OPEN, CLOSE})

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

    def places(self, text: str, role: object = None) -> list[Span]:
        """Where a text spells them; in one of the assistant, not those around thinking."""
        return [each.span() for each in self._pattern(role).finditer(text)] if self._are_in(text) else []

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
        joined = json.dumps([messages, tools], ensure_ascii=False)
        left, right = [mark for mark in _MARKS if mark not in joined][:2]
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
        tokenizer: "PreTrainedTokenizerBase", thinking: Thinking | None = None, *, keeps_control: bool = False,
        images: bool = False,
    ) -> "Renderer":  # fmt: skip
        template, stops = replace(Template.of(tokenizer), images=images), StopTokens.of(tokenizer)
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
        # Only where nothing but contents is rendered can one row's pieces be those of another.
        is_plain = tools is None and "tool" not in roles and all(len(message) == 2 for message in messages)
        form = (first, roles if is_plain else form_of(messages, tools))
        cached = self._cached.get(form)
        if cached and not (cached.rewrites and any(CLOSE in str(each["content"]) for each in messages)):
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
            return without(messages)
        return in_field(messages) if self.thinks_in_field else messages

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
        thought, _ = split(messages[-1])
        if thought and not text.startswith(prompt):
            (thinks,) = self.template.render([messages[:-1]], tools, row_id, prompt=True, thinks=True)
            prompt = thinks if text.startswith(thinks) else prompt
        is_kept = text.startswith(prompt) and thought in text[len(prompt) :]
        if not is_kept:
            if thought and self.thinking is None and thought not in text:
                raise ConfigError(
                    f"the model's chat template leaves out what the assistant thinks ({OPEN}) on row {row_id};"
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
        _, plain = split(last)
        slot, text = self.template.render([[*before, {**plain, "content": _SLOT}], [*before, plain]], tools, row_id)
        shared = prompt[: common_prefix(prompt, slot)]
        if prompt[len(shared) :].strip() not in ("", OPEN) or not text.startswith(shared):
            # Mistral's template of version 3 writes what the system says in prompts alone.
            system = "put what the system says into the user's turn, " if before[0]["role"] == "system" else ""
            raise ConfigError(
                f"the model's chat template does not render answers after the prompt that it generates them from: on "
                f"row {row_id} the prompt ends in {prompt[-60:]!r}, and the answer follows {slot[-90:]!r}; a template "
                f"that begins the assistant's turn with its generation prompt is accepted; {system}correct the "
                "template, or set chat_template=chatml on the sft stage"
            )
        return answer_after(prompt, text[len(shared) :], thought)

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
        missing = lost(self.template.render, messages, tools, row_id)
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
        {"role": "assistant", "content": f"{OPEN}\n{_SLOT}\n{CLOSE}\n\na"},
    ]
    try:
        return _SLOT in template.render([in_field(messages)], None, "")[0]
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
