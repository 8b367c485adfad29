"""Preferences as OpenAI's fine-tuning has them: ``input.messages``, ``preferred_output``, ``non_preferred_output``."""

from collections.abc import Mapping

from lineage.artifact import Kind
from tasks.data.formats.bad_row import BadRowError
from tasks.data.formats.conversations import answer, prompt_turns
from tasks.data.formats.format import CanonicalRow, Fields, Format, having
from tasks.data.formats.preferences import preference
from tasks.data.formats.values import named, require_nothing_else, required

_ACCEPTED = (
    '{"input": {"messages": [...]}, "preferred_output": [{"role": "assistant", "content": "..."}], '
    '"non_preferred_output": [{"role": "assistant", "content": "..."}]}'
)
_CHOSEN, _REJECTED = "preferred_output", "non_preferred_output"
_INPUT = ("messages", "tools", "parallel_tool_calls")  # the last says nothing about these answers
_MAPPING = {"input": "prompt and tools", _CHOSEN: "chosen", _REJECTED: "rejected", "kind": "kind"}


def _convert(fields: Fields) -> CanonicalRow:
    given = required(fields, "input", _ACCEPTED, missing="empty prompt")
    if not isinstance(given, Mapping):
        raise BadRowError(f"input is {named(given)}", _ACCEPTED, "write an object with messages")
    require_nothing_else(given, _INPUT, "input", _ACCEPTED)
    messages = required(given, "messages", _ACCEPTED, missing="empty prompt")
    asked = prompt_turns(messages, "input.messages", _ACCEPTED)
    chosen, rejected = (
        answer(required(fields, name, _ACCEPTED, missing="no answer"), name, _ACCEPTED) for name in (_CHOSEN, _REJECTED)
    )
    return preference(asked, chosen, rejected, {**fields, "tools": given.get("tools")}, _ACCEPTED)


OPENAI_PREFERENCE = Format(
    name="openai_preference",
    kind=Kind.PREFERENCES,
    mapping=_MAPPING,
    recognize=having("input", _CHOSEN, _REJECTED),
    convert=_convert,
)
