"""Prompts alone, with other columns for reward functions."""

from lineage.artifact import Kind
from tasks.data.formats.bad_row import BadRowError
from tasks.data.formats.conversations import prompt
from tasks.data.formats.format import REST, CanonicalRow, Fields, Format, having
from tasks.data.formats.prompt_completion import COMPLETION
from tasks.data.formats.tool_schemas import add_tools
from tasks.data.formats.values import as_json, required
from tasks.data.kinds import RESERVED_COLUMNS

_ACCEPTED = '{"prompt": "..."}, a string or a list of messages'
_MAPPING = {"prompt": "prompt", "tools": "tools", REST: "columns, for a reward function"}
_READ = ("prompt", "tools", "group")  # a group says what is held out together


def _convert(fields: Fields) -> CanonicalRow:
    row: CanonicalRow = {
        "prompt": prompt(required(fields, "prompt", _ACCEPTED, missing="empty prompt"), "prompt", _ACCEPTED)
    }
    others = {name: value for name, value in sorted(fields.items()) if name not in _READ}
    reserved = sorted(RESERVED_COLUMNS & others.keys())
    if reserved:
        raise BadRowError(
            f"the column {reserved[0]} is reserved", "columns of other names, which reward functions get as arguments",
            "rename or remove it", reason="reserved column",
        )  # fmt: skip
    if others:
        row["columns"] = as_json(others, f"one of {', '.join(others)}")
    return add_tools(row, fields)


PROMPTS = Format(
    name="prompts",
    kind=Kind.PROMPTS,
    mapping=_MAPPING,
    recognize=having("prompt"),
    convert=_convert,
    losing=frozenset({*COMPLETION, "chosen", "rejected"}),
)
