"""Raw text: ``{"text": "..."}``."""

from lineage.artifact import Kind
from tasks.data.formats.format import CanonicalRow, Fields, Format, having
from tasks.data.formats.values import required, text

_ACCEPTED = '{"text": "..."}'


def _convert(fields: Fields) -> CanonicalRow:
    return {"text": text(required(fields, "text", _ACCEPTED), "text", _ACCEPTED, empty="no text")}


RAW_TEXT = Format(
    name="text", kind=Kind.TEXT, mapping={"text": "the document"}, recognize=having("text"), convert=_convert
)
