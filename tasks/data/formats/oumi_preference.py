"""Preferences as Oumi has them: ``messages`` up to the answers, ``chosen.messages``, ``rejected.messages``."""

from collections.abc import Mapping

from lineage.artifact import Kind
from tasks.data.formats.bad_row import BadRowError
from tasks.data.formats.conversations import answer, prompt_turns
from tasks.data.formats.format import CanonicalRow, Evidence, Fields, Format, evidence
from tasks.data.formats.preferences import preference
from tasks.data.formats.turns import Message
from tasks.data.formats.values import named, required

_ACCEPTED = (
    '{"messages": [{"role": "user", "content": "..."}], "chosen": {"messages": [{"role": "assistant", "content": '
    '"..."}]}, "rejected": {"messages": [{"role": "assistant", "content": "..."}]}}'
)
_MAPPING = {"messages": "prompt", "chosen": "chosen", "rejected": "rejected", "kind": "kind", "tools": "tools"}


def _recognize(fields: Fields) -> Evidence | None:
    answers = [fields.get(name) for name in ("chosen", "rejected")]
    if not all(isinstance(each, dict) and "messages" in each for each in answers):
        return None
    if not isinstance(fields.get("messages"), list):
        return None
    return evidence(fields, _MAPPING, "messages is a list of {role, content}, chosen and rejected have messages")


def _convert(fields: Fields) -> CanonicalRow:
    messages = required(fields, "messages", _ACCEPTED, missing="empty prompt")
    asked = prompt_turns(messages, "messages", _ACCEPTED)
    chosen, rejected = (_answer(fields, name) for name in ("chosen", "rejected"))
    return preference(asked, chosen, rejected, fields, _ACCEPTED)


def _answer(fields: Fields, name: str) -> list[Message]:
    given = required(fields, name, _ACCEPTED, missing="no answer")
    if not isinstance(given, Mapping):
        reason = "no answer" if given is None else "not of the format"
        raise BadRowError(f"{name} is {named(given)}", _ACCEPTED, "write an object with messages", reason=reason)
    return answer(required(given, "messages", _ACCEPTED, missing="no answer"), f"{name}.messages", _ACCEPTED)


OUMI_PREFERENCE = Format(
    name="oumi_preference", kind=Kind.PREFERENCES, mapping=_MAPPING, recognize=_recognize, convert=_convert
)
