"""A prompt and its completion, each a string or messages; the completion may be called response."""

from lineage.artifact import Kind
from tasks.data.formats.conversations import answer, prompt
from tasks.data.formats.format import CanonicalRow, Fields, Format, having
from tasks.data.formats.tool_schemas import add_tools
from tasks.data.formats.values import one_of, required

_ACCEPTED = '{"prompt": "...", "completion": "..."}, each a string or a list of messages'
COMPLETION = ("completion", "response")
_MAPPING = {
    "prompt": "messages, the user's", "completion": "messages, the assistant's",
    "response": "messages, the assistant's", "tools": "tools",
}  # fmt: skip


def _convert(fields: Fields) -> CanonicalRow:
    name = one_of(fields, COMPLETION, _ACCEPTED)
    asked = prompt(required(fields, "prompt", _ACCEPTED, missing="empty prompt"), "prompt", _ACCEPTED)
    answered = answer(required(fields, name, _ACCEPTED, missing="no answer"), name, _ACCEPTED)
    return add_tools({"messages": asked + answered}, fields)


PROMPT_COMPLETION = Format(
    name="prompt_completion",
    kind=Kind.CONVERSATIONS,
    mapping=_MAPPING,
    recognize=having("prompt", COMPLETION),
    convert=_convert,
    losing=frozenset({"label"}),
)
