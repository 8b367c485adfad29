"""Turns in the one form that chat templates take: a message, a conversation, a prompt, an answer."""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

from tasks.data.formats.values import (
    BadRowError,
    Fields,
    calls_json,
    is_blank,
    is_nothing,
    named,
    parsed_json,
    require_nothing_else,
    required,
    text,
    whole_characters,
)

Message = dict[str, object]
"""``role`` and ``content``; where it has them ``name``, ``tool_call_id``, and ``tool_calls`` as JSON text."""


class Spelling(NamedTuple):
    """The keys under which a format has a turn's role and content."""

    role: str
    content: str


OPENAI, FROM_VALUE = Spelling("role", "content"), Spelling("from", "value")

_CALL = "function_call"  # a role of ShareGPT: the content is the JSON text of the calls
_EMPTY = {"assistant": "no answer", "user": "empty prompt", "system": "empty prompt", "tool": "no tool result"}
_MEDIA = ("image", "audio", "video", "file")
_CALLS = ("tool_calls", "function_call")  # the second as OpenAI had it before
_OPEN, _CLOSE, _UNCLOSED = "<tool_call>", "</tool_call>", "unclosed tool call"
_WRITTEN = re.compile(f"{_OPEN}((?:(?!{_OPEN}).)*?){_CLOSE}", re.DOTALL)
_ROLES = {
    **{role: role for role in ("system", "user", "assistant", "tool")}, "developer": "system", "function": "tool",
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "ai", "bot"), "assistant"),
    **dict.fromkeys(("observation", "function_response"), "tool"), _CALL: _CALL,
}  # fmt: skip
_START, _CALLED = "at the beginning", "after a tool call that no tool answered"
_NEXT = {  # what a turn was -> what may follow
    _START: ("system", "user"), "system": ("user",), "user": ("assistant",), "assistant": ("user",),
    _CALLED: ("tool",), "tool": ("tool", "assistant", "user"),
}  # fmt: skip


def listed(fields: Fields, name: str, missing: str = "missing field") -> object:
    """Turns of a required column; a table of texts has them as JSON text of a list."""
    value = required(fields, name, missing)
    if isinstance(value, str) and value.lstrip().startswith("["):
        return parsed_json(value, name, "no messages")
    return value


def conversation(value: object, what: str, spelling: Spelling = OPENAI) -> list[Message]:
    """A conversation with at least one answer to learn from."""
    messages = _turns(value, what, spelling, "no answer")
    if not any(message["role"] == "assistant" for message in messages):
        raise BadRowError(f"{what} has no assistant turn", "no answer")
    return messages


def prompt(value: object, what: str, spelling: Spelling = OPENAI) -> list[Message]:
    """Turns that end where an assistant answers; a string is what a user says."""
    if not isinstance(value, list):
        return [{"role": "user", "content": text(value, what, "empty prompt")}]
    return prompt_turns(value, what, spelling)


def prompt_turns(value: object, what: str, spelling: Spelling = OPENAI) -> list[Message]:
    """The same without strings."""
    messages = _turns(value, what, spelling, "empty prompt")
    if messages[-1]["role"] not in ("user", "tool"):
        raise BadRowError(f"{what} ends with the role {messages[-1]['role']!r}, not with 'user'", "wrong role order")
    return messages


def answer(value: object, what: str, spelling: Spelling = OPENAI) -> list[Message]:
    """One turn of the assistant: as a string, as a turn, or as a list of this one turn."""
    if not isinstance(value, list | Mapping):
        return [{"role": "assistant", "content": _answer_text(value, what)}]
    whole = isinstance(value, Mapping)
    messages = [_message(value, what, spelling)] if whole else _each(value, what, spelling, "no answer")
    if [message["role"] for message in messages] != ["assistant"]:
        roles = ", ".join(str(message["role"]) for message in messages)
        raise BadRowError(f"{what} has messages of {roles}; what precedes the answer belongs to prompt",
                          "wrong role order")  # fmt: skip
    return messages


def system_turn(fields: Fields) -> list[Message]:
    """What the column ``system`` says, where it says something."""
    system = fields.get("system")
    return [] if is_nothing(system) else [{"role": "system", "content": text(system, "system", "empty prompt")}]


def sharegpt_turns(fields: Fields) -> tuple[object, Spelling]:
    """The turns, after what the column ``system`` says, and how they are written."""
    turns, system = listed(fields, "conversations"), fields.get("system")
    spelling = spelling_of(turns)
    if is_nothing(system) or not isinstance(turns, list):
        return turns, spelling
    return [{spelling.role: "system", spelling.content: system}, *turns], spelling


def spelling_of(turns: object) -> Spelling:
    """How these turns are written, judged by the first: some sets have OpenAI's keys in ShareGPT's columns."""
    first = turns[0] if isinstance(turns, list) and turns else turns
    return OPENAI if isinstance(first, dict) and "role" in first and "from" not in first else FROM_VALUE


def _turns(value: object, what: str, spelling: Spelling, empty: str) -> list[Message]:
    """Turns in our form and in order; a row without them is counted as ``empty``."""
    if spelling is OPENAI and _is_plain(value):
        assert isinstance(value, list)
        return value
    messages = _each(value, what, spelling, empty)
    _check_order(messages, what)
    return messages


def _is_plain(value: object) -> bool:
    """Whether turns are in our form and in order as they stand: most are, and need no check one by one."""
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
    try:
        return "tool_call>" not in said and (said.isascii() or bool(said.encode()))
    except UnicodeEncodeError:
        return False


def _each(value: object, what: str, spelling: Spelling, empty: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        found = "is empty" if value == [] else f"is {named(value)}"
        raise BadRowError(f"{what} {found}", empty if value in (None, []) else "no messages")
    return [_message(turn, f"{what}[{index}]", spelling) for index, turn in enumerate(value)]


def _message(value: object, what: str, spelling: Spelling) -> Message:
    """A turn in our form; refused where it says nothing, or something that would be lost."""
    if not isinstance(value, Mapping):
        raise BadRowError(f"{what} is {named(value)}")
    said = _key(value, spelling.role, what, "unknown role")
    role = _ROLES.get(said.lower()) if isinstance(said, str) else None
    if role is None:
        found = f"{what} has the role {named(said).removeprefix('the text ')}"
        raise BadRowError(f"{found}, none of {', '.join(_ROLES)}", "unknown role")
    where = f"{what} {spelling.content}"
    calls = next((key for key in _CALLS if not is_nothing(value.get(key))), None) if role == "assistant" else None
    if role == _CALL:
        content = value.get(spelling.content)
        made: Message = {"role": "assistant", "content": "", "tool_calls": calls_json(content, where)}
    elif calls:
        content = value.get(spelling.content)
        written = "" if is_nothing(content) else _content(content, where, role)
        made = {"role": role, "content": written, "tool_calls": calls_json(value[calls], f"{what} {calls}")}
    else:
        made = {"role": role, "content": _content(_key(value, spelling.content, what, _EMPTY[role]), where, role)}
    if len(value) > 2:
        _add_rest(made, value, what, {spelling.role, spelling.content, calls})
    return made


def _key(value: Mapping[str, object], name: str, what: str, missing: str) -> object:
    if name not in value:
        raise BadRowError(f"{what} has no {name!r} (it has: {', '.join(sorted(map(str, value)))})", missing)
    return value[name]


def _content(value: object, what: str, role: str) -> str:
    if isinstance(value, list) and value:
        value = "".join(_part(part, f"{what}[{index}]") for index, part in enumerate(value))
    if role == "tool" and value == "":
        return ""  # a tool may have nothing to say
    return _answer_text(value, what) if role == "assistant" else text(value, what, _EMPTY[role])


def _answer_text(value: object, what: str) -> str:
    """What an assistant says; calls that it writes out as text have to begin and end."""
    content = text(value, what, "no answer")
    if _CLOSE in content or _OPEN in content:
        for call in _WRITTEN.findall(content):
            if call.lstrip()[:1] in ("{", "["):  # some models write calls in other ways than JSON
                parsed_json(call, f"{what} {_OPEN}", _UNCLOSED)
        left = _WRITTEN.sub("", content)
        for mark, missing in ((_OPEN, _CLOSE), (_CLOSE, _OPEN)):
            if mark in left:
                raise BadRowError(f"{what} has {mark} without {missing}", _UNCLOSED)
    return content


def _part(value: object, what: str) -> str:
    """The text of one of several parts of a content."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    if isinstance(kind, str) and any(medium in kind for medium in _MEDIA):
        raise images_are_not_read(f"{what} is of type {kind!r}")
    written = value.get("text") if isinstance(value, Mapping) and kind == "text" else None
    if not isinstance(written, str):
        raise BadRowError(f'{what} is {named(value)}, not {{"type": "text", "text": "..."}}', "not text")
    return written


def images_are_not_read(found: str) -> BadRowError:
    """The refusal of a row that is more than text."""
    return BadRowError(found, "images are not read", "text: images, audio and video are not read")


def _add_rest(made: Message, value: Mapping[str, object], what: str, read: set[str | None]) -> None:
    """Adds a turn's name and the id of the call that it answers; refuses what else it says: it would be lost."""
    rest = {key: item for key, item in value.items() if key not in read and not is_nothing(item)}
    if rest.get("weight") == 1:  # OpenAI's word for: this turn is trained, as all are
        del rest["weight"]
    for key in [key for key in rest if key == "name" or (key == "tool_call_id" and made["role"] == "tool")]:
        item = rest.pop(key)
        if not isinstance(item, str):
            raise BadRowError(f"{what} {key} is {named(item)}", "not text")
        made[key] = whole_characters(item, f"{what} {key}")
    require_nothing_else(rest, (), what)


def _check_order(messages: Sequence[Message], what: str) -> None:
    before = _START
    for index, turn in enumerate(messages):
        role = str(turn["role"])
        if role not in _NEXT[before]:
            after = before if before in (_START, _CALLED) else f"after {before!r}"
            found = f"{what}[{index}] has the role {role!r} {after}, not {' or '.join(_NEXT[before])}"
            raise BadRowError(found, _UNCLOSED if before == _CALLED else "wrong role order")
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
        raise BadRowError(f"{what}[{index}] {problem}", _UNCLOSED)
