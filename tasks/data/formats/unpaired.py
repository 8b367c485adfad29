"""Unpaired answers as TRL has them: ``{"prompt": ..., "completion": ..., "label": true}``."""

from lineage.artifact import Kind
from tasks.data.formats.conversations import answer, prompt
from tasks.data.formats.format import CanonicalRow, Fields, Format, having
from tasks.data.formats.labels import label
from tasks.data.formats.prompt_completion import COMPLETION
from tasks.data.formats.tool_schemas import add_tools
from tasks.data.formats.values import one_of, required

_ACCEPTED = '{"prompt": "...", "completion": "...", "label": true}, the texts strings or lists of messages'
_MAPPING = {
    "prompt": "prompt", "completion": "completion", "response": "completion", "label": "label", "tools": "tools",
}  # fmt: skip


def _convert(fields: Fields) -> CanonicalRow:
    name = one_of(fields, COMPLETION, _ACCEPTED)
    row: CanonicalRow = {
        "prompt": prompt(required(fields, "prompt", _ACCEPTED, missing="empty prompt"), "prompt", _ACCEPTED),
        "completion": answer(required(fields, name, _ACCEPTED, missing="no answer"), name, _ACCEPTED),
        "label": label(required(fields, "label", _ACCEPTED, missing="no label"), "prompt_completion"),
    }
    return add_tools(row, fields)


UNPAIRED = Format(
    name="unpaired",
    kind=Kind.UNPAIRED,
    mapping=_MAPPING,
    recognize=having("prompt", COMPLETION, "label"),
    convert=_convert,
)
