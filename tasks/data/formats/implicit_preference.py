"""Preferences without a prompt: what both answers begin with is the prompt, as TRL's ``extract_prompt`` has it."""

from collections.abc import Sequence
from itertools import takewhile

from lineage.artifact import Kind
from tasks.data.formats.bad_row import BadRowError
from tasks.data.formats.conversations import answer, prompt
from tasks.data.formats.format import CanonicalRow, Fields, Format, having
from tasks.data.formats.preferences import preference
from tasks.data.formats.values import named, required

_ACCEPTED = '{"chosen": "...", "rejected": "..."}, both strings or both lists of messages, that begin alike'
_MAPPING = {"chosen": "prompt and chosen", "rejected": "prompt and rejected", "kind": "kind", "tools": "tools"}
# Two texts mostly begin alike somehow: where a column may hold the prompt, it is to be named so.
_ASKING = frozenset({"prompt", "question", "instruction", "query", "problem", "input", "messages", "conversations"})


def _convert(fields: Fields) -> CanonicalRow:
    chosen, rejected = (required(fields, name, _ACCEPTED, missing="no answer") for name in ("chosen", "rejected"))
    for name, value, other in (("chosen", chosen, rejected), ("rejected", rejected, chosen)):
        if not isinstance(value, str | list) or (isinstance(other, list) and not isinstance(value, list)):
            reason = "no answer" if value is None else "not of the format"
            raise BadRowError(f"{name} is {named(value)}", _ACCEPTED, "write both alike", reason=reason)
    assert isinstance(chosen, str | list) and isinstance(rejected, str | list)
    end = common_beginning(chosen, rejected)
    if not end:
        raise BadRowError(
            "chosen and rejected have no common beginning, and there is no prompt", _ACCEPTED,
            "add the prompt, or mend what both answer", reason="empty prompt",
        )  # fmt: skip
    return preference(
        prompt(chosen[:end], "the common beginning", _ACCEPTED), answer(chosen[end:], "chosen", _ACCEPTED),
        answer(rejected[end:], "rejected", _ACCEPTED), fields, _ACCEPTED,
    )  # fmt: skip


def common_beginning(chosen: Sequence[object], rejected: Sequence[object]) -> int:
    """How many turns, or characters, two answers begin with alike.

    Of an answer something is left, and a space before it is part of it.
    """
    shortest = max(min(len(chosen), len(rejected)) - 1, 0)
    end = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(chosen[:shortest], rejected, strict=False)))
    return end - 1 if end and chosen[end] != rejected[end] and chosen[end - 1] == " " else end


IMPLICIT_PREFERENCE = Format(
    name="implicit_preference",
    kind=Kind.PREFERENCES,
    mapping=_MAPPING,
    recognize=having("chosen", "rejected"),
    convert=_convert,
    losing=_ASKING,
)
