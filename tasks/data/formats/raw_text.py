"""Raw text: ``{"text": "..."}``."""

from lineage.artifact import Kind
from tasks.data.formats.format import CanonicalRow, Evidence, Fields, Format
from tasks.data.formats.values import required, text

_ACCEPTED = '{"text": "..."}'


def _recognize(fields: Fields) -> Evidence | None:
    return (
        Evidence(columns=frozenset({"text"}), words="text is a string") if isinstance(fields.get("text"), str) else None
    )


def _convert(fields: Fields) -> CanonicalRow:
    return {"text": text(required(fields, "text", _ACCEPTED), "text", _ACCEPTED, empty="no text")}


RAW_TEXT = Format(name="text", kind=Kind.TEXT, mapping={"text": "the document"}, recognize=_recognize, convert=_convert)
