"""ShareGPT: ``{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}``, with tools."""

from lineage.artifact import Kind
from tasks.data.formats.conversations import conversation
from tasks.data.formats.format import CanonicalRow, Evidence, Fields, Format, evidence
from tasks.data.formats.tool_schemas import add_tools
from tasks.data.formats.turns import CALL, OPENAI, Spelling
from tasks.data.formats.values import is_nothing, required

_ACCEPTED = '{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}'
_MAPPING = {"conversations": "the conversation", "system": "its first turn", "tools": "tools"}
_ROLES = {
    **OPENAI.roles, "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant",
    "bard": "assistant", "observation": "tool", "function_response": "tool", "function_call": CALL,
}  # fmt: skip
FROM_VALUE = Spelling(role="from", content="value", roles=_ROLES)
_ROLE_CONTENT = Spelling(role="role", content="content", roles=_ROLES)


def spelling_of(turns: object) -> Spelling:
    """How these turns are written, judged by the first: some sets have OpenAI's keys in ShareGPT's columns."""
    first = turns[0] if isinstance(turns, list) and turns else turns
    return _ROLE_CONTENT if isinstance(first, dict) and "role" in first and "from" not in first else FROM_VALUE


def _recognize(fields: Fields) -> Evidence | None:
    turns = fields.get("conversations")
    if not isinstance(turns, list):
        return None
    spelling = spelling_of(turns)
    words = f"conversations is a list of {{{spelling.role}, {spelling.content}}}"
    return evidence(fields, _MAPPING, words)


def _convert(fields: Fields) -> CanonicalRow:
    turns = with_system_turn(required(fields, "conversations", _ACCEPTED), fields)
    messages = conversation(turns, "conversations", _ACCEPTED, spelling_of(turns))
    return add_tools({"messages": messages}, fields)


def with_system_turn(turns: object, fields: Fields) -> object:
    """The turns, after what the column ``system`` says."""
    system = fields.get("system")
    if is_nothing(system) or not isinstance(turns, list):
        return turns
    spelling = spelling_of(turns)
    return [{spelling.role: "system", spelling.content: system}, *turns]


SHAREGPT = Format(name="sharegpt", kind=Kind.CONVERSATIONS, mapping=_MAPPING, recognize=_recognize, convert=_convert)
