"""Raw text: ``{"text": "..."}``."""

from lineage.artifact import Kind
from tasks.data.formats.format import Evidence, Fields, Format
from tasks.data.formats.row_checks import check_text


def _recognize(fields: Fields) -> Evidence | None:
    if not isinstance(fields.get("text"), str):
        return None
    return Evidence(columns=frozenset({"text"}), words="text is a string")


RAW_TEXT = Format(
    name="text", kind=Kind.TEXT, mapping={"text": "the document"}, recognize=_recognize, convert=check_text
)
