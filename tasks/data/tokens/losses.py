"""What a chat template leaves out in silence, told from words of our own in the place of all that a row says."""

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
