"""Lists of turns: a conversation, a prompt, an answer; in our form, in an order that a chat template can take."""

import json
from collections.abc import Mapping, Sequence
from itertools import takewhile

from tasks.data.formats.bad_row import BadRowError
from tasks.data.formats.format import Fields
from tasks.data.formats.turns import OPENAI, Message, Spelling, answer_text, message
from tasks.data.formats.values import is_blank, is_nothing, named, parsed_json, text

_START, _CALLED = "start", "calls"
_NEXT = {  # what a turn was -> what may follow
    _START: ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user",),
    _CALLED: ("tool",),
    "tool": ("tool", "assistant", "user"),
}


def listed(value: object, what: str) -> object:
    """Turns as a table of texts has them: as JSON text of a list."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        return parsed_json(value, what, reason="no messages")
    return value


def conversation(value: object, what: str, accepted: str, spelling: Spelling = OPENAI) -> list[Message]:
    """A conversation with at least one answer to learn from."""
    messages = turns(value, what, accepted, spelling, empty="no answer")
    if not any(message["role"] == "assistant" for message in messages):
        raise BadRowError(
            f"{what} has no assistant turn", accepted, "add the answer to learn from, or remove the row",
            reason="no answer",
        )  # fmt: skip
    return messages


def prompt(value: object, what: str, accepted: str) -> list[Message]:
    """What an assistant answers: a string is what a user says."""
    if not isinstance(value, list):
        return [{"role": "user", "content": text(value, what, accepted, empty="empty prompt")}]
    return prompt_turns(value, what, accepted)


def prompt_turns(value: object, what: str, accepted: str, spelling: Spelling = OPENAI) -> list[Message]:
    """Turns that end where an assistant answers."""
    messages = turns(value, what, accepted, spelling, empty="empty prompt")
    if messages[-1]["role"] not in ("user", "tool"):
        raise BadRowError(
            f"{what} ends with the role {messages[-1]['role']!r}", "a prompt that ends with a user message",
            "end it where the assistant is to answer", reason="wrong role order",
        )  # fmt: skip
    return messages


def answer(value: object, what: str, accepted: str, spelling: Spelling = OPENAI) -> list[Message]:
    """One turn of the assistant: as a string, as a turn, or as a list of this one turn."""
    if not isinstance(value, list | Mapping):
        return [{"role": "assistant", "content": answer_text(value, what, accepted)}]
    if isinstance(value, Mapping):
        messages = [message(value, what, accepted, spelling)]
    else:
        messages = _each(value, what, accepted, spelling, empty="no answer")
    if [message["role"] for message in messages] != ["assistant"]:
        roles = ", ".join(str(message["role"]) for message in messages)
        raise BadRowError(
            f"{what} has messages of {roles}", "one assistant message", "move what precedes it to prompt",
            reason="wrong role order",
        )  # fmt: skip
    return messages


def system_turn(fields: Fields, accepted: str) -> list[Message]:
    """What the column ``system`` says, where it says something."""
    system = fields.get("system")
    if is_nothing(system):
        return []
    return [{"role": "system", "content": text(system, "system", accepted, empty="empty prompt")}]


def turns(value: object, what: str, accepted: str, spelling: Spelling, *, empty: str) -> list[Message]:
    """Turns in our form and in order.

    Args:
        empty: what a row without them is counted as.
    """
    if spelling is OPENAI and _is_plain(value):
        assert isinstance(value, list)
        return value
    messages = _each(value, what, accepted, spelling, empty=empty)
    _check_order(messages, what)
    return messages


def _is_plain(value: object) -> bool:
    """Whether turns are in our form and in order as they stand: most are, and are then not looked at one by one."""
    if type(value) is not list or not value:
        return False
    expected = "user"
    contents: list[str] = []
    for turn in value:
        if type(turn) is not dict or len(turn) != 2:
            return False
        role, content = turn.get("role"), turn.get("content")
        if type(content) is not str or is_blank(content):
            return False
        if role == expected:
            expected = "assistant" if role == "user" else "user"
        elif role != "system" or contents:
            return False
        contents.append(content)
    said = "".join(contents)
    return "tool_call>" not in said and (said.isascii() or _is_utf8(said))


def _is_utf8(said: str) -> bool:
    try:
        said.encode()
    except UnicodeEncodeError:
        return False
    return True


def _each(value: object, what: str, accepted: str, spelling: Spelling, *, empty: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        found, reason = ("is empty", empty) if value == [] else (f"is {named(value)}", "no messages")
        raise BadRowError(
            f"{what} {found}", accepted, "write a list of messages", reason=empty if value is None else reason
        )
    return [message(turn, f"{what}[{index}]", accepted, spelling) for index, turn in enumerate(value)]


def _check_order(messages: Sequence[Message], what: str) -> None:
    before = _START
    for index, turn in enumerate(messages):
        role = str(turn["role"])
        if role not in _NEXT[before]:
            raise _misplaced(f"{what}[{index}]", role, before)
        before = _CALLED if "tool_calls" in turn else role
        if role == "tool" and (index + 1 == len(messages) or messages[index + 1]["role"] != "tool"):
            _check_answered(messages[: index + 1], what)


def _check_answered(messages: Sequence[Message], what: str) -> None:
    """Whether the last turns, of tools, answer the calls before them: each by its id, where all have one."""
    answered = [turn.get("tool_call_id") for turn in takewhile(lambda turn: turn["role"] == "tool", messages[::-1])]
    index = len(messages) - len(answered) - 1
    calls = [call.get("id") for call in json.loads(str(messages[index]["tool_calls"]))]
    unknown = [each for each in reversed(answered) if each is not None and each not in calls]
    missing = [each for each in calls if each not in answered]
    problem = None
    if None not in calls and unknown:
        problem = f"calls {', '.join(map(repr, calls))}, and a tool answers {unknown[0]!r}"
    elif missing and None not in (*calls, *answered):
        problem = f"calls {missing[0]!r}, which no tool answered"
    elif len(answered) < len(calls):
        problem = f"calls {len(calls)} functions, of which {len(answered)} answered"
    if problem:
        raise BadRowError(
            f"{what}[{index}] {problem}", "a tool turn for each call", "add the tool's answer or remove the row",
            reason="unclosed tool call",
        )  # fmt: skip


def _misplaced(where: str, role: str, before: str) -> BadRowError:
    expected = " or ".join(_NEXT[before])
    if before == _CALLED:
        return BadRowError(
            f"{where} has the role {role!r} after a tool call that no tool answered", f"{expected} there",
            "add the tool's answer or remove the row", reason="unclosed tool call",
        )  # fmt: skip
    place = "at the beginning" if before == _START else f"after {before!r}"
    return BadRowError(
        f"{where} has the role {role!r} {place}", f"{expected} there", "put the turns in order or remove the row",
        reason="wrong role order",
    )  # fmt: skip
