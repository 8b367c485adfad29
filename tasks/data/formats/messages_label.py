"""Conversations whose last answer is judged: ``label`` beside ``messages``, or within the last of them."""

from lineage.artifact import Kind
from tasks.data.formats.bad_row import BadRowError
from tasks.data.formats.conversations import conversation, listed
from tasks.data.formats.format import JUDGED, CanonicalRow, Fields, Format, having
from tasks.data.formats.labels import label
from tasks.data.formats.tool_schemas import add_tools
from tasks.data.formats.values import required

_ACCEPTED = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}], "label": true}'
_MAPPING = {
    "messages": "prompt, and the last turn as completion",
    "label": "label",
    "tools": "tools",
}


def _recognize(fields: Fields) -> tuple[str, ...]:
    messages = fields.get("messages")
    within = isinstance(messages, list) and messages and isinstance(messages[-1], dict) and "label" in messages[-1]
    return ("messages", "label") if within else having("messages", "label")(fields)


def _convert(fields: Fields) -> CanonicalRow:
    messages = listed(required(fields, "messages", _ACCEPTED), "messages")
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
    name="messages_label",
    kind=Kind.UNPAIRED,
    mapping=_MAPPING,
    recognize=_recognize,
    convert=_convert,
    losing=JUDGED - {"label"},
)
