"""Conversations as OpenAI's chat has them: ``{"messages": [{"role": "user", "content": "..."}, ...]}``, with tools."""

from lineage.artifact import Kind
from tasks.data.formats.conversations import conversation
from tasks.data.formats.format import CanonicalRow, Evidence, Fields, Format, evidence
from tasks.data.formats.tool_schemas import add_tools
from tasks.data.formats.values import required

ACCEPTED = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
_MAPPING = {"messages": "the conversation", "tools": "tools", "functions": "tools, as they were called before"}


def _recognize(fields: Fields) -> Evidence | None:
    if not isinstance(fields.get("messages"), list):
        return None
    return evidence(fields, _MAPPING, "messages is a list of {role, content}")


def _convert(fields: Fields) -> CanonicalRow:
    messages = conversation(required(fields, "messages", ACCEPTED), "messages", ACCEPTED)
    return add_tools({"messages": messages}, fields, "functions" if fields.get("functions") else "tools")


MESSAGES = Format(name="messages", kind=Kind.CONVERSATIONS, mapping=_MAPPING, recognize=_recognize, convert=_convert)
