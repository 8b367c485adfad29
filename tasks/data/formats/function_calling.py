"""Function calls as xLAM has them: ``{"query": "...", "tools": [...], "answers": [...]}``, lists or JSON text.

Zhang et al. 2024, arXiv:2409.03215; Liu et al. 2024, arXiv:2406.18518.
"""

from lineage.artifact import Kind
from tasks.data.formats.format import CanonicalRow, Fields, Format, having
from tasks.data.formats.tool_schemas import add_tools, calls_json
from tasks.data.formats.values import required, text

_ACCEPTED = '{"query": "...", "tools": [{"name": ...}], "answers": [{"name": ..., "arguments": {...}}]}'
_MAPPING = {"query": "the user's turn", "tools": "tools", "answers": "the assistant's tool calls"}


def _convert(fields: Fields) -> CanonicalRow:
    query = text(required(fields, "query", _ACCEPTED, missing="empty prompt"), "query", _ACCEPTED, empty="empty prompt")
    calls = calls_json(required(fields, "answers", _ACCEPTED, missing="no answer"), "answers")
    required(fields, "tools", _ACCEPTED)
    messages = [{"role": "user", "content": query}, {"role": "assistant", "content": "", "tool_calls": calls}]
    return add_tools({"messages": messages}, fields)


FUNCTION_CALLING = Format(
    name="function_calling",
    kind=Kind.CONVERSATIONS,
    mapping=_MAPPING,
    recognize=having("query", "tools", "answers"),
    convert=_convert,
)
