"""Preferences as TRL has them: ``{"prompt": ..., "chosen": ..., "rejected": ...}``, strings or messages.

The answers may be whole conversations that begin with the prompt.
"""

from collections.abc import Sequence

from lineage.artifact import Kind
from tasks.data.formats.conversations import answer, prompt
from tasks.data.formats.format import CanonicalRow, Fields, Format, having
from tasks.data.formats.implicit_preference import common_beginning
from tasks.data.formats.preferences import preference
from tasks.data.formats.values import required

_ACCEPTED = '{"prompt": "...", "chosen": "...", "rejected": "..."}, each a string or a list of messages'
_MAPPING = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected", "kind": "kind", "tools": "tools"}


def _convert(fields: Fields) -> CanonicalRow:
    asked = required(fields, "prompt", _ACCEPTED, missing="empty prompt")
    chosen, rejected = (required(fields, name, _ACCEPTED, missing="no answer") for name in ("chosen", "rejected"))
    if isinstance(chosen, list) and isinstance(rejected, list) and len(chosen) > 1:
        end = common_beginning(chosen, rejected)
        if end and _says(chosen[:end], asked):
            asked, chosen, rejected = chosen[:end], chosen[end:], rejected[end:]
    return preference(
        prompt(asked, "prompt", _ACCEPTED), answer(chosen, "chosen", _ACCEPTED),
        answer(rejected, "rejected", _ACCEPTED), fields, _ACCEPTED,
    )  # fmt: skip


def _says(common: Sequence[object], asked: object) -> bool:
    """Whether a prompt says the same as the beginning of the answers."""
    if isinstance(asked, str):
        last = common[-1]
        return isinstance(last, dict) and last.get("role") == "user" and last.get("content") == asked
    return common == asked


TRL_PREFERENCE = Format(
    name="preference",
    kind=Kind.PREFERENCES,
    mapping=_MAPPING,
    recognize=having("prompt", "chosen", "rejected"),
    convert=_convert,
)
