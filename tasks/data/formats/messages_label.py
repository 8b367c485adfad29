"""Conversations whose last answer is judged: ``label`` beside ``messages``, or within the last of them."""

from lineage.artifact import Kind
from tasks.data.formats.bad_row import BadRowError
from tasks.data.formats.conversations import conversation
from tasks.data.formats.format import CanonicalRow, Evidence, Fields, Format
from tasks.data.formats.labels import label
from tasks.data.formats.tool_schemas import add_tools
from tasks.data.formats.values import required

_ACCEPTED = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}], "label": true}'
_MAPPING = {
    "messages": "prompt, and the last turn as completion",
    "label": "label",
    "tools": "tools",
}


def _recognize(fields: Fields) -> Evidence | None:
    messages = fields.get("messages")
    if not isinstance(messages, list):
        return None
    if fields.get("label") is not None:
        return Evidence(columns=_columns(fields), words="messages is a list of {role, content}, with a label")
    if messages and isinstance(messages[-1], dict) and messages[-1].get("label") is not None:
        return Evidence(columns=_columns(fields) | {"label"}, words="the last of messages has a label")
    return None


def _columns(fields: Fields) -> frozenset[str]:
    return frozenset(name for name in _MAPPING if fields.get(name) is not None)


def _convert(fields: Fields) -> CanonicalRow:
    messages = required(fields, "messages", _ACCEPTED)
    judged = fields.get("label")
    if judged is None and isinstance(messages, list) and messages and isinstance(messages[-1], dict):
        *before, last = messages
        judged = last.get("label")
        messages = [*before, {name: value for name, value in last.items() if name != "label"}]
    turns = conversation(messages, "messages", _ACCEPTED)
    if turns[-1]["role"] != "assistant":
        raise BadRowError(
            f"messages ends with the role {turns[-1]['role']!r}", "an answer at the end, which the label judges",
            "add the answer or remove the row", reason="no answer",
        )  # fmt: skip
    row: CanonicalRow = {"prompt": turns[:-1], "completion": turns[-1:], "label": label(judged, "messages")}
    return add_tools(row, fields)


MESSAGES_LABEL = Format(
    name="messages_label", kind=Kind.UNPAIRED, mapping=_MAPPING, recognize=_recognize, convert=_convert
)
