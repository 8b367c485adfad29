"""Detects the format of a source from its first rows, and refuses ambiguous ones; renames columns.

Before conversion a template may build the prompt from several columns; afterwards a system turn may be added.
"""

import re
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property, lru_cache

from lineage.artifact import Kind
from lineage.errors import ConfigError, DataError
from tasks.data.formats import proposals
from tasks.data.formats.choices import CHOICE_COLUMNS, multiple_choice, recognize_choices
from tasks.data.formats.proposals import JOBS, Guess, guess, inverted_hint, renamed_row, with_inner, with_prompt
from tasks.data.formats.turns import (
    COMPLETION,
    SYSTEM,
    THOUGHTS,
    BadRowError,
    CanonicalRow,
    Fields,
    Message,
    add_tools,
    answer,
    as_json,
    calls_json,
    common_beginning,
    conversation,
    images_are_not_read,
    is_nothing,
    is_transcript,
    listed,
    named,
    of_gemini,
    one_of,
    optional_name,
    prompt,
    prompt_of,
    prompt_turns,
    require_no_written_turns,
    require_nothing_else,
    required,
    spelling_of,
    text,
    text_of,
    turns_of,
    whole_characters,
    with_system,
    with_system_column,
    with_thought_column,
    with_turns,
    without_marks,
)
from tasks.data.images import COLUMNS, WITH_IMAGES
from tasks.data.kinds import DOMAIN, RESERVED_COLUMNS, ROW_KINDS

REST = "*"  # in a mapping: all other columns
_INSTRUCTIONS = ("systemInstruction", "system_instruction")  # of Gemini
_INPUTS, _OUTPUTS = ("input", "context"), ("output", "response")  # of Alpaca, and as Dolly calls them
_OTHER_PROMPTS = frozenset({"prompt", "text", "messages", "conversations"})
_PROMPTS = ("question", "instruction", "query", "problem")  # other common names of a prompt
# Columns that change what is trained, in any case, with or without marks and blanks: a row with one that its format
# does not read is refused. A row whose weight is 0, or whose switch is off, is left out.
_WEIGHTS = frozenset({"weight", "weights", "sampleweight", "lossweight"})
_SWITCHES = frozenset({"loss", "train", "training"})
_OF_SYSTEM = frozenset({"system", "systemprompt", "systemmessage", "systeminstruction", "sysprompt", "sys"})
_OF_TEXT = _OF_SYSTEM | {"role", "speaker", "parentid", "replyto"}  # a message of a conversation is no document
_OF_CHAT = _OF_SYSTEM | {
    "tools", "functions", "label", "labels", "ktotag", "chosen", "rejected", "chosenresponse", "rejectedresponse",
    "rejectedmessages", "reasoningcontent", "thinking", "reasoning", "image", "images", "imageurl", "imagepath",
    "lossmask", "responsemask", "responsemasks", "assistantmask", "assistantmasks", "trainmask", "mask",
    "chattemplatekwargs", "enablethinking", "toolcalls", "thought", "thoughts", "thinkingcontent", "reasoningtext",
    "thinkingblocks", "reasoningdetails", "chainofthought",
}  # fmt: skip
_JUDGED = frozenset({"label", "chosen", "rejected"})  # columns with a judgement of answers
_TRUTHS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _text(fields: Fields) -> CanonicalRow:
    return {"text": text(required(fields, "text"), "text", "no text")}


def _messages(fields: Fields) -> CanonicalRow:
    messages = with_thought_column(conversation(listed(fields, "messages"), "messages"), fields)
    return add_tools({"messages": messages}, fields, one_of(fields, ("tools", "functions")))


def _prompt_completion(fields: Fields) -> CanonicalRow:
    asked, answered = _asked_and_answered(fields)
    return add_tools({"messages": asked + answered}, fields)


def _asked(fields: Fields) -> list[Message]:
    return prompt(required(fields, "prompt", "empty prompt"), "prompt")


def _asked_and_answered(fields: Fields) -> tuple[list[Message], list[Message]]:
    name = one_of(fields, COMPLETION)
    return _asked(fields), with_thought_column(answer(required(fields, name, "no answer"), name), fields)


def _alpaca(fields: Fields) -> CanonicalRow:
    messages = _history(fields.get("history"))
    name = one_of(fields, _INPUTS)
    instruction, more = required(fields, "instruction", "empty prompt"), fields.get(name)
    if is_nothing(more) or (isinstance(more, str) and more.isspace()):
        asked = text(instruction, "instruction", "empty prompt")
    else:
        asked = text(more, name, "empty prompt")
        if instruction != "":  # some data sets put the whole question in ``input``
            asked = f"{text(instruction, 'instruction', 'empty prompt')}\n{asked}"
    value = one_of(fields, _OUTPUTS)
    answered = answer(text(required(fields, value, "no answer"), value, "no answer"), value)
    return add_tools({"messages": [*messages, _user(asked), *with_thought_column(answered, fields)]}, fields)


def _recognize_instructions(fields: Fields) -> tuple[str, ...]:
    """The columns of Alpaca, or of Dolly, whose names other formats have too."""
    if {"instruction", "output"} <= fields.keys():
        return ("instruction", "output")
    is_dolly = {"instruction", "response"} <= fields.keys() and _OTHER_PROMPTS.isdisjoint(fields)
    return ("instruction", "response") if is_dolly else ()


def _history(value: object) -> list[Message]:
    pairs = [] if is_nothing(value) else value
    if not isinstance(pairs, list):
        raise BadRowError(f"history is {named(value)}", accepted='[["question", "answer"], ...]')
    messages: list[Message] = []
    for index, pair in enumerate(pairs):
        where = f"history[{index}]"
        if not isinstance(pair, list) or len(pair) != 2:
            found = f"a list of {len(pair)}" if isinstance(pair, list) else named(pair)
            raise BadRowError(f"{where} is {found}", accepted='[["question", "answer"], ...]')
        messages.append(_user(text(pair[0], f"{where}[0]", "empty prompt")))
        messages += answer(text(pair[1], f"{where}[1]", "no answer"), f"{where}[1]")
    return messages


def _sharegpt(fields: Fields) -> CanonicalRow:
    turns = listed(fields, "conversations")
    messages = with_thought_column(conversation(turns, "conversations", spelling_of(turns)), fields)
    return add_tools({"messages": messages}, fields)


def _contents(fields: Fields) -> CanonicalRow:
    turns = of_gemini(listed(fields, "contents"), "contents")
    messages = with_thought_column(conversation(turns, "contents"), fields)
    name = one_of(fields, _INSTRUCTIONS)
    row = with_system({"messages": messages}, fields.get(name), name)
    value = fields.get("tools")
    tools = [] if is_nothing(value) else value if isinstance(value, list) else [value]
    flat = [each for tool in tools for each in _declared(tool)]
    return add_tools(row, {**fields, "tools": flat})


def _declared(tool: object) -> list[object]:
    """The functions of one of Gemini's tools."""
    names = ("functionDeclarations", "function_declarations")
    functions = tool.get(one_of(tool, names)) if isinstance(tool, Mapping) else None
    return functions if isinstance(functions, list) else [tool]


def _responses(fields: Fields) -> CanonicalRow:
    asked = prompt(required(fields, "input", "empty prompt"), "input")
    answered = with_thought_column(answer(required(fields, "output", "no answer"), "output"), fields)
    row = with_system({"messages": asked + answered}, fields.get("instructions"), "instructions")
    return add_tools(row, fields)


def _recognize_responses(fields: Fields) -> tuple[str, ...]:
    """Its columns, where the output is a list of items."""
    items = fields.get("output")
    is_typed = isinstance(items, list) and items and all(isinstance(each, dict) and "type" in each for each in items)
    return ("input", "output") if is_typed and "input" in fields else ()


def _reasoning(fields: Fields) -> CanonicalRow:
    problem = text_of(fields, "empty prompt", "problem", "question")
    solution = answer(text_of(fields, "no answer", "solution", "answer"), "solution")
    if (thought := with_thought_column(solution, fields)) is solution:
        text_of(fields, "no thinking", *THOUGHTS)
    return {"messages": [_user(problem), *thought]}


def _function_calling(fields: Fields) -> CanonicalRow:
    query = text_of(fields, "empty prompt", "query")
    calls = calls_json(required(fields, "answers", "no answer"), "answers")
    required(fields, "tools")
    called = with_thought_column([{"role": "assistant", "content": "", "tool_calls": calls}], fields)
    return add_tools({"messages": [_user(query), *called]}, fields)


def _unpaired(fields: Fields) -> CanonicalRow:
    asked, answered = _asked_and_answered(fields)
    label = _label(required(fields, "label", "no label"), "prompt_completion")
    return add_tools({"prompt": asked, "completion": answered, "label": label}, fields)


def _label(value: object, unjudged: str) -> bool:
    """Whether an answer is desirable; ``unjudged`` names the format without labels, for the message."""
    known = _truth(value)
    if known is None:
        remedy = f"correct it, or, if it is no judgement of the answer, set format={unjudged}"
        raise BadRowError(f"label is {named(value)}", "no label", "true or false, 1 or 0", remedy)
    return known


def _truth(value: object) -> bool | None:
    """None: it is neither true nor false."""
    return _TRUTHS.get(str(value).lower()) if isinstance(value, bool | int | float | str) else None


def _messages_label(fields: Fields) -> CanonicalRow:
    messages, judged = listed(fields, "messages"), fields.get("label")
    if judged is None and isinstance(messages, list) and messages and isinstance(messages[-1], dict):
        *before, last = messages
        judged = last.get("label")
        messages = [*before, {name: value for name, value in last.items() if name != "label"}]
    turns = conversation(messages, "messages")
    if turns[-1]["role"] != "assistant":
        raise BadRowError(f"messages ends with the role {turns[-1]['role']!r}, not with an answer", "no answer")
    answered = with_thought_column(turns[-1:], fields)
    row: CanonicalRow = {"prompt": turns[:-1], "completion": answered, "label": _label(judged, "messages")}
    return add_tools(row, fields)


def _recognize_judged(fields: Fields) -> tuple[str, ...]:
    messages = fields.get("messages")
    within = isinstance(messages, list) and messages and isinstance(messages[-1], dict) and "label" in messages[-1]
    return ("messages", "label") if within or {"messages", "label"} <= fields.keys() else ()


def _prompts(fields: Fields) -> CanonicalRow:
    row: CanonicalRow = {"prompt": _asked(fields)}
    others = {name: value for name, value in sorted(fields.items()) if name not in ("prompt", "tools", "group")}
    if reserved := sorted(RESERVED_COLUMNS & others.keys()):
        raise BadRowError(f"the column {reserved[0]} is reserved; rename it", "reserved column")
    if others:
        try:
            row["columns"] = as_json(others, "one of the columns")
        except BadRowError:
            for name, value in others.items():  # names the column
                as_json(value, name)
            raise
    return add_tools(row, fields)


def _paired(asked: list[Message], chosen: list[Message], rejected: list[Message], fields: Fields) -> CanonicalRow:
    """A row of preferences; ``kind`` names the flaw of the rejected answer."""
    if chosen == rejected:
        raise BadRowError("chosen and rejected are the same", "nothing to prefer")
    kind = optional_name(fields.get("kind"), "kind")
    row: CanonicalRow = {"prompt": asked, "chosen": chosen, "rejected": rejected, "kind": kind}
    if kind:
        whole_characters(kind, "kind")
    return add_tools(row, fields)


def _answers(fields: Fields) -> tuple[object, object]:
    return required(fields, "chosen", "no answer"), required(fields, "rejected", "no answer")


def _preference(fields: Fields) -> CanonicalRow:
    """The answers may be whole conversations that start with the prompt."""
    asked = required(fields, "prompt", "empty prompt")
    chosen, rejected = _answers(fields)
    if isinstance(chosen, list) and isinstance(rejected, list) and len(chosen) > 1:
        end = common_beginning(chosen, rejected)
        last = chosen[end - 1] if end else None
        content = last.get("content") if isinstance(last, dict) and last.get("role") == "user" else None
        if end and asked == (content if isinstance(asked, str) else chosen[:end]):
            asked, chosen, rejected = chosen[:end], chosen[end:], rejected[end:]
    return _paired(prompt(asked, "prompt"), answer(chosen, "chosen"), answer(rejected, "rejected"), fields)


def _implicit_preference(fields: Fields) -> CanonicalRow:
    """The common beginning of both answers is the prompt."""
    chosen, rejected = _answers(fields)
    for name, value, other in (("chosen", chosen, rejected), ("rejected", rejected, chosen)):
        if not isinstance(value, str | list) or (isinstance(other, list) and not isinstance(value, list)):
            raise BadRowError(f"{name} is {named(value)}", "no answer" if value is None else "not of the format")
    assert isinstance(chosen, str | list) and isinstance(rejected, str | list)
    end = common_beginning(chosen, rejected)
    while end and isinstance(chosen, list) and _is_answer(chosen[end - 1]):
        end -= 1  # both make the same call, and differ after it
    if not end:
        raise BadRowError("chosen and rejected have no common beginning, and there is no prompt", "empty prompt")
    asked = prompt(chosen[:end], "the common beginning")
    return _paired(asked, answer(chosen[end:], "chosen"), answer(rejected[end:], "rejected"), fields)


def _is_answer(turn: object) -> bool:
    return isinstance(turn, dict) and turn.get("role") == "assistant"


def _transcript_preference(fields: Fields) -> CanonicalRow:
    """Either two full transcripts that differ in the last answer, or a transcript as prompt with two plain answers."""
    texts = dict(zip(("chosen", "rejected"), _answers(fields), strict=True))
    for name, value in texts.items():
        if not isinstance(value, str):
            raise BadRowError(f"{name} is {named(value)}", "no answer" if value is None else "not text")
    alone = is_transcript(fields.get("prompt")) and not any(map(is_transcript, texts.values()))
    asked = [prompt_of(str(fields["prompt"]))] if alone else []
    lasts: list[Message] = []
    for name, value in texts.items():
        is_bare = alone and not re.match(r"\s*Assistant:", str(value))
        *before, last = turns_of(f"\n\nAssistant:{value}" if is_bare else str(value), name)
        if last["role"] != "assistant" or (alone and before):
            raise BadRowError(f"{name} ends with a turn of the {last['role']}, not with one answer", "wrong role order")
        lasts.append(last)
        asked += [] if alone else [before]
    if not alone:
        _require_one_beginning(fields, *asked)
    left, right = (answer([last], name) for name, last in zip(texts, lasts, strict=True))
    return _paired(prompt_turns(asked[0], "the transcript"), left, right, fields)


def _recognize_transcripts(fields: Fields) -> tuple[str, ...]:
    """The columns of a transcript, recognized by content, since other formats use the same names."""
    names = [name for name in ("prompt", "chosen", "rejected") if name in fields]
    found = [name for name in names if is_transcript(fields[name])]
    known = (["chosen", "rejected"], ["prompt", "chosen", "rejected"], ["prompt"])
    if not {"chosen", "rejected"} <= fields.keys() or found not in known:
        return ()
    return (*names, "turns of Human and Assistant")


def _require_one_beginning(fields: Fields, chosen: list[Message], rejected: list[Message]) -> None:
    """Checks that full transcripts have the same beginning, which agrees with a separate prompt."""
    if chosen != rejected:
        pairs = zip(chosen, rejected, strict=False)
        place = next((at for at, (left, right) in enumerate(pairs) if left != right), min(len(chosen), len(rejected)))
        found = f"chosen and rejected differ from turn {place + 1} on, before their last answers"
        raise BadRowError(found, "another beginning")
    prompt = fields.get("prompt")
    users = [turn["content"] for turn in chosen if turn["role"] == "user"]
    is_begun = isinstance(prompt, str) and bool(re.match(r"\s*(?:Human|System):", prompt))
    is_same = isinstance(prompt, str) and (prompt.strip() in users or (is_begun and prompt_of(prompt) == chosen))
    if prompt is not None and not is_same:
        raise BadRowError("prompt is not what chosen and rejected begin with", "another beginning")


def _sharegpt_ranking(fields: Fields) -> CanonicalRow:
    """ShareGPT with two answers: ``conversations`` is the prompt, ``chosen`` and ``rejected`` are one turn each."""
    turns = listed(fields, "conversations")
    asked, (chosen, rejected) = prompt_turns(turns, "conversations", spelling_of(turns)), _answers(fields)
    left, right = answer(chosen, "chosen", spelling_of(chosen)), answer(rejected, "rejected", spelling_of(rejected))
    return _paired(asked, left, right, fields)


def _openai_preference(fields: Fields) -> CanonicalRow:
    """OpenAI's fine-tuning format: ``input.messages``, ``preferred_output``, ``non_preferred_output``."""
    value = required(fields, "input", "empty prompt")
    if not isinstance(value, Mapping):
        raise BadRowError(f"input is {named(value)}")
    require_nothing_else(value, ("messages", "tools", "parallel_tool_calls"), "input")  # the last one is irrelevant
    asked = prompt_turns(required(value, "messages", "empty prompt"), "input.messages")
    names = ("preferred_output", "non_preferred_output")
    left, right = (answer(required(fields, name, "no answer"), name) for name in names)
    return _paired(asked, left, right, {**fields, "tools": value.get("tools")})


def _oumi_preference(fields: Fields) -> CanonicalRow:
    """Oumi's format: ``messages`` is the prompt; ``chosen.messages``, ``rejected.messages``."""
    asked = prompt_turns(listed(fields, "messages", "empty prompt"), "messages")
    return _paired(asked, _oumi_answer(fields, "chosen"), _oumi_answer(fields, "rejected"), fields)


def _recognize_oumi(fields: Fields) -> tuple[str, ...]:
    """Its columns, but where ``messages`` repeats the chosen conversation, as in UltraFeedback."""
    found = {"messages", "chosen", "rejected"} <= fields.keys() and fields["messages"] != fields["chosen"]
    return ("messages", "chosen", "rejected") if found else ()


def _oumi_answer(fields: Fields, name: str) -> list[Message]:
    """An answer in Oumi's form, or as a string, a turn, or a list with one turn."""
    value = required(fields, name, "no answer")
    if not isinstance(value, Mapping) or "role" in value:
        return answer(value, name)
    require_nothing_else(value, ("messages", "conversation_id", "metadata"), name)  # the last two are ids
    return answer(required(value, "messages", "no answer"), f"{name}.messages")


@dataclass(frozen=True, kw_only=True)
class Format:
    """A format of users' rows.

    Args:
        name: value of ``format=``.
        kind: kind of the converted rows.
        accepted: an example row, for messages.
        mapping: column -> its meaning, for the report; all columns that the format reads.
        needs: the required columns, with alternative names. Only names decide: a bad value is a bad row, not a row
            of another format.
        read: converts a row to the form of ``kind``; raises ``BadRowError``.
        by_value: recognizes rows by their content instead of ``needs``; returns the columns, or nothing.
        losing: columns that it does not read although they matter for training: rows with one match this format only
            if the user sets it.
    """

    name: str
    kind: Kind
    accepted: str
    mapping: Mapping[str, str]
    needs: tuple[str | tuple[str, ...], ...] = ()
    read: Callable[[Fields], CanonicalRow]
    by_value: Callable[[Fields], tuple[str, ...]] | None = None
    losing: frozenset[str] = frozenset()

    def recognize(self, fields: Fields, *, configured: bool = False) -> tuple[str, ...]:
        """The columns by which a row matches this format; empty: it does not match.

        Args:
            configured: the user sets the format: ``needs``, where there are any, suffice.
        """
        if self.by_value and not (configured and self.needs):
            return self.by_value(fields)
        either = [(names,) if isinstance(names, str) else names for names in self.needs]
        found = [next((name for name in names if name in fields), None) for names in either]
        return tuple(name for name in found if name is not None) if None not in found else ()

    def convert(self, fields: Fields) -> CanonicalRow:
        """A row in the form of ``kind`` (BadRowError: what is wrong with it)."""
        try:
            row = self.read(with_turns(fields, self.mapping))
            return row if self.kind == Kind.TEXT else with_system_column(without_marks(row), fields)
        except BadRowError as error:
            if error.accepted:
                raise
            raise BadRowError(error.found, error.reason, self.accepted, error.remedy) from error

    def lost(self, fields: Fields) -> list[str]:
        """The columns of a row that would be lost."""
        return [] if self.losing.isdisjoint(fields) else sorted(self.losing & fields.keys())

    def unread(self, fields: Fields) -> list[str]:
        """The columns of a row that change what is trained and that this format does not read."""
        if REST in self.mapping:  # for a reward function, but none reads what the system says
            return sorted(self._set(fields, _OF_SYSTEM))
        found = self._set(fields, _OF_TEXT if self.kind == Kind.TEXT else _OF_CHAT)
        marks = self._set(fields, _WEIGHTS | _SWITCHES).items()
        odd = [name for name, value in marks if _truth(value) is None]
        texts = [
            name for name, value in marks if proposals.bare(name) in _SWITCHES and isinstance(value, str)
        ]  # of any meaning
        return sorted({*found, *odd} - {*texts})

    def switched_off(self, fields: Fields) -> list[str]:
        """The columns that say that a row is not trained; where all columns are read, only booleans do."""
        marks = self._set(fields, _WEIGHTS | _SWITCHES).items()
        return [
            name for name, value in marks if value is False or (REST not in self.mapping and _truth(value) is False)
        ]

    def _set(self, fields: Fields, names: frozenset[str]) -> dict[str, object]:
        """The values of such columns that this format does not read."""
        found = {name: fields[name] for name in _named(tuple(fields), names) if name not in self.mapping}
        return {name: value for name, value in found.items() if not is_nothing(value)}


@lru_cache(maxsize=64)  # most rows have the columns of the row before
def _named(columns: tuple[str, ...], names: frozenset[str]) -> list[str]:
    """The columns with one of these names, however they are written."""
    return [name for name in columns if proposals.bare(str(name)) in names]


_CHAT = '"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'
_ANSWER = '{"role": "assistant", "content": "..."}'
_SYSTEM = dict.fromkeys(SYSTEM, "the first turn of the prompt")
_THOUGHT = dict.fromkeys(THOUGHTS, "the assistant's turn, within <think>")
_TOOLS = {"tools": "tools", **_SYSTEM}
_ONE_ANSWER = {**_TOOLS, **_THOUGHT}
_PAIR = {"chosen": "chosen", "rejected": "rejected", "kind": "kind", **_TOOLS}

FORMATS: tuple[Format, ...] = (
    Format(
        name="text", kind=Kind.TEXT, needs=("text",), read=_text, mapping={"text": "the document"},
        accepted='{"text": "..."}',
    ),
    Format(
        name="messages", kind=Kind.CONVERSATIONS, needs=("messages",), read=_messages, losing=_JUDGED,
        accepted=f"{{{_CHAT}}}",
        mapping={"messages": "the conversation", "functions": "tools, as they were called before", **_ONE_ANSWER},
    ),
    Format(
        name="prompt_completion", kind=Kind.CONVERSATIONS, needs=("prompt", COMPLETION), read=_prompt_completion,
        accepted='{"prompt": "...", "completion": "..."}, each a string or a list of messages',
        mapping={
            "prompt": "the user's turn", **dict.fromkeys(COMPLETION, "the assistant's turn"), **_ONE_ANSWER,
        },
        losing=frozenset({"label"}),
    ),
    Format(
        name="alpaca", kind=Kind.CONVERSATIONS, needs=("instruction", _OUTPUTS), read=_alpaca,
        by_value=_recognize_instructions,
        accepted='{"instruction": "...", "input": "...", "output": "..."}',
        mapping={
            "instruction": "the user's turn", **dict.fromkeys(_INPUTS, "the user's turn, below the instruction"),
            **dict.fromkeys(_OUTPUTS, "the assistant's turn"), "history": "earlier turns", **_ONE_ANSWER,
        },
    ),
    Format(
        name="sharegpt", kind=Kind.CONVERSATIONS, needs=("conversations",), read=_sharegpt, losing=_JUDGED,
        accepted='{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}',
        mapping={"conversations": "the conversation", **_ONE_ANSWER},
    ),
    Format(
        name="contents", kind=Kind.CONVERSATIONS, needs=("contents",), read=_contents,
        accepted='{"contents": [{"role": "user", "parts": [{"text": "..."}]}, {"role": "model", "parts": [...]}]}',
        mapping={"contents": "the conversation", **dict.fromkeys(_INSTRUCTIONS, _SYSTEM["system"]), **_ONE_ANSWER},
    ),
    Format(
        name="responses", kind=Kind.CONVERSATIONS, needs=("input", "output"), by_value=_recognize_responses,
        read=_responses,
        accepted='{"input": "...", "output": [{"type": "message", "role": "assistant", "content": [...]}]}',
        mapping={
            "input": "the prompt", "output": "the answer, and calls", "instructions": _SYSTEM["system"], **_ONE_ANSWER,
        },
    ),
    Format(
        name="reasoning", kind=Kind.CONVERSATIONS, read=_reasoning,
        needs=(("problem", "question"), ("thinking", "reasoning", "reasoning_content"), ("solution", "answer")),
        accepted='{"problem": "...", "thinking": "...", "solution": "..."}',
        mapping={
            **dict.fromkeys(("problem", "question"), "the user's turn"),
            **_THOUGHT,
            **dict.fromkeys(("solution", "answer"), "the assistant's turn, below its thinking"),
            **_SYSTEM,
        },
    ),
    Format(
        name="multiple_choice", kind=Kind.CONVERSATIONS, by_value=recognize_choices, read=multiple_choice,
        accepted='{"question": "...", "choices": ["...", "..."], "answer": 1}, an index from 0, a letter or the text',
        mapping={**CHOICE_COLUMNS, **_THOUGHT, **_SYSTEM},
        losing=frozenset({*_OTHER_PROMPTS, *COMPLETION, "output", "solution", "chosen", "rejected"}),
    ),
    Format(
        name="function_calling", kind=Kind.CONVERSATIONS, needs=("query", "tools", "answers"), read=_function_calling,
        accepted='{"query": "...", "tools": [{"name": ...}], "answers": [{"name": ..., "arguments": {...}}]}',
        mapping={"query": "the user's turn", "answers": "the assistant's tool calls", **_ONE_ANSWER},
    ),
    Format(
        name="preference", kind=Kind.PREFERENCES, needs=("prompt", "chosen", "rejected"), read=_preference,
        accepted='{"prompt": "...", "chosen": "...", "rejected": "..."}, each a string or a list of messages',
        mapping={"prompt": "prompt", **_PAIR},
    ),
    Format(
        name="implicit_preference", kind=Kind.PREFERENCES, needs=("chosen", "rejected"), read=_implicit_preference,
        accepted='{"chosen": "...", "rejected": "..."}, both strings or both lists of messages, that begin alike',
        mapping={**_PAIR, "chosen": "prompt and chosen", "rejected": "prompt and rejected"},
        # Two texts often have some common beginning, so a column that may hold the prompt must be named as such.
        losing=frozenset({"prompt", "input", "messages", "conversations", *_PROMPTS}),
    ),
    Format(
        name="transcript_preference", kind=Kind.PREFERENCES, by_value=_recognize_transcripts,
        read=_transcript_preference,
        accepted=r'{"chosen": "\n\nHuman: ...\n\nAssistant: ...", "rejected": "\n\nHuman: ...\n\nAssistant: ..."} with '
        "one beginning and two last answers",
        mapping={
            "prompt": "the turns before the answers", **_PAIR, "chosen": "prompt and chosen",
            "rejected": "prompt and rejected",
        },
    ),
    Format(
        name="sharegpt_ranking", kind=Kind.PREFERENCES, needs=("conversations", "chosen", "rejected"),
        read=_sharegpt_ranking,
        accepted='{"conversations": [{"from": "human", "value": "..."}], "chosen": {"from": "gpt", "value": "..."}, '
        '"rejected": {"from": "gpt", "value": "..."}}',
        mapping={"conversations": "prompt", **_PAIR},
    ),
    Format(
        name="openai_preference", kind=Kind.PREFERENCES, needs=("input", "preferred_output", "non_preferred_output"),
        read=_openai_preference,
        accepted=f'{{"input": {{"messages": [...]}}, "preferred_output": [{_ANSWER}], '
        f'"non_preferred_output": [{_ANSWER}]}}',
        mapping={
            "input": "prompt and tools", "preferred_output": "chosen", "non_preferred_output": "rejected",
            "kind": "kind", **_SYSTEM,
        },
    ),
    Format(
        name="oumi_preference", kind=Kind.PREFERENCES, needs=("messages", "chosen", "rejected"), read=_oumi_preference,
        by_value=_recognize_oumi,
        accepted='{"messages": [{"role": "user", "content": "..."}], '
        f'"chosen": {{"messages": [{_ANSWER}]}}, "rejected": {{"messages": [{_ANSWER}]}}}}',
        mapping={"messages": "prompt", **_PAIR},
    ),
    Format(
        name="unpaired", kind=Kind.UNPAIRED, needs=("prompt", COMPLETION, "label"), read=_unpaired,
        accepted='{"prompt": "...", "completion": "...", "label": true}, the texts strings or lists of messages',
        mapping={"prompt": "prompt", **dict.fromkeys(COMPLETION, "completion"), "label": "label", **_ONE_ANSWER},
    ),
    Format(
        name="messages_label", kind=Kind.UNPAIRED, by_value=_recognize_judged, read=_messages_label,
        accepted=f'{{{_CHAT}, "label": true}}', losing=_JUDGED - {"label"},
        mapping={"messages": "prompt, and the last turn as completion", "label": "label", **_ONE_ANSWER},
    ),
    Format(
        name="prompts", kind=Kind.PROMPTS, needs=("prompt",), read=_prompts,
        accepted='{"prompt": "..."}, a string or a list of messages',
        mapping={"prompt": "prompt", **_TOOLS, REST: "columns, for a reward function"},
        losing=frozenset({*COMPLETION, "chosen", "rejected"}),
    ),
)  # fmt: skip

BY_NAME = {each.name: each for each in FORMATS}


WITHOUT_LOSS = "without loss by a column of theirs"  # reason why rows that are not bad are left out
_MEDIA = frozenset({*COLUMNS, "videos", "video", "audios", "audio"})
# Columns that formats read, the column that groups rows for the split, and that of labels.
_KNOWN_NAMES = frozenset({"group", DOMAIN, *(name for each in FORMATS for name in each.mapping if name != REST)})


@dataclass(frozen=True, kw_only=True)
class Detected:
    """How the rows of a source are read. Picklable: the format is looked up by name.

    Args:
        evidence: reason, and number of matching rows, for the report.
        columns: the format's names -> the user's.
        seen: the format's columns that the source has.
        configured: the user has set the format, which permits to ignore columns that it does not read.
        guess: by the names of the columns, where no format fits these; ``columns`` has its names.
    """

    name: str
    evidence: str
    columns: Mapping[str, str]
    seen: frozenset[str]
    configured: bool
    guess: Guess | None = None

    def filled(self, fields: Fields) -> Fields:
        """A row with the prompt of the guess's template (BadRowError: it lacks a column)."""
        return with_prompt(fields, self.guess.template) if self.guess and self.guess.template else fields

    @cached_property
    def format(self) -> Format:
        return BY_NAME[self.name]

    @property
    def mapping(self) -> dict[str, str]:
        """The user's columns -> their meaning, for the report."""
        used = [name for name in self.format.mapping if name in self.seen or name == REST]
        return {self.columns.get(name, name): self.format.mapping[name] for name in used}

    def refusal(self, place: str, accepted: Kind, remedy: str) -> str:
        """The message for rows of another kind than ``accepted``.

        Args:
            place: path of the source.
        """
        return (
            f"{place}: detected {self.name} ({self.evidence}), which gives {self.format.kind}; {accepted} is accepted "
            f"{remedy}, or set another format with format=NAME"
        )

    def refusal_by_stage(self, place: str, kind: Kind) -> str | None:
        """The message of a data stage that writes rows of this kind; None: it takes these rows."""
        found = self.format.kind
        if found == kind:
            return None
        splits = (found, kind) == (Kind.PREFERENCES, Kind.UNPAIRED)
        after = " and conf/stage/unpair.yaml after it, which splits pairs" if splits else ""
        return self.refusal(
            place, kind, f"by this stage; use pipeline={JOBS[found]}, or conf/stage/{found}.yaml{after}"
        )

    def read_columns(self, fields: Fields) -> set[str]:
        """The columns of a row that are read, by the format or as its group or label; others are ignored."""
        if REST in self.format.mapping:
            return set(fields)
        return (fields.keys() & self._read) | {*_named(tuple(fields), _WEIGHTS | _SWITCHES)}

    @property
    def domain(self) -> str | None:
        """The column of labels, which a source names where its rows keep them."""
        return self.columns.get(DOMAIN) if DOMAIN in ROW_KINDS[self.format.kind].rare else None

    @cached_property
    def _read(self) -> frozenset[str]:
        kept = self.format.mapping.keys() - set(self.columns.values())
        theirs = {theirs for ours, theirs in self.columns.items() if ours in self.format.mapping}
        images = COLUMNS if self.format.kind in WITH_IMAGES else ()
        theirs |= {self.columns.get("group", "group"), *([self.domain] if self.domain else [])}
        return frozenset(kept | theirs | {each.partition(".")[0] for each in theirs} | {*images})

    def convert(self, fields: Fields) -> CanonicalRow:
        """A row in the form of its kind (BadRowError: what is wrong with it)."""
        if self.columns:
            fields = renamed_row(fields, self.columns)
        if off := self.format.switched_off(fields):
            found = f"{off[0]} is {named(fields[off[0]])}"
            raise BadRowError(found, WITHOUT_LOSS, "rows that are trained", f"remove {off[0]} to train the row")
        for name in [] if _MEDIA.isdisjoint(fields) or self.name == "text" else sorted(_MEDIA & fields.keys()):
            if not is_nothing(fields[name]):
                raise images_are_not_read(f"the row has {name}")
        if not (self.configured or self.format.by_value is _recognize_transcripts):
            require_no_written_turns(fields, self.format.mapping, self.name)
        for name in () if self.configured else self.format.lost(fields):
            if fields[name] is not None:
                raise BadRowError(
                    f"the row has {name}, which {self.name} does not read", "unread answer or label",
                    f"rows of {self.name}", f"remove the row, or leave {name} unread with format={self.name}",
                )  # fmt: skip
        for name in () if self.configured else self.format.unread(fields):
            raise BadRowError(
                f"the row has {name}, which {self.name} does not read and which changes what is trained",
                "unread column", f"the columns {', '.join(each for each in self.format.mapping if each != REST)}",
                f"rename it to one of them with columns, remove it, or leave it unread with format={self.name}",
            )  # fmt: skip
        return self.format.convert(fields)


@dataclass(frozen=True, kw_only=True)
class _Fit:
    """The rows of a sample that match a format, by index, and the columns that match."""

    format: Format
    rows: frozenset[int]
    columns: frozenset[str]
    description: str


def detect(
    sample: Sequence[Fields], place: str, *, columns: Mapping[str, str] | None = None, configured: str | None = None,
    kind: Kind | None = None, templated: bool = False,
) -> Detected:  # fmt: skip
    """Detects the format of a source.

    Args:
        sample: its first rows.
        place: its path, for messages.
        columns: our names -> the user's columns.
        configured: name of the format, if the user sets it.
        kind: what is made of the rows, for a guess.
        templated: whether their prompts are filled from a template of the user's.

    Raises:
        ConfigError: there is no format of that name.
        DataError: no format fits, or several fit equally well; the message names the candidates. Or a rename does
            not fit the columns.
    """
    if configured and configured not in BY_NAME:
        near = get_close_matches(configured, BY_NAME, n=1, cutoff=0.0)[0]
        raise ConfigError(f"format={configured}: no such format; accepted: {', '.join(BY_NAME)}; did you mean {near}?")
    if not sample:
        raise DataError(f'{place}: no rows; give at least one row, such as a line {{"text": "..."}}')
    if columns:
        _check_renames(sample, place, columns)
    rows = [renamed_row(fields, columns) for fields in sample] if columns else sample
    # Columns that are null in all rows are ignored.
    present = frozenset(name for fields in rows for name, value in fields.items() if value is not None)
    known = [BY_NAME[configured]] if configured else FORMATS
    fits = [_fit(each, rows, present, configured=configured is not None) for each in known]
    fitting = _best(fits, 1 if configured else len(rows) / 2)  # bad rows among good ones do not hide the format
    if len(fitting) > 1:
        listed = ", ".join(
            f"{each.format.name} ({each.description}: {len(each.rows)} rows from row {min(each.rows) + 1} on)"
            for each in sorted(fitting, key=lambda each: min(each.rows))
        )
        raise DataError(
            f"{place}: {len(fitting)} formats fit: {listed}; rows of one format are accepted; make a source of each, "
            "or say with format=NAME as what all are read"
        )
    if not fitting:
        guessed = None if configured else _guessed(sample, rows, place, columns or {}, kind, templated=templated)
        if guessed is None:
            raise DataError(f"{place}: {_misfit(fits, rows, place, kind)}")
        return guessed
    best = fitting[0]
    if DOMAIN in (columns or {}) and not {REST, DOMAIN} & {*best.format.mapping, *ROW_KINDS[best.format.kind].rare}:
        found = f"columns.{DOMAIN}: these are {best.format.kind}, and labels of text and conversations are accepted"
        raise DataError(f"{place}: {found}; remove it")
    return Detected(
        name=best.format.name, columns=columns or {}, configured=configured is not None,
        seen=best.columns | (best.format.mapping.keys() & present),
        evidence=f"{best.description}: {len(best.rows)} of {len(rows)} rows looked at",
    )  # fmt: skip


def _guessed(
    sample: Sequence[Fields], rows: Sequence[Fields], place: str, columns: Mapping[str, str], kind: Kind | None, *,
    templated: bool,
) -> Detected | None:  # fmt: skip
    """How rows that no format fits are read by the names of their columns; None: these are no help."""
    own = guess(rows, kind, with_context=not (columns or templated))
    if own is None or own.columns.keys() & columns.keys():
        return None
    filled = list[Fields]()
    for fields in sample:
        with suppress(BadRowError):  # reported when all rows are read
            filled.append(with_prompt(fields, own.template) if own.template else fields)
    names = {ours: columns.get(theirs, theirs) for ours, theirs in own.columns.items()}
    with suppress(DataError):
        found = detect(filled, place, columns={**columns, **names}, kind=kind, templated=True)
        if found.guess is None:  # it has a format, so that nothing is guessed twice
            evidence = f"{shlex.join(own.overrides)}, a guess by the names of the columns; {found.evidence}"
            return replace(found, guess=own, evidence=evidence)
    return None


def _fit(format: Format, rows: Sequence[Fields], present: frozenset[str], *, configured: bool) -> _Fit:
    found = {}
    for index, fields in enumerate(rows):
        shown = {name: value for name, value in fields.items() if name in present}
        if (configured or not format.lost(fields)) and (names := format.recognize(shown, configured=configured)):
            found[index] = names
    most = Counter(found.values()).most_common(1)
    description = f"has {' and '.join(most[0][0])}" if most else ""
    return _Fit(
        format=format, rows=frozenset(found), columns=frozenset().union(*found.values()), description=description
    )


def _best(fits: Sequence[_Fit], needed: float) -> list[_Fit]:
    """Formats that fit enough rows, without those whose columns are a proper subset of another one's.

    A format that explains only a few rows, but more of their columns, is kept as a candidate: those columns would be
    lost.
    """
    enough = [each for each in fits if len(each.rows) >= needed]
    best = [each for each in enough if not any(each.columns < other.columns for other in enough)]
    rare = [each for each in fits if each.rows and each not in enough]
    return best + [each for each in rare if any(other.columns < each.columns for other in best)]


_USUAL = "prompt and completion, messages, or text"


def _misfit(fits: Sequence[_Fit], rows: Sequence[Fields], place: str, kind: Kind | None) -> str:
    """Why no format fits: what the nearest formats miss in the first row that does not match them."""
    columns = list(dict.fromkeys(str(name) for fields in rows for name in fields))
    if inner := proposals.inner_rows(rows, place):
        return f"no format fits the columns {', '.join(columns)}; {inner}"
    near = [each for each in fits if each.rows or each.format.mapping.keys() & set(columns) or len(fits) == 1]
    near.sort(key=lambda each: (-len(each.rows), -len(each.format.mapping.keys() & set(columns))))
    problems = "; ".join(f"{each.format.name}: {_problem(each, rows)}" for each in near[:3])
    names = [each.format.name for each in fits]
    accepted = names[0] if len(names) == 1 else f"the columns of one of {len(names)} formats, such as {_USUAL}"
    return (
        f"no format fits the columns {', '.join(columns) or 'none'}{problems and f' ({problems})'}; "
        f"accepted: {accepted}; {proposals.how_to_name(rows, columns, kind, place)}, "
        "or say which format is meant with format=NAME"
    )


def _problem(fit: _Fit, rows: Sequence[Fields]) -> str:
    if lost := fit.format.lost(other := next(row for index, row in enumerate(rows) if index not in fit.rows)):
        return f"it does not read {', '.join(lost)}"
    try:
        fit.format.convert(other)
    except BadRowError as error:
        return error.found
    return "it is null in all rows looked at"


def check_direction(field: str, columns: Mapping[str, str], format: str | None) -> None:
    """Checks that ``columns`` maps our names to the rows' columns and not vice versa, as far as names tell.

    Args:
        field: name of the setting, such as ``sources.rows.columns``.
        format: format of the source, if set.
    """
    for ours, theirs in columns.items():
        # Prompts keep all columns for reward functions, which may have any name.
        if ours not in _KNOWN_NAMES and theirs in _KNOWN_NAMES and format != "prompts":
            raise ConfigError(
                f"{field}.{ours}={theirs}: {ours!r} is not a name that a format knows; "
                f"{inverted_hint(field, theirs, ours)} "
                f"(or format=prompts, if the rows' column {theirs!r} is for a reward function that calls it {ours!r})"
            )


def _check_renames(sample: Sequence[Fields], place: str, columns: Mapping[str, str]) -> None:
    """Refuses renames of missing columns, and renames of two columns to one name."""
    present = list(dict.fromkeys(str(name) for fields in sample for name in with_inner(fields, columns)))
    for ours, theirs in columns.items():
        turned = f"; {inverted_hint('columns', theirs, ours)}" if theirs in _KNOWN_NAMES and ours in present else ""
        if theirs not in present:
            found = f"{theirs!r} is not a column; there are: {', '.join(present)}{turned or '; name one of these'}"
        elif list(columns.values()).count(theirs) > 1:
            found = f"the column {theirs!r} is named twice; one name for a column is accepted; remove the other"
        elif ours in present and ours not in columns.values():
            found = f"there is a column {ours!r} already; one column of a name is accepted; rename the other one too"
            found += turned if ours not in _KNOWN_NAMES else ""
        else:
            continue
        raise DataError(f"{place}: columns.{ours}={theirs}: {found}")
