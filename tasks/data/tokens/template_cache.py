"""The cache of checked chat templates, and what a template leaves out: both are found once per template."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lineage.errors import PipelineError
from tasks.data.schema import Message
from tasks.data.tokens.template import Template, Tools

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
