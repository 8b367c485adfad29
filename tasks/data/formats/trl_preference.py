"""Preferences as TRL has them: ``{"prompt": ..., "chosen": ..., "rejected": ...}``, strings or messages."""

from lineage.artifact import Kind
from tasks.data.formats.format import Evidence, Fields, Format
from tasks.data.formats.row_checks import check_preference

_COLUMNS = ("prompt", "chosen", "rejected")


def _recognize(fields: Fields) -> Evidence | None:
    if not all(isinstance(fields.get(name), str | list) for name in _COLUMNS):
        return None
    return Evidence(columns=frozenset(_COLUMNS), words="prompt, chosen and rejected are strings or messages")


TRL_PREFERENCE = Format(
    name="preference", kind=Kind.PREFERENCES, mapping={name: name for name in _COLUMNS}, recognize=_recognize,
    convert=check_preference,
)  # fmt: skip
