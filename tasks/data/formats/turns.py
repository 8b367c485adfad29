"""Checks and conversion of values, tools and turns in rows of any format, to the form that chat templates take."""

import ast
import json
import re
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import NamedTuple

from tasks.data.kinds import UNTRAINED
from tasks.data.reading.chunk import Unread

Fields = Mapping[str, object]
CanonicalRow = dict[str, object]  # a row with the columns of its kind, without ``row_id`` and nulls

_SHOWN = 40  # characters of a text in a message
_SPACES = "".join(character for character in map(chr, range(0x3001)) if character.isspace())
_UNSEEN = _SPACES + "\u200b\u200c\u200d\u2060\ufeff"  # and characters without width
COMPLETION = ("completion", "response")  # columns of an answer
SYSTEM = ("system", "system_prompt")  # columns that hold the first turn of the prompt
_BAD_TOOLS, _BAD_CALL, _UNCLOSED = "tools that cannot be read", "tool call that cannot be read", "unclosed tool call"
_OF_TOOLS = ("arguments", "parameters", "input_schema", "tools", "functions")  # keys of what calls and tools give
_MAY_BE_NULL = ("default", "const")  # keys of a JSON schema whose null says something
_CANONICAL = json.JSONEncoder(sort_keys=True, ensure_ascii=False)
_OUTER = ("type", "id", "index")  # keys beside a function; ``index`` comes from streamed responses


class BadRowError(Exception):
    """The refusal of one row.

    Args:
        found: the problem, such as ``output is the number 42``.
        reason: its category for counts, such as ``no answer``.
        accepted: what is accepted; empty: ``Format.convert`` fills in a row of the format.
    """

    def __init__(self, found: str, reason: str = "not of the format", accepted: str = "", remedy: str = "") -> None:
        found = found.encode(errors="backslashreplace").decode()  # it may quote invalid characters
        super().__init__(found, reason, accepted, remedy)
        self.found, self.reason, self.accepted = found, reason, accepted
        self.remedy = remedy or "correct or remove the row"

    def __str__(self) -> str:
        return f"{self.found}; accepted: {self.accepted}; {self.remedy}"


def named(value: object) -> str:
    """Describes an unexpected value in a message."""
    match value:
        case None:
            return "null"
        case bool():
            return f"the boolean {str(value).lower()}"
        case int() if value.bit_length() > 64:
            return "a number of more than 64 bits"
        case int() | float():
            return f"the number {value}"
        case str():
            return f"the text {value if len(value) <= _SHOWN else value[:_SHOWN] + '...'!r}"
        case list() | tuple():
            return "a list"
        case Mapping():
            return "an object"
        case Unread():
            return f"of Arrow's type {value.type}, which is not read"
    return f"of type {type(value).__name__}"


def is_nothing(value: object) -> bool:
    """Whether an optional field is unset: tables have null or an empty value for missing fields."""
    return value is None or value == "" or value == [] or value == {}


def is_blank(text: str) -> bool:
    """Whether a text has no visible characters."""
    return not text.strip(_UNSEEN)


def required(fields: Fields, name: str, missing: str = "missing field") -> object:
    """A required field; a row without it is counted as ``missing``."""
    if name not in fields:
        raise BadRowError(f"no field {name!r} (fields: {', '.join(sorted(map(str, fields))) or 'none'})", missing)
    return fields[name]


def one_of(fields: Fields, names: Sequence[str]) -> str:
    """The name of a column that a row uses, among alternatives."""
    used = [name for name in names if not is_nothing(fields.get(name))]
    if len(used) > 1:
        raise BadRowError(f"{' and '.join(used)} are both there")
    return (used or [name for name in names if name in fields] or list(names))[0]


def require_nothing_else(
    value: Mapping[str, object], known: Container[str | None], what: str, remedy: str = ""
) -> None:
    """Refuses unknown keys, which would be lost."""
    extra = sorted(str(key) for key, item in value.items() if key not in known and not is_nothing(item))
    if extra:
        raise BadRowError(f"{what} has {', '.join(extra)}", "unknown field", remedy=remedy)


def text(value: object, what: str, empty: str) -> str:
    """A non-empty text; a row without it is counted as ``empty``."""
    if not isinstance(value, str):
        raise BadRowError(f"{what} is {named(value)}", empty if value is None else "not text")
    if is_blank(value):
        raise BadRowError(f"{what} is empty", empty)
    return whole_characters(value, what)


def text_of(fields: Fields, empty: str, *names: str) -> str:
    """The text of a required column with alternative names."""
    name = one_of(fields, names)
    return text(required(fields, name, empty), name, empty)


def optional_name(value: object, what: str, reason: str = "not text") -> str | None:
    """An optional short text."""
    if not (value is None or isinstance(value, str)):
        raise BadRowError(f"{what} is {named(value)}", reason, "a string or null")
    return value or None


def whole_characters(value: str, what: str) -> str:
    """Refuses a text with half a surrogate pair, which JSON can express but UTF-8 cannot."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        place = f"at character {error.start}"
        raise BadRowError(f"{what} has half a surrogate pair {place}", "half a surrogate pair") from error
    return value


def parsed_json(value: str, what: str, reason: str) -> object:
    """Parses a JSON text in a column."""
    try:
        return json.loads(value, parse_constant=_refuse_constant, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise BadRowError(f"{what} is not JSON: {error}", reason) from error


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {twice!r} is there twice")
    return made


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def as_json(value: object, what: str) -> str:
    """JSON with keys in the user's order, since a model reads or writes it as text."""
    try:
        return whole_characters(json.dumps(value, ensure_ascii=False, allow_nan=False, default=_not_json), what)
    except (TypeError, ValueError, RecursionError) as error:
        cause = str(error).partition(": ")[0]  # Python 3.13 adds the value
        raise BadRowError(f"{what} is not a JSON value: {cause}") from error


def _not_json(value: object) -> object:
    raise TypeError(named(value))


def tool_nulls(value: object, where: str = "", *, inside: bool = False) -> Iterator[str]:
    """The places of nulls in the arguments of calls, and in tools, that objects of a row hold.

    `datasets`, polars and pandas give all objects of a file the same keys, with nulls for those that a call lacks.
    Arguments that are JSON text have only their own keys.
    """
    if isinstance(value, list):
        for index, each in enumerate(value):
            yield from tool_nulls(each, f"{where}[{index}]", inside=inside)
    elif isinstance(value, Mapping):
        for key, each in value.items():
            place = f"{where}.{key}".lstrip(".")
            if inside and each is None and key not in _MAY_BE_NULL:
                yield place
            yield from tool_nulls(each, place, inside=inside or _has_arguments(value, key))


def without_tool_nulls(value: object, *, inside: bool = False) -> object:
    """The same value without any null inside the arguments of calls and tools."""
    if isinstance(value, list):
        return [without_tool_nulls(each, inside=inside) for each in value]
    if not isinstance(value, Mapping):
        return value
    return {
        key: without_tool_nulls(each, inside=inside or _has_arguments(value, key))
        for key, each in value.items()
        if not (inside and each is None)
    }


def _has_arguments(value: Mapping[str, object], key: str) -> bool:
    return key in _OF_TOOLS or (key == "input" and value.get("type") == _TOOL_USE)


def canonical(value: object) -> str:
    """A canonical text, the same for equal rows."""
    return _CANONICAL.encode(value)


def add_tools(row: CanonicalRow, fields: Fields, name: str = "tools") -> CanonicalRow:
    """Adds the tools in a user's column, if any, to a row whose system prompt does not list them already."""
    listed = [] if is_nothing(fields.get(name)) else _items(fields[name], name, _BAD_TOOLS, _BAD_TOOLS)
    tools = [_function(tool, f"{name}[{index}]", _BAD_TOOLS) for index, tool in enumerate(listed)]
    if tools:
        bare = [
            {"parameters" if key == "input_schema" else key: item for key, item in function.items()
             if outer is not function or key != "type"}
            for outer, function in tools
        ]  # fmt: skip
        if _are_listed(row, fields, [str(function["name"]) for function in bare]):
            return row
        row["tools"] = as_json([{"type": "function", "function": each} for each in bare], name)
    return row


def _are_listed(row: CanonicalRow, fields: Fields, names: Sequence[str]) -> bool:
    """Whether the system prompt lists tools of these names as text within ``<tools>``, as rows of Hermes do.

    Prompts alone keep theirs, which reward functions read.
    """
    turns = row.get("messages", row.get("prompt"))
    assert isinstance(turns, list)
    if row.keys() <= {"prompt", "columns"}:
        return False
    found = turns[0]["content"] if turns[0]["role"] == "system" else fields.get(one_of(fields, SYSTEM))
    _, begun, listed = str(found).partition("<tools>")
    return bool(begun) and "</tools>" in listed and all(name in listed for name in names)


def calls_json(value: object, what: str) -> str:
    """JSON text of at least one call; invalid JSON is counted as unclosed, since it is mostly truncated."""
    calls = _items(value, what, _BAD_CALL, _UNCLOSED)
    if not calls:
        raise BadRowError(f"{what} is empty", "no answer")
    return as_json([_call(call, f"{what}[{index}]") for index, call in enumerate(calls)], what)


def _call(value: object, what: str) -> Mapping[str, object]:
    outer, function = _function(value, what, _BAD_CALL)
    require_nothing_else(function, ("name", "arguments", *(_OUTER if outer is function else ())), what)
    name = optional_name(outer.get("id"), f"{what} id", _BAD_CALL)
    arguments = function.get("arguments")
    if isinstance(arguments, str) and not is_blank(arguments):
        arguments = parsed_json(arguments, f"{what} arguments", _UNCLOSED)
    if is_nothing(arguments) or (isinstance(arguments, str) and is_blank(arguments)):
        arguments = {}  # a call without arguments: null, "null", "", "[]"
    if not isinstance(arguments, Mapping):
        raise BadRowError(f'{what} arguments is {named(arguments)}, not an object such as {{"a": 1}}', _BAD_CALL)
    call = {"name": function["name"], "arguments": arguments}
    return {"type": "function", **({"id": name} if name else {}), "function": call}


def _items(value: object, what: str, reason: str, not_json: str) -> list[object]:
    """The items of a list, of a single object, or of their JSON text."""
    if isinstance(value, str):
        value = parsed_json(value, what, not_json)
    if not isinstance(value, Mapping | list):
        raise BadRowError(f'{what} is {named(value)}, not a list of {{"name": ...}}', reason)
    return [value] if isinstance(value, Mapping) else value


def _function(value: object, what: str, reason: str) -> tuple[Mapping[str, object], Mapping[str, object]]:
    """A tool or call, and its function: the same object if there is no wrapper."""
    if not isinstance(value, Mapping):
        raise BadRowError(f"{what} is {named(value)}", reason)
    if value.get("type") not in (None, "function"):
        raise BadRowError(f"{what} type is {named(value['type'])}, not 'function'", reason)
    function = value.get("function", value)
    if not (isinstance(function, Mapping) and isinstance(function.get("name"), str) and function["name"]):
        raise BadRowError(f'{what} names no function, as in {{"name": "f"}}', reason)
    if function is not value:
        require_nothing_else(value, ("function", *_OUTER), what)
    return value, function


Message = dict[str, object]
"""``role`` and ``content``; optionally ``name``, ``tool_call_id``, and ``tool_calls`` as JSON text."""


class Spelling(NamedTuple):
    """The keys of a turn's role and content in a format."""

    role: str
    content: str


# What a turn has, and Oumi's object of turns.
_OF_TURN = ({"role", "content"}, {"role", "tool_calls"}, {"from", "value"}, {"messages"})
_AS_PYTHON = re.compile(r"\[\s*\{\s*'")
_AS_TURNS = re.compile(r"""\[\s*\{\s*["'](?:role|content|from|value)["']\s*:""")
OPENAI, FROM_VALUE = Spelling("role", "content"), Spelling("from", "value")

_CALL_ROLE = "function_call"  # ShareGPT's role whose content is the JSON text of calls
_EMPTY = {"assistant": "no answer", "user": "empty prompt", "system": "empty prompt", "tool": "no tool result"}
_MEDIA = ("image", "audio", "video", "file")
_TOOL_USE, _TOOL_RESULT = "tool_use", "tool_result"  # parts of Anthropic's messages
_TEXTS = ("text", "input_text", "output_text", "reasoning_text", "summary_text")
# Items of OpenAI's Responses -> what is read of them.
_ITEMS: Mapping[str, tuple[str, ...]] = {
    "message": (), "function_call": ("call_id", "name", "arguments"), "function_call_output": ("call_id", "output"),
    "reasoning": ("content", "summary", "encrypted_content"),
}  # fmt: skip
THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # keys of what the assistant thinks, as vLLM and TRL have it
# Keys that say whether a turn, or as columns a row, is trained: of OpenAI, LLaMA-Factory, ms-swift and axolotl.
_WEIGHTS, _SWITCHES = ("weight", "loss_weight"), ("loss", "train", "training")
_OTHER_KEYS = (
    "remove it from the turn; what says whether the turn is trained is called weight (0 or 1), what the assistant "
    "thinks reasoning_content"
)
_NO_LOSS = "no loss"  # key of a turn of the assistant that is not trained, until ``without_marks``
_NO_THOUGHTS = frozenset({"on", "off", "true", "false", "yes", "no", "0", "1"})  # whether there was thinking, not what
_THINK, _THOUGHT_ENDS = "<think>", "</think>"
_CALLS = ("tool_calls", "function_call")  # the second is OpenAI's former name
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
PYTHONS_CALL = re.compile(rf"{_OPEN}[\s\[{{]*'")
_RESPONSE = re.compile(r"<tool_response>((?:(?!</?tool_response>).)*)</tool_response>", re.DOTALL)
_RESPONSES = re.compile(rf"\s*(?:{_RESPONSE.pattern}\s*)+", re.DOTALL)
_PYTHONIC = re.compile(r"\s*\[\s*[\w.][^\[\]()]*\(.*\)\s*\]\s*", re.DOTALL)  # [f(a=1)], as ToolACE has it
_WRITTEN = re.compile(f"{_OPEN}((?:(?!{_OPEN}).)*?){_CLOSE}", re.DOTALL)
ROLES = {
    **{role: role for role in ("system", "user", "assistant", "tool")}, "developer": "system", "function": "tool",
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "ai", "bot"), "assistant"),
    **dict.fromkeys(("observation", "function_response"), "tool"), _CALL_ROLE: _CALL_ROLE,
}  # fmt: skip
_WRITTEN_BY_MODEL = ("assistant", _CALL_ROLE)
_START, _CALLED = "at the beginning", "after a tool call that no tool answered"
_WROTE_CALL = "after a call in its text"  # a result of a tool may follow or not
_NEXT = {  # turn -> turns that may follow
    _START: ("system", "user"), "system": ("user",), "user": ("assistant",), "assistant": ("user",),
    _CALLED: ("tool",), "tool": ("tool", "assistant", "user"), _WROTE_CALL: ("tool", "user"),
}  # fmt: skip

_TRANSCRIBED = {"Human": "user", "Assistant": "assistant", "System": "system"}  # in transcripts
_TURN = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant|System):")
_WRITTEN_TURNS = re.compile(
    r"\W*(?:System\s*:.*?\W)?(Human|User)\s*:.*?[\s#>](Assistant|AI|Bot|GPT)\s*:", re.DOTALL | re.IGNORECASE
)
_TRANSCRIPT = re.compile(r"\s*(?:Human:.*?\n\nAssistant:|System:.*?\n\nHuman:.*?\n\nAssistant:)", re.DOTALL)


def listed(fields: Fields, name: str, missing: str = "missing field") -> object:
    """The turns of a required column, which may be JSON text of a list."""
    value = required(fields, name, missing)
    if isinstance(value, str) and value.lstrip().startswith("["):
        found = turns_in_text(value) if _AS_PYTHON.match(value.lstrip()) else None
        return parsed_json(value, name, "no messages") if found is None else found
    return value


def turns_in_text(value: object) -> object | None:
    """Turns from their JSON text, or from that of Python's list, as a CSV of pandas has them; None: it is no such text.

    Raises:
        BadRowError: they are written in another way, such as NumPy's.
    """
    written = value.strip() if isinstance(value, str) else ""
    if written[:1] + written[-1:] not in ("[]", "{}"):
        return None
    for parsed in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            found: object = parsed(written)
            turns = found if isinstance(found, list) else [found]
            are_turns = turns and all(isinstance(each, dict) and _has_turn(each) for each in turns)
            return found if are_turns else None
    if _AS_TURNS.match(written):
        found_ = f"{named(written)} is turns, and neither JSON nor a list of Python"
        raise BadRowError(found_, "no messages", "a list, or its JSON text", "write the column by json.dumps")
    return None


def with_turns(fields: Fields, columns: Container[str]) -> Fields:
    """A row with the turns of prompt and answers that are text; after a prompt of text, answers are text.

    Args:
        columns: that its format reads.
    """
    asked = turns_in_text(fields.get("prompt")) if "prompt" in columns else None
    turns = {"prompt": asked} if isinstance(asked, list) else {}
    if isinstance(turns.get("prompt", fields.get("prompt")), str):
        return fields
    names = ("chosen", "rejected", *(COMPLETION if "prompt" in columns else ()))
    found = {name: turns_in_text(fields.get(name)) for name in names if name in columns}
    turns |= {name: value for name, value in found.items() if value is not None}
    return {**fields, **turns} if turns else fields


def _has_turn(fields: Mapping[str, object]) -> bool:
    return any(keys <= fields.keys() for keys in _OF_TURN)


def conversation(value: object, what: str, spelling: Spelling = OPENAI) -> list[Message]:
    """A conversation with at least one assistant turn."""
    messages = _turns(value, what, spelling, "no answer")
    if not any(message["role"] == "assistant" for message in messages):
        raise BadRowError(f"{what} has no assistant turn", "no answer")
    return messages


def prompt(value: object, what: str) -> list[Message]:
    """The turns of a prompt, which end before an assistant's turn; a string is a user's turn."""
    if not isinstance(value, list):
        return [{"role": "user", "content": text(value, what, "empty prompt")}]
    return prompt_turns(value, what)


def prompt_turns(value: object, what: str, spelling: Spelling = OPENAI) -> list[Message]:
    """``prompt`` without strings."""
    messages = _turns(value, what, spelling, "empty prompt")
    if messages[-1]["role"] not in ("user", "tool"):
        raise BadRowError(f"{what} ends with the role {messages[-1]['role']!r}, not with 'user'", "wrong role order")
    return messages


def answer(value: object, what: str, spelling: Spelling = OPENAI) -> list[Message]:
    """The assistant's answer: a string, a turn, or a list of turns from its first one to its last one.

    Between them may be what tools or the user say, such as the result of a call, which is not trained.
    """
    if not isinstance(value, list | Mapping):
        return [{"role": "assistant", "content": _answer_text(value, what)}]
    whole = isinstance(value, Mapping)
    messages = [_message(value, what, spelling)] if whole else _each(value, what, spelling, "no answer")
    if {messages[0]["role"], messages[-1]["role"]} != {"assistant"}:
        roles = ", ".join(str(message["role"]) for message in messages)
        raise BadRowError(f"{what} has messages of {roles}; what precedes the answer belongs to prompt, and it ends "
                          "with the assistant", "wrong role order")  # fmt: skip
    _check_order(messages, what, before="user")
    return messages


def with_system_column(row: CanonicalRow, fields: Fields) -> CanonicalRow:
    """A row of chat with the turn of the user's column ``system`` or ``system_prompt``, if one is set."""
    column = one_of(fields, SYSTEM)
    return with_system(row, fields.get(column), column)


def with_system(row: CanonicalRow, value: object, column: str) -> CanonicalRow:
    """A row of chat with the system's turn that a column says, if any: a text, or Gemini's object with parts."""
    if is_nothing(value) or str(value).isspace():
        return row
    parts = value.get("parts") if isinstance(value, Mapping) else None
    content = _content(parts if parts else value, column, "system")
    name = "messages" if "messages" in row else "prompt"
    turns = row[name]
    assert isinstance(turns, list), "rows of text have no turns"
    if turns[0]["role"] != "system":
        return {**row, name: [{"role": "system", "content": content}, *turns]}
    if turns[0]["content"] != content:
        raise BadRowError(
            f"the column {column} and the first turn are two system prompts", "two system prompts",
            "one system prompt, in the column or in the turns", "remove one of them",
        )  # fmt: skip
    return row


def spelling_of(turns: object) -> Spelling:
    """The spelling of turns, detected from the first: some data sets use OpenAI's keys in ShareGPT's columns."""
    first = turns[0] if isinstance(turns, list) and turns else turns
    return OPENAI if isinstance(first, dict) and "role" in first and "from" not in first else FROM_VALUE


def _turns(value: object, what: str, spelling: Spelling, empty: str) -> list[Message]:
    """Turns in our form and in valid order; a row without them is counted as ``empty``."""
    if spelling is OPENAI and _is_plain(value):
        assert isinstance(value, list)
        return value
    messages = _each(value, what, spelling, empty)
    _check_order(messages, what)
    return messages


def _is_plain(value: object) -> bool:
    """Whether turns are already in our form and in order, as most are: a fast path."""
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
    joined = "".join(contents)
    try:
        return "tool_call>" not in joined and (joined.isascii() or bool(joined.encode()))
    except UnicodeEncodeError:
        return False


def _each(value: object, what: str, spelling: Spelling, empty: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        found = "is empty" if value == [] else f"is {named(value)}"
        raise BadRowError(f"{what} {found}", empty if value in (None, []) else "no messages")
    return [
        _message(part, f"{what}[{index}]", spelling)
        for index, turn in enumerate(_of_items(value, what))
        for part in _of_parts(turn, f"{what}[{index}]", spelling)
    ]


def _of_items(items: Sequence[object], what: str) -> Sequence[object]:
    """The turns of items of OpenAI's Responses; a thought, a text and calls that follow each other are one turn."""
    if not any(isinstance(item, Mapping) and str(item.get("type")) in _ITEMS for item in items):
        return items
    turns = list[object]()
    for place, item in enumerate(items):
        kind = item.get("type") if isinstance(item, Mapping) else None
        if not isinstance(item, Mapping) or kind not in (*_ITEMS, None):
            turns.append(item)
            continue
        turn = {key: value for key, value in item.items() if key not in ("type", "id", "status")}
        if read := _ITEMS.get(str(kind)):
            require_nothing_else(turn, read, f"{what}[{place}]")
            turn = _of_item(str(kind), turn, f"{what}[{place}]")
        before = turns[-1] if turns else None
        calls = turn.get("tool_calls")
        if isinstance(before, dict) and before.get("role") == turn.get("role") == "assistant":
            made = before.get("tool_calls")
            if isinstance(calls, list) or (before.get("content") is None and made is None):
                both = [*(made if isinstance(made, list) else []), *(calls if isinstance(calls, list) else [])]
                turns[-1] = {**before, **turn, **({"tool_calls": both} if both else {})}
                continue
        turns.append(turn)
    return turns


def _of_item(kind: str, item: Mapping[str, object], what: str) -> dict[str, object]:
    """The turn of a call, of its result, or of a thought alone."""
    if kind == "function_call_output":
        return {"role": "tool", "content": item.get("output") or "", "tool_call_id": item.get("call_id")}
    if kind == "function_call":
        call = {"id": item.get("call_id"), "name": item.get("name"), "arguments": item.get("arguments")}
        return {"role": "assistant", "tool_calls": [call]}
    parts = item.get("content") or item.get("summary")
    if is_nothing(parts):
        return {"role": "assistant"}
    listed = parts if isinstance(parts, list) else [parts]
    thought = "\n".join(_part(part, f"{what}[{index}]") for index, part in enumerate(listed))
    return {"role": "assistant", "reasoning_content": thought}


def of_gemini(contents: object, what: str) -> list[object]:
    """Turns of Gemini's ``contents``, whose parts are texts, calls and results, as those of Anthropic's messages."""
    if not isinstance(contents, list):
        raise BadRowError(f"{what} is {named(contents)}", "no messages")
    turns = list[object]()
    for place, turn in enumerate(contents):
        where = f"{what}[{place}]"
        if not isinstance(turn, Mapping) or not isinstance(turn.get("parts"), list):
            raise BadRowError(f"{where} has no list 'parts'", "no messages")
        parts = [_of_gemini(part, f"{where} parts[{index}]") for index, part in enumerate(turn["parts"])]
        is_result = any(isinstance(part, Mapping) and part.get("type") == _TOOL_RESULT for part in parts)
        role = (
            "user" if is_result else {"model": "assistant"}.get(str(turn.get("role", "user")), turn.get("role", "user"))
        )
        turns.append({**{key: value for key, value in turn.items() if key != "parts"}, "role": role, "content": parts})
    return turns


def _of_gemini(part: object, what: str) -> object:
    if not isinstance(part, Mapping):
        return part
    found = [key for key in part if key not in ("thoughtSignature", "thought_signature", "thought")]
    key = found[0] if len(found) == 1 else ""
    value, name = part.get(key), key.replace("_", "").lower()
    if name in ("inlinedata", "filedata"):
        raise images_are_not_read(f"{what} has {key}")
    if name in ("functioncall", "functionresponse") and isinstance(value, Mapping):
        if name == "functioncall":
            require_nothing_else(value, ("id", "name", "args"), f"{what} {key}")
            return {"type": _TOOL_USE, "id": value.get("id"), "name": value.get("name"), "input": value.get("args")}
        require_nothing_else(value, ("id", "name", "response"), f"{what} {key}")
        result = value.get("response")
        content = result if isinstance(result, str) else as_json(result, f"{what} {key}")
        return {"type": _TOOL_RESULT, "tool_use_id": value.get("id"), "content": content}
    if key != "text":
        raise BadRowError(f"{what} has {', '.join(map(str, part)) or 'nothing'}", "not text")
    return {"type": "thinking", "thinking": value} if part.get("thought") else {"text": value}


def _of_parts(turn: object, what: str, spelling: Spelling) -> list[object]:
    """The turns of one with calls or results within its content, as Anthropic and Hermes write them, as OpenAI does."""
    if not isinstance(turn, Mapping):
        return [turn]
    parts, role = turn.get(spelling.content), turn.get(spelling.role)
    if isinstance(parts, str) and ROLES.get(str(role).lower()) == "tool" and _RESPONSES.fullmatch(parts):
        return [{**turn, spelling.content: each.strip()} for each in _RESPONSE.findall(parts)]  # templates mark them
    if not isinstance(parts, list):
        return [turn]
    of_kind: dict[str, list[Mapping[str, object]]] = {_TOOL_USE: [], _TOOL_RESULT: []}
    rest = list[object]()
    for part in parts:
        (of_kind.get(str(part.get("type")), rest) if isinstance(part, Mapping) else rest).append(part)
    calls, answers = of_kind.values()
    if not (calls or answers):
        return [turn]
    if role != ("assistant" if calls else "user") or (calls and answers):
        found = " and ".join(kind for kind, found in of_kind.items() if found)
        accepted = f"{_TOOL_USE} of the assistant, {_TOOL_RESULT} of the user"
        raise BadRowError(f"{what} has the role {named(role)} and {found}", _BAD_CALL, accepted)
    if calls:
        called = [{"id": part.get("id"), "name": part.get("name"), "arguments": part.get("input")} for part in calls]
        return [{**turn, spelling.content: rest or None, "tool_calls": called}]
    answered = [
        {spelling.role: "tool", spelling.content: part.get("content") or "", "tool_call_id": part.get("tool_use_id")}
        for part in answers
    ]
    return [*answered, *([{**turn, spelling.content: rest}] if rest else [])]


def _message(value: object, what: str, spelling: Spelling) -> Message:
    """A turn in our form; refuses empty turns and unknown keys."""
    if not isinstance(value, Mapping):
        raise BadRowError(f"{what} is {named(value)}")
    found = _key(value, spelling.role, what, "unknown role")
    role = ROLES.get(found.lower()) if isinstance(found, str) else None
    if role is None:
        found = f"{what} has the role {named(found).removeprefix('the text ')}"
        raise BadRowError(f"{found}, none of {', '.join(ROLES)}", "unknown role")
    where = f"{what} {spelling.content}"
    thought = thought_of(value, what) if role in _WRITTEN_BY_MODEL and len(value) > 2 else None
    calls = next((key for key in _CALLS if not is_nothing(value.get(key))), None) if role == "assistant" else None
    if role == _CALL_ROLE:
        content = value.get(spelling.content)
        made: Message = {"role": "assistant", "content": "", "tool_calls": calls_json(content, where)}
    elif calls:
        content = value.get(spelling.content)
        written = "" if is_nothing(content) else _content(content, where, role)
        made = {"role": role, "content": written, "tool_calls": calls_json(value[calls], f"{what} {calls}")}
    else:
        made = {"role": role, "content": _content(_key(value, spelling.content, what, _EMPTY[role]), where, role)}
    if thought:
        made["content"] = with_thought(str(made["content"]), thought.text, f"{what} {thought.key}")
    if len(value) > 2:
        _add_rest(
            made,
            value,
            what,
            {spelling.role, spelling.content, calls, *(THOUGHTS if role in _WRITTEN_BY_MODEL else ())},
        )
    return made


class Thought(NamedTuple):
    """What the assistant thinks, and the key or column that has it."""

    key: str
    text: str


def thought_of(fields: Fields, what: str) -> Thought | None:
    """The thought of a message or row; under several keys it must be the same.

    Raises:
        BadRowError: there are two, or a word that says whether there was thinking instead of it.
    """
    there = [key for key in THOUGHTS if not is_nothing(fields.get(key)) and not str(fields[key]).isspace()]
    found = [Thought(key, text(fields[key], f"{what} {key}".lstrip(), "no thinking")) for key in there]
    if len({each.text.strip() for each in found}) > 1:
        keys = " and ".join(each.key for each in found)
        raise BadRowError(f"{what or 'the row'} has {keys}, which differ", "two thoughts", "the same thought in both")
    if found and found[0].text.strip().lower() in _NO_THOUGHTS:
        place = f"{what} {found[0].key}".lstrip()
        raise BadRowError(f"{place} is {named(found[0].text)}, which is no thought", "no thinking", "what was thought")
    return found[0] if found else None


def with_thought_column(turns: list[Message], fields: Fields) -> list[Message]:
    """Turns with the thought of the user's column, if one is set, in their only answer."""
    thought = thought_of(fields, "")
    if thought is None:
        return turns
    first = next(place for place, turn in enumerate(turns) if turn["role"] == "assistant")
    if any(turn["role"] == "user" for turn in turns[first:]):
        remedy = f"put it into the turns, each with a {thought.key} of its own"
        raise BadRowError(f"the row has {thought.key}, and several answers", "thought of several answers",
                          "a thought of one answer in a column", remedy)  # fmt: skip
    turn = turns[first]
    content = with_thought(str(turn["content"]), thought.text, thought.key)
    return [*turns[:first], {**turn, "content": content}, *turns[first + 1 :]]


def with_thought(content: str, thinking: str, what: str) -> str:
    """What the assistant says, with a thought from a field of its own before it, as chat templates take it."""
    own, ended, _ = content.partition(_THOUGHT_ENDS)
    if ended and own.strip().removeprefix(_THINK).strip() == thinking.strip():
        return content  # it has the same thought
    if _THOUGHT_ENDS in thinking or _THINK in content or _THOUGHT_ENDS in content:
        found = f"{what} has a thought, and there is a {_THINK} in it or in the content"
        raise BadRowError(found, "two thoughts", f"one thought, in the field or within {_THINK} in the content")
    return f"{_THINK}\n{thinking}\n{_THOUGHT_ENDS}\n\n{content}"


def _key(value: Mapping[str, object], name: str, what: str, missing: str) -> object:
    if name not in value:
        raise BadRowError(f"{what} has no {name!r} (it has: {', '.join(sorted(map(str, value)))})", missing)
    return value[name]


def _content(value: object, what: str, role: str) -> str:
    if isinstance(value, list) and value:
        if role == "assistant" and (thoughts := [part for part in value if _is_thought(part)]):
            rest = [part for part in value if not _is_thought(part)]
            thinking = "\n".join(_thought_part(part, what) for part in thoughts)
            return with_thought(_content(rest, what, role) if rest else "", thinking, f"{what} of type thinking")
        value = "".join(_part(part, f"{what}[{index}]") for index, part in enumerate(value))
    if role == "tool" and value == "":
        return ""  # a tool may return nothing
    return _answer_text(value, what) if role == "assistant" else text(value, what, _EMPTY[role])


def _answer_text(value: object, what: str) -> str:
    """An assistant's text; tool calls written as text must be closed."""
    content = text(value, what, "no answer")
    if _CLOSE in content or _OPEN in content:
        for call in _WRITTEN.findall(content):
            if call.lstrip()[:1] in ("{", "["):  # some models write calls in other syntaxes
                _require_literal(call, f"{what} {_OPEN}")
        left = _WRITTEN.sub("", content)
        for mark, missing in ((_OPEN, _CLOSE), (_CLOSE, _OPEN)):
            if mark in left:
                raise BadRowError(f"{what} has {mark} without {missing}", _UNCLOSED)
    return content


def _require_literal(call: str, what: str) -> None:
    """Requires JSON, or a literal of Python with keys in single quotes, as many rows of Hermes have."""
    if PYTHONS_CALL.match(f"{_OPEN}{call}"):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            ast.literal_eval(call.strip())
            return
    parsed_json(call, what, _UNCLOSED)


def _is_thought(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") in THOUGHTS


def _thought_part(part: Mapping[str, object], what: str) -> str:
    """The thought of a part, as Anthropic's and Mistral's messages have it: a text, or a list of texts."""
    value = part.get(str(part["type"]), part.get("text"))
    if isinstance(value, list) and value:
        return "".join(_part(each, f"{what}[{index}]") for index, each in enumerate(value))
    return text(value, f"{what} of type {part['type']}", "no thinking")


def _part(value: object, what: str) -> str:
    """The text of one part of a content."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    if isinstance(kind, str) and any(medium in kind for medium in _MEDIA):
        raise images_are_not_read(f"{what} is of type {kind!r}")
    # LLaMA-Factory's version 1 has it as the value, Oumi as the content; OpenAI's Responses call it input_text, and
    # Bedrock nothing.
    read: Mapping[str, object] = value if isinstance(value, Mapping) and kind in (*_TEXTS, None) else {}
    written = next((read[key] for key in ("text", "value", "content") if key in read), None)
    if not isinstance(written, str):
        raise BadRowError(f'{what} is {named(value)}, not {{"type": "text", "text": "..."}}', "not text")
    return written


def images_are_not_read(found: str) -> BadRowError:
    """The error for a row with media."""
    return BadRowError(found, "media that is not read", "text, and images in rows of messages: no audio, no video")


def _add_rest(made: Message, value: Mapping[str, object], what: str, read: set[str | None]) -> None:
    """Adds a turn's name and tool call id; refuses other keys, which would be lost."""
    rest = {key: item for key, item in value.items() if key not in read and not is_nothing(item)}
    if any([_has_no_loss(rest.pop(key), key, made["role"], what) for key in (*_WEIGHTS, *_SWITCHES) if key in rest]):
        made[_NO_LOSS] = True
    for key in [key for key in rest if key == "name" or (key == "tool_call_id" and made["role"] == "tool")]:
        item = rest.pop(key)
        if not isinstance(item, str):
            raise BadRowError(f"{what} {key} is {named(item)}", "not text")
        made[key] = whole_characters(item, f"{what} {key}")
    require_nothing_else(rest, (), what, _OTHER_KEYS)


def _has_no_loss(value: object, key: str, role: object, what: str) -> bool:
    """Whether a key says that a turn of the assistant is not trained; all other turns never are."""
    if value not in (0, 1):
        raise BadRowError(f"{what} {key} is {named(value)}", "weight of a turn", "0 and 1, false and true")
    if role != "assistant" and value and key in _SWITCHES:
        found = f"{what} {key} is {named(value)}, and it is a turn of the {role}"
        raise BadRowError(found, "loss on a prompt", "loss on the assistant's turns alone", "remove it")
    return role == "assistant" and not value


def without_marks(row: CanonicalRow) -> CanonicalRow:
    """A row whose turns without loss are listed in ``untrained``, as positions among the assistant's turns.

    Raises:
        BadRowError: an answer of a pair, or a single one, is to have no loss.
    """
    for name in ("prompt", "chosen", "rejected", "completion", "messages"):
        turns = row.get(name)
        if not isinstance(turns, list) or not any(_NO_LOSS in turn for turn in turns):
            continue
        if name in ("chosen", "rejected", "completion"):
            remedy = "remove the row, or the key that says so"
            raise BadRowError(f"{name} has a turn without loss", "answer without loss", "answers with loss", remedy)
        row = {**row, name: [{key: item for key, item in turn.items() if key != _NO_LOSS} for turn in turns]}
        if name == "messages":
            answers = [turn for turn in turns if turn["role"] == "assistant"]
            row[UNTRAINED] = json.dumps([place for place, turn in enumerate(answers) if _NO_LOSS in turn])
    return row


def _check_order(messages: Sequence[Message], what: str, before: str = _START) -> None:
    for index, turn in enumerate(messages):
        role = str(turn["role"])
        if role not in _NEXT[before]:
            after = before if before in (_START, _CALLED, _WROTE_CALL) else f"after {before!r}"
            found = f"{what}[{index}] has the role {role!r} {after}, not {' or '.join(_NEXT[before])}"
            raise BadRowError(found, _UNCLOSED if before == _CALLED else "wrong role order")
        writes = role == "assistant" and bool(
            _CLOSE in (content := str(turn["content"])) or _PYTHONIC.fullmatch(content)
        )
        before = _CALLED if "tool_calls" in turn else _WROTE_CALL if writes else role
        if role == "tool" and (index + 1 == len(messages) or messages[index + 1]["role"] != "tool"):
            _check_answered(messages[: index + 1], what)


def _check_answered(messages: Sequence[Message], what: str) -> None:
    """Checks that the last turns, of tools, answer the calls before them, by id if all have one."""
    answered = [turn.get("tool_call_id") for turn in takewhile(lambda turn: turn["role"] == "tool", messages[::-1])]
    index = len(messages) - len(answered) - 1
    if "tool_calls" not in messages[index]:
        return  # they answer calls in a text, in one turn or in several
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


def is_transcript(value: object) -> bool:
    """Whether a text is turns of Human and Assistant."""
    return isinstance(value, str) and bool(_TRANSCRIPT.match(value))


def require_no_written_turns(fields: Fields, columns: Container[str], name: str) -> None:
    """Refuses turns of a user and an assistant in one text, which a format would read as one turn of the user."""
    for column in ("prompt", "chosen"):
        value = fields.get(column) if column in columns else None
        if isinstance(value, str) and (found := _WRITTEN_TURNS.match(value)):
            raise BadRowError(
                f"{column} has turns of {' and '.join(found.groups())} in one text, which {name} reads as one turn of "
                "the user", "turns in a text", r"a list of messages; of pairs also \n\nHuman: and \n\nAssistant:",
                f"write the turns so, or read the text as one turn with format={name}",
            )  # fmt: skip


def turns_of(transcript: str, what: str) -> list[Message]:
    """The turns of a transcript, stripped of white space."""
    parts = _TURN.split(transcript)
    if parts[0].strip() or len(parts) == 1:
        raise BadRowError(f"{what} does not begin with 'Human:'", "no transcript")
    pairs = zip(parts[1::2], parts[2::2], strict=True)
    return [{"role": _TRANSCRIBED[role], "content": content.strip()} for role, content in pairs]


def prompt_of(transcript: str) -> list[Message]:
    """The turns of a prompt, without the ``Assistant:`` at its end."""
    turns = turns_of(transcript, "prompt")
    return turns[:-1] if turns[-1] == {"role": "assistant", "content": ""} else turns


def common_beginning(chosen: Sequence[object], rejected: Sequence[object]) -> int:
    """Number of equal turns or characters at the beginning of two answers.

    At least one is left for each answer, and a space before the answer belongs to the answer.
    """
    shortest = max(min(len(chosen), len(rejected)) - 1, 0)
    end = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(chosen[:shortest], rejected, strict=False)))
    return end - 1 if end and chosen[end] != rejected[end] and chosen[end - 1] == " " else end
