"""Preferences as TRL has them: ``{"prompt": ..., "chosen": ..., "rejected": ...}``, strings or messages.

Where the answers are whole conversations, their common beginning is the prompt (TRL's implicit prompt).
"""

from itertools import takewhile

from lineage.artifact import Kind
from tasks.data.formats.bad_row import BadRowError
from tasks.data.formats.conversations import answer, prompt
from tasks.data.formats.format import CanonicalRow, Evidence, Fields, Format, evidence
from tasks.data.formats.preferences import preference
from tasks.data.formats.values import is_nothing, required

_ACCEPTED = '{"prompt": "...", "chosen": "...", "rejected": "..."}, each a string or a list of messages'
_MAPPING = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected", "kind": "kind", "tools": "tools"}


def _recognize(fields: Fields) -> Evidence | None:
    asked, *answers = (fields.get(name) for name in ("prompt", "chosen", "rejected"))
    if isinstance(asked, str | list) and all(isinstance(each, str | list) for each in answers):
        return evidence(fields, _MAPPING, "prompt, chosen and rejected are strings or messages")
    if is_nothing(asked) and all(isinstance(each, list) for each in answers):
        return evidence(fields, _MAPPING, "chosen and rejected are whole conversations")
    return None


def _convert(fields: Fields) -> CanonicalRow:
    asked, chosen, rejected = _parts(fields)
    return preference(
        prompt(asked, "prompt", _ACCEPTED), answer(chosen, "chosen", _ACCEPTED),
        answer(rejected, "rejected", _ACCEPTED), fields, _ACCEPTED,
    )  # fmt: skip


def _parts(fields: Fields) -> tuple[object, object, object]:
    """Prompt, chosen and rejected, where the answers begin with the prompt: without it."""
    asked = fields.get("prompt")
    chosen, rejected = fields.get("chosen"), fields.get("rejected")
    if isinstance(chosen, list) and isinstance(rejected, list) and (len(chosen) > 1 or is_nothing(asked)):
        shortest = min(len(chosen), len(rejected)) - 1  # of an answer something is left
        pairs = zip(chosen[:shortest], rejected[:shortest], strict=True)
        common = [turn for turn, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
        if common and (is_nothing(asked) or _says(common, asked)):
            return common, chosen[len(common) :], rejected[len(common) :]
        if is_nothing(asked):
            raise BadRowError(
                "chosen and rejected have no common beginning, and there is no prompt", _ACCEPTED,
                "add the prompt, or mend what both answer", reason="empty prompt",
            )  # fmt: skip
    return (
        required(fields, "prompt", _ACCEPTED, missing="empty prompt"),
        required(fields, "chosen", _ACCEPTED, missing="no answer"),
        required(fields, "rejected", _ACCEPTED, missing="no answer"),
    )


def _says(common: list[object], asked: object) -> bool:
    """Whether a prompt that is stated as well says the same as the beginning of the answers."""
    if isinstance(asked, str):
        last = common[-1]
        return isinstance(last, dict) and last.get("role") == "user" and last.get("content") == asked
    return common == asked


TRL_PREFERENCE = Format(
    name="preference", kind=Kind.PREFERENCES, mapping=_MAPPING, recognize=_recognize, convert=_convert
)
