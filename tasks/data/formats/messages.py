"""Conversations as OpenAI's chat has them: ``{"messages": [{"role": "user", "content": "..."}, ...]}``."""

from lineage.artifact import Kind
from tasks.data.formats.format import Evidence, Fields, Format
from tasks.data.formats.row_checks import check_conversation


def _recognize(fields: Fields) -> Evidence | None:
    messages = fields.get("messages")
    if not isinstance(messages, list):
        return None
    return Evidence(columns=frozenset({"messages"}), words="messages is a list of {role, content}")


MESSAGES = Format(
    name="messages", kind=Kind.CONVERSATIONS, mapping={"messages": "the conversation"}, recognize=_recognize,
    convert=check_conversation,
)  # fmt: skip
