"""A damaged row of any format is refused, or nothing that it says is lost."""

import copy
import json
import re
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.data.formats.detect import BY_NAME
from tasks.data.formats.turns import BadRowError
from tasks.data.preparing.convert_rows import remarks

Row = dict[str, object]


# Damage: every text of these rows is a word of its own, so that a lost or a doubled one is seen.
CALL = {"name": "look", "arguments": {"where": "w11", "depth": {"n": ["w12"]}}}
TOOL = {"name": "look", "description": "w13", "parameters": {"properties": {"where": {"type": "w14"}}}}
TURNS = [
    {"role": "system", "content": "w0"}, {"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"},
    {"role": "user", "content": "w3"},
    {"role": "assistant", "content": "w4", "tool_calls": [{"id": "w15", "type": "function", "function": CALL}]},
    {"role": "tool", "content": "w5", "tool_call_id": "w15"}, {"role": "assistant", "content": "w6"},
]  # fmt: skip
ASKED, CHOSEN, REJECTED = TURNS[:2], {"role": "assistant", "content": "w7"}, {"role": "assistant", "content": "w8"}
GOOD: dict[str, Row] = {
    "text": {"text": "w0"},
    "messages": {"messages": TURNS, "tools": [TOOL]},
    "prompt_completion": {"prompt": ASKED, "completion": [CHOSEN]},
    "alpaca": {"instruction": "w0", "input": "w1", "output": "w2", "system": "w3", "history": [["w4", "w5"]]},
    "sharegpt": {
        "conversations": [
            {"from": "human", "value": "w0"}, {"from": "gpt", "value": "w1"}, {"from": "human", "value": "w2"},
            {"from": "function_call", "value": json.dumps(CALL)}, {"from": "observation", "value": "w3"},
            {"from": "gpt", "value": "w4"},
        ],
        "system": "w5", "tools": json.dumps([TOOL]),
    },
    "contents": {
        "contents": [
            {"role": "user", "parts": [{"text": "w0"}]},
            {"role": "model", "parts": [{"text": "w1", "thought": True}, {"text": "w2"}]},
            {"role": "user", "parts": [{"text": "w3"}]},
            {"role": "model", "parts": [{"functionCall": {"id": "w15", "name": "look", "args": CALL["arguments"]}}]},
            {"role": "user", "parts": [{"functionResponse": {"id": "w15", "name": "look", "response": {"n": "w4"}}}]},
        ],
        "systemInstruction": {"parts": [{"text": "w5"}]}, "tools": [{"functionDeclarations": [TOOL]}],
    },
    "responses": {
        "input": "w0", "instructions": "w1", "tools": [{**TOOL, "type": "function"}],
        "output": [
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "w2"}]},
            {"type": "function_call", "call_id": "w15", "name": "look", "arguments": json.dumps(CALL["arguments"])},
        ],
    },
    "reasoning": {"problem": "w0", "thinking": "w1", "solution": "w2"},
    "multiple_choice": {"context": "w3", "question": "w0", "choices": ["w1", "w2"], "answer": 1},
    "function_calling": {"query": "w0", "tools": [TOOL], "answers": [CALL]},
    "preference": {"prompt": ASKED, "chosen": "w7", "rejected": [REJECTED], "kind": "w9"},
    "implicit_preference": {"chosen": [*ASKED, CHOSEN], "rejected": [*ASKED, REJECTED], "kind": "w9"},
    "transcript_preference": {
        "chosen": "\n\nHuman: w0\n\nAssistant: w1", "rejected": "\n\nHuman: w0\n\nAssistant: w2", "kind": "w9",
    },
    "sharegpt_ranking": {
        "conversations": [{"from": "human", "value": "w0"}], "chosen": {"from": "gpt", "value": "w1"},
        "rejected": {"from": "gpt", "value": "w2"},
    },
    "openai_preference": {
        "input": {"messages": ASKED, "tools": [TOOL]}, "preferred_output": [CHOSEN], "non_preferred_output": [REJECTED],
    },
    "oumi_preference": {"messages": ASKED, "chosen": {"messages": [CHOSEN]}, "rejected": {"messages": [REJECTED]}},
    "unpaired": {"prompt": ASKED, "completion": "w7", "label": True},
    "messages_label": {"messages": [*ASKED, CHOSEN], "label": False},
    "prompts": {"prompt": ASKED, "answer": "w7"},
}  # fmt: skip
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["", " ", "w20", "[", "{}", "\ud83d"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["role", "content", "name", "text", "from", "w21"]), inner, max_size=2)
    ),
    max_leaves=4,
)


def places(value: object, path: tuple[object, ...] = ()) -> Iterator[tuple[object, ...]]:
    """Where a row can be damaged."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


@st.composite
def damaged(draw: Callable[[st.SearchStrategy[object]], object], name: str) -> Row:
    row = copy.deepcopy(GOOD[name])
    for _ in range(draw(st.integers(1, 2))):  # type: ignore[call-overload]
        path = draw(st.sampled_from(list(places(row)) or [()]))
        if not path:
            return row
        *above, key = path  # type: ignore[misc]
        holder: object = row
        for step in above:
            holder = holder[step]  # type: ignore[index]
        how = draw(st.sampled_from(["drop", "replace", "swap", "double"]))
        if how == "drop":
            del holder[key]  # type: ignore[attr-defined]
        elif how == "replace" or isinstance(holder, dict):
            holder[key] = draw(JUNK)  # type: ignore[index]
        elif how == "swap":
            holder[0], holder[key] = holder[key], holder[0]  # type: ignore[index]
        else:
            holder.insert(0, copy.deepcopy(holder[key]))  # type: ignore[attr-defined]
    return row


def overrides(value: object) -> set[str]:
    return set(re.findall(r"w\d+", json.dumps(value).replace("\\n", " ")))


@pytest.mark.parametrize("name", BY_NAME)
@given(data=st.data())
def test_a_damaged_row_is_refused_or_nothing_that_it_says_is_lost(name: str, data: st.DataObject) -> None:
    row = data.draw(damaged(name))
    each = BY_NAME[name]
    each.recognize(row)
    before = copy.deepcopy(row)
    made, refusal = None, None
    try:
        made = each.convert(row)
    except BadRowError as error:
        refusal = error
    assert repr(row) == repr(before)
    if made is None:
        assert refusal
        assert str(refusal).encode()
        assert refusal.reason
        return
    json.dumps(made, ensure_ascii=False).encode()
    remarks(made)
    read = {column: value for column, value in row.items() if column in each.mapping or "*" in each.mapping}
    assert overrides(made) == overrides(read)
