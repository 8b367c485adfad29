"""Preferences as Oumi has them: ``messages`` up to the answers, ``chosen.messages``, ``rejected.messages``."""

from collections.abc import Mapping

from lineage.artifact import Kind
from tasks.data.formats.conversations import answer, listed, prompt_turns
from tasks.data.formats.format import CanonicalRow, Fields, Format, having
from tasks.data.formats.preferences import preference
from tasks.data.formats.turns import Message
from tasks.data.formats.values import require_nothing_else, required

_ACCEPTED = (
    '{"messages": [{"role": "user", "content": "..."}], "chosen": {"messages": [{"role": "assistant", "content": '
    '"..."}]}, "rejected": {"messages": [{"role": "assistant", "content": "..."}]}}'
)
_CONVERSATION = ("messages", "conversation_id", "metadata")  # the last two name an answer
_MAPPING = {"messages": "prompt", "chosen": "chosen", "rejected": "rejected", "kind": "kind", "tools": "tools"}


def _convert(fields: Fields) -> CanonicalRow:
    messages = required(fields, "messages", _ACCEPTED, missing="empty prompt")
    asked = prompt_turns(listed(messages, "messages"), "messages", _ACCEPTED)
    chosen, rejected = (_answer(fields, name) for name in ("chosen", "rejected"))
    return preference(asked, chosen, rejected, fields, _ACCEPTED)


def _answer(fields: Fields, name: str) -> list[Message]:
    """An answer as Oumi has it, or bare: a string, a turn, or a list of this one turn."""
    given = required(fields, name, _ACCEPTED, missing="no answer")
    if not isinstance(given, Mapping) or "role" in given:
        return answer(given, name, _ACCEPTED)
    require_nothing_else(given, _CONVERSATION, name, _ACCEPTED)
    return answer(required(given, "messages", _ACCEPTED, missing="no answer"), f"{name}.messages", _ACCEPTED)


OUMI_PREFERENCE = Format(
    name="oumi_preference",
    kind=Kind.PREFERENCES,
    mapping=_MAPPING,
    recognize=having("messages", "chosen", "rejected"),
    convert=_convert,
)
