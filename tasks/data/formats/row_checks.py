"""Checks one row of a user's data against what a stage reads, and brings it into that one form."""

from collections.abc import Mapping

from tasks.data.formats.bad_row import BadRowError

Fields = Mapping[str, object]
Message = dict[str, str]

_ROLES = ("system", "user", "assistant")
_TEXT = '{"text": "..."}'
_MESSAGES = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
_PREFERENCE = '{"prompt": "...", "chosen": "...", "rejected": "..."}, each a string or a list of messages'


def check_text(fields: Fields) -> dict[str, object]:
    """A row {text}."""
    return {"text": _string(_field(fields, "text", _TEXT), "text", _TEXT)}


def check_conversation(fields: Fields) -> dict[str, object]:
    """A row {messages} with at least one answer to learn from."""
    messages = _messages(_field(fields, "messages", _MESSAGES), "messages", _MESSAGES)
    if not any(message["role"] == "assistant" for message in messages):
        raise BadRowError(
            "messages has no assistant turn", _MESSAGES, "add the answer to learn from, or remove the row"
        )
    return {"messages": messages}


def check_preference(fields: Fields) -> dict[str, object]:
    """A row {prompt, chosen, rejected, kind}: the prompt as messages, each answer as one assistant message."""
    prompt = _prompt(_field(fields, "prompt", _PREFERENCE))
    chosen = _answer(_field(fields, "chosen", _PREFERENCE), "chosen")
    rejected = _answer(_field(fields, "rejected", _PREFERENCE), "rejected")
    if chosen == rejected:
        raise BadRowError("chosen and rejected are the same", _PREFERENCE, "there is nothing to prefer: remove the row")
    kind = fields.get("kind")
    if not (kind is None or isinstance(kind, str)):
        raise BadRowError(
            f"kind is {_name(kind)}", "a string or null", "it names what is wrong with the rejected answer"
        )
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, "kind": kind}


def check_group(fields: Fields) -> str | None:
    """What a row is held out together with, where it says so."""
    group = fields.get("group")
    if not (group is None or isinstance(group, str)):
        raise BadRowError(f"group is {_name(group)}", "a string or null", "rows of one group are held out together")
    return group


def _field(fields: Fields, name: str, accepted: str) -> object:
    if name not in fields:
        columns = ", ".join(sorted(fields)) or "none"
        raise BadRowError(
            f"no field {name!r} (fields: {columns})", accepted, f"add {name!r} or rename the field that holds it"
        )
    return fields[name]


def _string(value: object, what: str, accepted: str) -> str:
    if not isinstance(value, str):
        raise BadRowError(f"{what} is {_name(value)}", accepted, "write a string")
    if not value.strip():
        raise BadRowError(f"{what} is empty", accepted, "fill it or remove the row")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadRowError(
            f"{what} has half a surrogate pair at character {error.start}", "text", "write the whole character"
        ) from error
    return value


def _messages(value: object, what: str, accepted: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        found = "is empty" if value == [] else f"is {_name(value)}"
        raise BadRowError(f"{what} {found}", accepted, "write a list of messages")
    return [_message(item, f"{what}[{index}]", accepted) for index, item in enumerate(value)]


def _message(value: object, what: str, accepted: str) -> Message:
    if not isinstance(value, Mapping):
        raise BadRowError(f"{what} is {_name(value)}", accepted, 'write {"role": ..., "content": ...}')
    for name in ("role", "content"):
        if name not in value:
            raise BadRowError(f"{what} has no {name!r} (it has: {', '.join(sorted(value))})", accepted, f"add {name!r}")
    extra = sorted(key for key in value if key not in ("role", "content") and value[key] is not None)
    if extra:
        raise BadRowError(f"{what} has {', '.join(extra)}", '"role" and "content" alone', "remove it or the row")
    if value["role"] not in _ROLES:
        raise BadRowError(
            f"{what} has the role {value['role']!r}", ", ".join(_ROLES), "rename the role or remove the row"
        )
    return {"role": str(value["role"]), "content": _string(value["content"], f"{what} content", accepted)}


def _prompt(value: object) -> list[Message]:
    if isinstance(value, str):
        return [{"role": "user", "content": _string(value, "prompt", _PREFERENCE)}]
    messages = _messages(value, "prompt", _PREFERENCE)
    if messages[-1]["role"] != "user":
        raise BadRowError(
            f"prompt ends with the role {messages[-1]['role']!r}", "a prompt that ends with a user message",
            "move the answer to chosen",
        )  # fmt: skip
    return messages


def _answer(value: object, what: str) -> list[Message]:
    if isinstance(value, str):
        return [{"role": "assistant", "content": _string(value, what, _PREFERENCE)}]
    messages = _messages(value, what, _PREFERENCE)
    if [message["role"] for message in messages] != ["assistant"]:
        roles = ", ".join(message["role"] for message in messages)
        raise BadRowError(f"{what} has messages of {roles}", "one assistant message", "move what precedes it to prompt")
    return messages


def _name(value: object) -> str:
    return "null" if value is None else f"of type {type(value).__name__}"
