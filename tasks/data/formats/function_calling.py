"""Function calls as xLAM has them: ``{"query": "...", "tools": [...], "answers": [...]}``, lists or JSON text.

Zhang et al. 2024, arXiv:2409.03215; Liu et al. 2024, arXiv:2406.18518.
"""

from lineage.artifact import Kind
from tasks.data.formats.format import CanonicalRow, Evidence, Fields, Format, evidence
from tasks.data.formats.tool_schemas import add_tools, calls_json
from tasks.data.formats.values import required, text

_ACCEPTED = '{"query": "...", "tools": [{"name": ...}], "answers": [{"name": ..., "arguments": {...}}]}'
_MAPPING = {"query": "the user's turn", "tools": "tools", "answers": "the assistant's tool calls"}


def _recognize(fields: Fields) -> Evidence | None:
    lists = all(isinstance(fields.get(name), str | list) for name in ("tools", "answers"))
    if not lists or not isinstance(fields.get("query"), str):
        return None
    return evidence(fields, _MAPPING, "query is a string, tools and answers are lists or JSON")


def _convert(fields: Fields) -> CanonicalRow:
    query = text(required(fields, "query", _ACCEPTED, missing="empty prompt"), "query", _ACCEPTED, empty="empty prompt")
    calls = calls_json(required(fields, "answers", _ACCEPTED, missing="no answer"), "answers")
    required(fields, "tools", _ACCEPTED)
    messages = [{"role": "user", "content": query}, {"role": "assistant", "content": "", "tool_calls": calls}]
    return add_tools({"messages": messages}, fields)


FUNCTION_CALLING = Format(
    name="function_calling", kind=Kind.CONVERSATIONS, mapping=_MAPPING, recognize=_recognize, convert=_convert
)
