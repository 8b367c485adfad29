"""ShareGPT with two answers: ``conversations`` up to them, ``chosen`` and ``rejected`` as a turn each."""

from lineage.artifact import Kind
from tasks.data.formats.conversations import answer, prompt_turns
from tasks.data.formats.format import CanonicalRow, Fields, Format, having
from tasks.data.formats.preferences import preference
from tasks.data.formats.sharegpt import spelling_of, with_system_turn
from tasks.data.formats.turns import Message
from tasks.data.formats.values import required

_ACCEPTED = (
    '{"conversations": [{"from": "human", "value": "..."}], "chosen": {"from": "gpt", "value": "..."}, '
    '"rejected": {"from": "gpt", "value": "..."}}'
)
_MAPPING = {
    "conversations": "prompt", "chosen": "chosen", "rejected": "rejected", "system": "the prompt's first turn",
    "kind": "kind", "tools": "tools",
}  # fmt: skip


def _convert(fields: Fields) -> CanonicalRow:
    turns = with_system_turn(fields, _ACCEPTED)
    asked = prompt_turns(turns, "conversations", _ACCEPTED, spelling_of(turns))
    chosen, rejected = (_answer(fields, name) for name in ("chosen", "rejected"))
    return preference(asked, chosen, rejected, fields, _ACCEPTED)


def _answer(fields: Fields, name: str) -> list[Message]:
    value = required(fields, name, _ACCEPTED, missing="no answer")
    return answer(value, name, _ACCEPTED, spelling_of(value))


SHAREGPT_RANKING = Format(
    name="sharegpt_ranking",
    kind=Kind.PREFERENCES,
    mapping=_MAPPING,
    recognize=having("conversations", "chosen", "rejected"),
    convert=_convert,
)
