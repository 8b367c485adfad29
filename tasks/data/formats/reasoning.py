"""A problem, the thinking that led to a solution, and the solution: the assistant thinks aloud, then answers."""

from collections.abc import Mapping

from lineage.artifact import Kind
from tasks.data.formats.bad_row import BadRowError
from tasks.data.formats.conversations import answer, system_turn
from tasks.data.formats.format import CanonicalRow, Fields, Format, having
from tasks.data.formats.values import one_of, required, text

_ACCEPTED = '{"problem": "...", "thinking": "...", "solution": "..."}'
_PROBLEM, _THINKING, _SOLUTION = ("problem", "question"), ("thinking", "reasoning"), ("solution", "answer")
_MAPPING: Mapping[str, str] = {
    **dict.fromkeys(_PROBLEM, "the user's turn"),
    **dict.fromkeys(_THINKING, "the assistant's turn, within <think>"),
    **dict.fromkeys(_SOLUTION, "the assistant's turn, below its thinking"),
    "system": "the system's turn",
}


def _convert(fields: Fields) -> CanonicalRow:
    problem = _text(fields, _PROBLEM, "empty prompt")
    thinking, solution = _text(fields, _THINKING, "no thinking"), _text(fields, _SOLUTION, "no answer")
    if "</think>" in thinking or "<think>" in solution:
        raise BadRowError(
            "the thinking or the solution has a <think> of its own", "plain text", "take the marks off",
        )  # fmt: skip
    messages = [*system_turn(fields, _ACCEPTED), {"role": "user", "content": problem}]
    messages += answer(f"<think>\n{thinking}\n</think>\n\n{solution}", "solution", _ACCEPTED)
    return {"messages": messages}


def _text(fields: Fields, either: tuple[str, str], empty: str) -> str:
    name = one_of(fields, either, _ACCEPTED)
    return text(required(fields, name, _ACCEPTED, missing=empty), name, _ACCEPTED, empty=empty)


REASONING = Format(
    name="reasoning",
    kind=Kind.CONVERSATIONS,
    mapping=_MAPPING,
    recognize=having(_PROBLEM, _THINKING, _SOLUTION),
    convert=_convert,
)
