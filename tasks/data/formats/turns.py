"""One turn of a conversation, from the ways in which users write turns into the one that chat templates take."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tasks.data.formats.bad_row import BadRowError
from tasks.data.formats.tool_schemas import calls_json
from tasks.data.formats.values import is_nothing, named, parsed_json, quoted, text, whole_characters

Message = dict[str, object]
"""``role`` and ``content``; where it has them ``name``, ``tool_call_id``, and ``tool_calls`` as JSON text."""

CALL = "function_call"  # a role of ShareGPT: the content is the JSON text of the calls
_EMPTY = {"assistant": "no answer", "user": "empty prompt", "system": "empty prompt", "tool": "no tool result"}
_MEDIA = ("image", "audio", "video", "file")
_CALLS = ("tool_calls", "function_call")  # the second as OpenAI had it before
_OPEN, _CLOSE, _UNCLOSED = "<tool_call>", "</tool_call>", "unclosed tool call"
_WRITTEN = re.compile(f"{_OPEN}((?:(?!{_OPEN}).)*?){_CLOSE}", re.DOTALL)
_ROLES = {
    **{role: role for role in ("system", "user", "assistant", "tool")}, "developer": "system", "function": "tool",
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "ai", "bot"), "assistant"),
    **dict.fromkeys(("observation", "function_response"), "tool"), CALL: CALL,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Spelling:
    """The keys under which a format has a turn's role and content."""

    role: str
    content: str


OPENAI = Spelling(role="role", content="content")
FROM_VALUE = Spelling(role="from", content="value")


def message(value: object, what: str, accepted: str, spelling: Spelling = OPENAI) -> Message:
    """A turn in our form.

    Raises:
        BadRowError: it says nothing, or something that would be lost.
    """
    if not isinstance(value, Mapping):
        mend = f'write {{"{spelling.role}": ..., "{spelling.content}": ...}}'
        raise BadRowError(f"{what} is {named(value)}", accepted, mend)
    role = _role(value, what, accepted, spelling)
    content, where = value.get(spelling.content), f"{what} {spelling.content}"
    calls = next((key for key in _CALLS if not is_nothing(value.get(key))), None) if role == "assistant" else None
    if role == CALL:
        made: Message = {"role": "assistant", "content": "", "tool_calls": calls_json(content, where)}
    elif calls:
        said = "" if is_nothing(content) else _content(content, where, accepted, role)
        made = {"role": role, "content": said, "tool_calls": calls_json(value[calls], f"{what} {calls}")}
    elif spelling.content not in value:
        raise _without(value, spelling.content, what, accepted, reason=_EMPTY.get(role, "missing field"))
    else:
        made = {"role": role, "content": _content(content, where, accepted, role)}
    if len(value) > 2:
        _add_rest(made, value, what, {spelling.role, spelling.content, calls})
    return made


def _role(value: Mapping[str, object], what: str, accepted: str, spelling: Spelling) -> str:
    if spelling.role not in value:
        raise _without(value, spelling.role, what, accepted, reason="unknown role")
    given = value[spelling.role]
    role = _ROLES.get(given.lower()) if isinstance(given, str) else None
    if role is None:
        raise BadRowError(
            f"{what} has the role {quoted(given) if isinstance(given, str) else named(given)}",
            ", ".join(_ROLES), "rename the role or remove the row", reason="unknown role",
        )  # fmt: skip
    return role


def _without(value: Mapping[str, object], name: str, what: str, accepted: str, *, reason: str) -> BadRowError:
    has = ", ".join(sorted(map(str, value)))
    return BadRowError(f"{what} has no {name!r} (it has: {has})", accepted, f"add {name!r}", reason=reason)


def _content(value: object, what: str, accepted: str, role: str) -> str:
    if isinstance(value, list) and value:
        value = "".join(_part(part, f"{what}[{index}]") for index, part in enumerate(value))
    if role == "tool" and value == "":
        return ""  # a tool may have nothing to say
    if role == "assistant":
        return answer_text(value, what, accepted)
    return text(value, what, accepted, empty=_EMPTY[role])


def answer_text(value: object, what: str, accepted: str) -> str:
    """What an assistant says; calls that it writes out as text have to begin and end."""
    content = text(value, what, accepted, empty="no answer")
    if _CLOSE in content or _OPEN in content:
        _check_written_calls(content, what)
    return content


def _check_written_calls(content: str, what: str) -> None:
    for call in _WRITTEN.findall(content):
        if call.lstrip()[:1] in ("{", "["):  # some models write calls in other ways than JSON
            parsed_json(call, f"{what} {_OPEN}", reason=_UNCLOSED)
    left = _WRITTEN.sub("", content)
    for mark, missing in ((_OPEN, _CLOSE), (_CLOSE, _OPEN)):
        if mark in left:
            raise BadRowError(
                f"{what} has {mark} without {missing}", "calls that begin and end",
                "close the call or remove the row", reason=_UNCLOSED,
            )  # fmt: skip


def _part(value: object, what: str) -> str:
    """The text of one of several parts of a content."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    if isinstance(kind, str) and any(medium in kind for medium in _MEDIA):
        raise images_are_not_read(f"{what} is of type {kind!r}")
    written = value.get("text") if isinstance(value, Mapping) else None
    if kind != "text" or not isinstance(written, str):
        found = named(value) if kind is None else f"of type {quoted(str(kind))}" if kind != "text" else "without text"
        raise BadRowError(
            f"{what} is {found}", 'a string, or a list of {"type": "text", "text": "..."}', "write text",
            reason="not text",
        )  # fmt: skip
    return written


def images_are_not_read(found: str) -> BadRowError:
    """The refusal of a row that is more than text."""
    return BadRowError(
        found, "text: images, audio and video are not read", "remove the row, or train it elsewhere",
        reason="images are not read",
    )  # fmt: skip


def _add_rest(made: Message, value: Mapping[str, object], what: str, read: set[str | None]) -> None:
    """Adds a turn's name and the id of the call that it answers; refuses what else it says: it would be lost."""
    extra = []
    for key, item in value.items():
        if key in read or is_nothing(item):
            continue
        if key == "name" or (key == "tool_call_id" and made["role"] == "tool"):
            if not isinstance(item, str):
                raise BadRowError(f"{what} {key} is {named(item)}", "a string", "write a string", reason="not text")
            made[key] = whole_characters(item, f"{what} {key}")
        elif not (key == "weight" and item == 1):  # OpenAI's word for: this turn is trained, as all are
            extra.append(str(key))
    if extra:
        raise BadRowError(
            f"{what} has {', '.join(sorted(extra))}", "a role, a content, tool calls and names alone",
            "remove it or the row", reason="unknown field",
        )  # fmt: skip
