"""All formats in one table: how the rows of each are recognized, and how one becomes a row of its kind.

Sources: alpaca is Taori et al. 2023, github.com/tatsu-lab/stanford_alpaca, with ``system`` and ``history`` of
LLaMA-Factory; function_calling is xLAM, Liu et al. 2024, arXiv:2406.18518.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lineage.artifact import Kind
from tasks.data.formats.pairs import (
    implicit_preference,
    openai_preference,
    oumi_preference,
    preference,
    recognize_transcripts,
    sharegpt_ranking,
    transcript_preference,
)
from tasks.data.formats.turns import (
    Message,
    answer,
    conversation,
    listed,
    prompt,
    sharegpt_turns,
    spelling_of,
    system_turn,
)
from tasks.data.formats.values import (
    BadRowError,
    CanonicalRow,
    Fields,
    add_tools,
    as_json,
    calls_json,
    is_nothing,
    named,
    one_of,
    required,
    text,
)
from tasks.data.kinds import RESERVED_COLUMNS

REST = "*"  # in a mapping: every column that it does not name

_COMPLETION = ("completion", "response")
_JUDGED = frozenset({"label", "chosen", "rejected"})  # what says which answers are wanted
_LABELS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}


def _text(fields: Fields) -> CanonicalRow:
    return {"text": text(required(fields, "text"), "text", "no text")}


def _messages(fields: Fields) -> CanonicalRow:
    messages = conversation(listed(required(fields, "messages"), "messages"), "messages")
    return add_tools({"messages": messages}, fields, one_of(fields, ("tools", "functions")))


def _prompt_completion(fields: Fields) -> CanonicalRow:
    asked, answered = _asked_and_answered(fields)
    return add_tools({"messages": asked + answered}, fields)


def _asked_and_answered(fields: Fields) -> tuple[list[Message], list[Message]]:
    name = one_of(fields, _COMPLETION)
    asked = prompt(required(fields, "prompt", "empty prompt"), "prompt")
    return asked, answer(required(fields, name, "no answer"), name)


def _alpaca(fields: Fields) -> CanonicalRow:
    messages = system_turn(fields) + _history(fields.get("history"))
    instruction, more = required(fields, "instruction", "empty prompt"), fields.get("input")
    if is_nothing(more) or (isinstance(more, str) and more.isspace()):
        asked = text(instruction, "instruction", "empty prompt")
    else:
        asked = text(more, "input", "empty prompt")
        if instruction != "":  # some sets have all they ask in ``input``
            asked = f"{text(instruction, 'instruction', 'empty prompt')}\n{asked}"
    output = text(required(fields, "output", "no answer"), "output", "no answer")
    return add_tools({"messages": [*messages, {"role": "user", "content": asked}, *answer(output, "output")]}, fields)


def _history(value: object) -> list[Message]:
    accepted = '[["question", "answer"], ...]'
    if is_nothing(value):
        return []
    if not isinstance(value, list):
        raise BadRowError(f"history is {named(value)}", accepted=accepted)
    messages: list[Message] = []
    for index, pair in enumerate(value):
        where = f"history[{index}]"
        if not isinstance(pair, list) or len(pair) != 2:
            found = f"a list of {len(pair)}" if isinstance(pair, list) else named(pair)
            raise BadRowError(f"{where} is {found}", accepted=accepted)
        messages.append({"role": "user", "content": text(pair[0], f"{where}[0]", "empty prompt")})
        messages += answer(text(pair[1], f"{where}[1]", "no answer"), f"{where}[1]")
    return messages


def _sharegpt(fields: Fields) -> CanonicalRow:
    turns = sharegpt_turns(fields)
    return add_tools({"messages": conversation(turns, "conversations", spelling_of(turns))}, fields)


def _reasoning(fields: Fields) -> CanonicalRow:
    problem = _either(fields, ("problem", "question"), "empty prompt")
    thinking = _either(fields, ("thinking", "reasoning"), "no thinking")
    solution = _either(fields, ("solution", "answer"), "no answer")
    if "</think>" in thinking or "<think>" in solution:
        raise BadRowError("the thinking or the solution has a <think> of its own", accepted="plain text")
    answered = answer(f"<think>\n{thinking}\n</think>\n\n{solution}", "solution")
    return {"messages": [*system_turn(fields), {"role": "user", "content": problem}, *answered]}


def _either(fields: Fields, names: tuple[str, str], empty: str) -> str:
    name = one_of(fields, names)
    return text(required(fields, name, empty), name, empty)


def _function_calling(fields: Fields) -> CanonicalRow:
    query = text(required(fields, "query", "empty prompt"), "query", "empty prompt")
    calls = calls_json(required(fields, "answers", "no answer"), "answers")
    required(fields, "tools")
    messages = [{"role": "user", "content": query}, {"role": "assistant", "content": "", "tool_calls": calls}]
    return add_tools({"messages": messages}, fields)


def _unpaired(fields: Fields) -> CanonicalRow:
    asked, answered = _asked_and_answered(fields)
    label = _label(required(fields, "label", "no label"), "prompt_completion")
    return add_tools({"prompt": asked, "completion": answered, "label": label}, fields)


def _label(value: object, unjudged: str) -> bool:
    """Whether an answer is wanted; ``unjudged`` is the format of such rows without a label, for the message."""
    known = _LABELS.get(str(value).lower()) if isinstance(value, bool | int | float | str) else None
    if known is None:
        remedy = f"write one of these; if it is no judgement of the answer, set format={unjudged}"
        raise BadRowError(f"label is {named(value)}", "no label", "true or false, 1 or 0", remedy)
    return known


def _messages_label(fields: Fields) -> CanonicalRow:
    messages, judged = listed(required(fields, "messages"), "messages"), fields.get("label")
    if judged is None and isinstance(messages, list) and messages and isinstance(messages[-1], dict):
        *before, last = messages
        judged = last.get("label")
        messages = [*before, {name: value for name, value in last.items() if name != "label"}]
    turns = conversation(messages, "messages")
    if turns[-1]["role"] != "assistant":
        found = f"messages ends with the role {turns[-1]['role']!r}"
        raise BadRowError(found, "no answer", "an answer at the end, which the label judges")
    row: CanonicalRow = {"prompt": turns[:-1], "completion": turns[-1:], "label": _label(judged, "messages")}
    return add_tools(row, fields)


def _recognize_judged(fields: Fields) -> tuple[str, ...]:
    messages = fields.get("messages")
    within = isinstance(messages, list) and messages and isinstance(messages[-1], dict) and "label" in messages[-1]
    return ("messages", "label") if within or {"messages", "label"} <= fields.keys() else ()


def _prompts(fields: Fields) -> CanonicalRow:
    row: CanonicalRow = {"prompt": prompt(required(fields, "prompt", "empty prompt"), "prompt")}
    others = {name: value for name, value in sorted(fields.items()) if name not in ("prompt", "tools", "group")}
    reserved = sorted(RESERVED_COLUMNS & others.keys())
    if reserved:
        accepted = "columns of other names, which reward functions get as arguments"
        raise BadRowError(f"the column {reserved[0]} is reserved", "reserved column", accepted)
    if others:
        row["columns"] = as_json(others, f"one of {', '.join(others)}")
    return add_tools(row, fields)


@dataclass(frozen=True, kw_only=True)
class Format:
    """One shape in which users bring rows.

    Args:
        name: what ``format=`` is set to.
        kind: what its rows become.
        accepted: a row of it, for messages.
        mapping: column -> what it becomes, as the report shows it; all columns that the format reads.
        needs: the columns that make a row one of this format, one with several names under any of them. Names alone
            decide: a bad value is a bad row, and no reason to take the row for one of another format.
        read: brings a row into the form of ``kind``; raises ``BadRowError``.
        by_value: recognizes rows instead of ``needs``, by what they say: the columns, or nothing.
        losing: columns that it does not read and that change what a row teaches: a row that has one is of this format
            only where the user says so.
    """

    name: str
    kind: Kind
    accepted: str
    mapping: Mapping[str, str]
    needs: tuple[str | tuple[str, ...], ...] = ()
    read: Callable[[Fields], CanonicalRow]
    by_value: Callable[[Fields], tuple[str, ...]] | None = None
    losing: frozenset[str] = frozenset()

    def recognize(self, fields: Fields) -> tuple[str, ...]:
        """The columns that make a row one of this format; none: it is not."""
        if self.by_value:
            return self.by_value(fields)
        either = [(names,) if isinstance(names, str) else names for names in self.needs]
        found = [next((name for name in names if name in fields), None) for names in either]
        return tuple(name for name in found if name is not None) if None not in found else ()

    def convert(self, fields: Fields) -> CanonicalRow:
        """A row in the form of ``kind``.

        Raises:
            BadRowError: what is wrong with it.
        """
        try:
            return self.read(fields)
        except BadRowError as error:
            if error.accepted:
                raise
            raise BadRowError(error.found, error.reason, self.accepted, error.remedy) from error

    def lost(self, fields: Fields) -> list[str]:
        """The columns of a row that would be lost."""
        return [] if self.losing.isdisjoint(fields) else sorted(self.losing & fields.keys())


_CHAT = '"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'
_ANSWER = '{"role": "assistant", "content": "..."}'
_PAIR = {"chosen": "chosen", "rejected": "rejected", "kind": "kind", "tools": "tools"}

FORMATS: tuple[Format, ...] = (
    Format(
        name="text", kind=Kind.TEXT, needs=("text",), read=_text, mapping={"text": "the document"},
        accepted='{"text": "..."}',
    ),
    Format(
        name="messages", kind=Kind.CONVERSATIONS, needs=("messages",), read=_messages, losing=_JUDGED,
        accepted=f"{{{_CHAT}}}",
        mapping={"messages": "the conversation", "tools": "tools", "functions": "tools, as they were called before"},
    ),
    Format(
        name="prompt_completion", kind=Kind.CONVERSATIONS, needs=("prompt", _COMPLETION), read=_prompt_completion,
        accepted='{"prompt": "...", "completion": "..."}, each a string or a list of messages',
        mapping={
            "prompt": "messages, the user's", **dict.fromkeys(_COMPLETION, "messages, the assistant's"),
            "tools": "tools",
        },
        losing=frozenset({"label"}),
    ),
    Format(
        name="alpaca", kind=Kind.CONVERSATIONS, needs=("instruction", "output"), read=_alpaca,
        accepted='{"instruction": "...", "input": "...", "output": "..."}',
        mapping={
            "instruction": "the user's turn", "input": "the user's turn, below the instruction",
            "output": "the assistant's turn", "system": "the system's turn", "history": "earlier turns",
            "tools": "tools",
        },
    ),
    Format(
        name="sharegpt", kind=Kind.CONVERSATIONS, needs=("conversations",), read=_sharegpt, losing=_JUDGED,
        accepted='{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}',
        mapping={"conversations": "the conversation", "system": "its first turn", "tools": "tools"},
    ),
    Format(
        name="reasoning", kind=Kind.CONVERSATIONS, read=_reasoning,
        needs=(("problem", "question"), ("thinking", "reasoning"), ("solution", "answer")),
        accepted='{"problem": "...", "thinking": "...", "solution": "..."}',
        mapping={
            **dict.fromkeys(("problem", "question"), "the user's turn"),
            **dict.fromkeys(("thinking", "reasoning"), "the assistant's turn, within <think>"),
            **dict.fromkeys(("solution", "answer"), "the assistant's turn, below its thinking"),
            "system": "the system's turn",
        },
    ),
    Format(
        name="function_calling", kind=Kind.CONVERSATIONS, needs=("query", "tools", "answers"), read=_function_calling,
        accepted='{"query": "...", "tools": [{"name": ...}], "answers": [{"name": ..., "arguments": {...}}]}',
        mapping={"query": "the user's turn", "tools": "tools", "answers": "the assistant's tool calls"},
    ),
    Format(
        name="preference", kind=Kind.PREFERENCES, needs=("prompt", "chosen", "rejected"), read=preference,
        accepted='{"prompt": "...", "chosen": "...", "rejected": "..."}, each a string or a list of messages',
        mapping={"prompt": "prompt", **_PAIR},
    ),
    Format(
        name="implicit_preference", kind=Kind.PREFERENCES, needs=("chosen", "rejected"), read=implicit_preference,
        accepted='{"chosen": "...", "rejected": "..."}, both strings or both lists of messages, that begin alike',
        mapping={**_PAIR, "chosen": "prompt and chosen", "rejected": "prompt and rejected"},
        # Two texts mostly begin alike somehow: where a column may hold the prompt, it is to be named so.
        losing=frozenset(
            {"prompt", "question", "instruction", "query", "problem", "input", "messages", "conversations"}
        ),
    ),
    Format(
        name="transcript_preference", kind=Kind.PREFERENCES, by_value=recognize_transcripts,
        read=transcript_preference,
        accepted=r'{"chosen": "\n\nHuman: ...\n\nAssistant: ...", "rejected": "\n\nHuman: ...\n\nAssistant: ..."} with '
        "one beginning and two last answers",
        mapping={
            "prompt": "the turns before the answers", **_PAIR, "chosen": "prompt and chosen",
            "rejected": "prompt and rejected",
        },
    ),
    Format(
        name="sharegpt_ranking", kind=Kind.PREFERENCES, needs=("conversations", "chosen", "rejected"),
        read=sharegpt_ranking,
        accepted='{"conversations": [{"from": "human", "value": "..."}], "chosen": {"from": "gpt", "value": "..."}, '
        '"rejected": {"from": "gpt", "value": "..."}}',
        mapping={
            "conversations": "prompt", "chosen": "chosen", "rejected": "rejected", "system": "the prompt's first turn",
            "kind": "kind", "tools": "tools",
        },
    ),
    Format(
        name="openai_preference", kind=Kind.PREFERENCES, needs=("input", "preferred_output", "non_preferred_output"),
        read=openai_preference,
        accepted=f'{{"input": {{"messages": [...]}}, "preferred_output": [{_ANSWER}], '
        f'"non_preferred_output": [{_ANSWER}]}}',
        mapping={
            "input": "prompt and tools", "preferred_output": "chosen", "non_preferred_output": "rejected",
            "kind": "kind",
        },
    ),
    Format(
        name="oumi_preference", kind=Kind.PREFERENCES, needs=("messages", "chosen", "rejected"), read=oumi_preference,
        accepted='{"messages": [{"role": "user", "content": "..."}], '
        f'"chosen": {{"messages": [{_ANSWER}]}}, "rejected": {{"messages": [{_ANSWER}]}}}}',
        mapping={"messages": "prompt", **_PAIR},
    ),
    Format(
        name="unpaired", kind=Kind.UNPAIRED, needs=("prompt", _COMPLETION, "label"), read=_unpaired,
        accepted='{"prompt": "...", "completion": "...", "label": true}, the texts strings or lists of messages',
        mapping={
            "prompt": "prompt", "completion": "completion", "response": "completion", "label": "label",
            "tools": "tools",
        },
    ),
    Format(
        name="messages_label", kind=Kind.UNPAIRED, by_value=_recognize_judged, read=_messages_label,
        accepted=f'{{{_CHAT}, "label": true}}', losing=_JUDGED - {"label"},
        mapping={"messages": "prompt, and the last turn as completion", "label": "label", "tools": "tools"},
    ),
    Format(
        name="prompts", kind=Kind.PROMPTS, needs=("prompt",), read=_prompts,
        accepted='{"prompt": "..."}, a string or a list of messages',
        mapping={"prompt": "prompt", "tools": "tools", REST: "columns, for a reward function"},
        losing=frozenset({*_COMPLETION, "chosen", "rejected"}),
    ),
)  # fmt: skip

BY_NAME = {each.name: each for each in FORMATS}
