"""ShareGPT: ``{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}``, with tools."""

from lineage.artifact import Kind
from tasks.data.formats.conversations import conversation, listed
from tasks.data.formats.format import JUDGED, CanonicalRow, Fields, Format, having
from tasks.data.formats.tool_schemas import add_tools
from tasks.data.formats.turns import FROM_VALUE, OPENAI, Spelling
from tasks.data.formats.values import is_nothing, required

_ACCEPTED = '{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}'
_MAPPING = {"conversations": "the conversation", "system": "its first turn", "tools": "tools"}


def spelling_of(turns: object) -> Spelling:
    """How these turns are written, judged by the first: some sets have OpenAI's keys in ShareGPT's columns."""
    first = turns[0] if isinstance(turns, list) and turns else turns
    return OPENAI if isinstance(first, dict) and "role" in first and "from" not in first else FROM_VALUE


def _convert(fields: Fields) -> CanonicalRow:
    turns = with_system_turn(fields, _ACCEPTED)
    messages = conversation(turns, "conversations", _ACCEPTED, spelling_of(turns))
    return add_tools({"messages": messages}, fields)


def with_system_turn(fields: Fields, accepted: str) -> object:
    """The turns, after what the column ``system`` says."""
    turns, system = listed(required(fields, "conversations", accepted), "conversations"), fields.get("system")
    if is_nothing(system) or not isinstance(turns, list):
        return turns
    spelling = spelling_of(turns)
    return [{spelling.role: "system", spelling.content: system}, *turns]


SHAREGPT = Format(
    name="sharegpt",
    kind=Kind.CONVERSATIONS,
    mapping=_MAPPING,
    recognize=having("conversations"),
    convert=_convert,
    losing=JUDGED,
)
