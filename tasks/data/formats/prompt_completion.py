"""A prompt and its completion, each a string or messages; the completion may be called response."""

from lineage.artifact import Kind
from tasks.data.formats.conversations import answer, prompt
from tasks.data.formats.format import CanonicalRow, Evidence, Fields, Format, evidence
from tasks.data.formats.tool_schemas import add_tools
from tasks.data.formats.values import one_of, required

_ACCEPTED = '{"prompt": "...", "completion": "..."}, each a string or a list of messages'
COMPLETION = ("completion", "response")
_MAPPING = {
    "prompt": "messages, the user's", "completion": "messages, the assistant's",
    "response": "messages, the assistant's", "tools": "tools",
}  # fmt: skip


def has_texts(fields: Fields) -> bool:
    """Whether a row has a prompt and a completion."""
    completed = any(isinstance(fields.get(name), str | list) for name in COMPLETION)
    return completed and isinstance(fields.get("prompt"), str | list)


def _recognize(fields: Fields) -> Evidence | None:
    return evidence(fields, _MAPPING, "prompt and completion are strings or messages") if has_texts(fields) else None


def _convert(fields: Fields) -> CanonicalRow:
    name = one_of(fields, COMPLETION, _ACCEPTED)
    asked = prompt(required(fields, "prompt", _ACCEPTED, missing="empty prompt"), "prompt", _ACCEPTED)
    answered = answer(required(fields, name, _ACCEPTED, missing="no answer"), name, _ACCEPTED)
    return add_tools({"messages": asked + answered}, fields)


PROMPT_COMPLETION = Format(
    name="prompt_completion", kind=Kind.CONVERSATIONS, mapping=_MAPPING, recognize=_recognize, convert=_convert
)
