"""Conversations as OpenAI's chat has them: ``{"messages": [{"role": "user", "content": "..."}, ...]}``, with tools."""

from lineage.artifact import Kind
from tasks.data.formats.conversations import conversation, listed
from tasks.data.formats.format import JUDGED, CanonicalRow, Fields, Format, having
from tasks.data.formats.tool_schemas import add_tools
from tasks.data.formats.values import one_of, required

ACCEPTED = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
_MAPPING = {"messages": "the conversation", "tools": "tools", "functions": "tools, as they were called before"}


def _convert(fields: Fields) -> CanonicalRow:
    messages = conversation(listed(required(fields, "messages", ACCEPTED), "messages"), "messages", ACCEPTED)
    return add_tools({"messages": messages}, fields, one_of(fields, ("tools", "functions"), ACCEPTED))


MESSAGES = Format(
    name="messages",
    kind=Kind.CONVERSATIONS,
    mapping=_MAPPING,
    recognize=having("messages"),
    convert=_convert,
    losing=JUDGED,
)
