"""Random rows of every format become the messages that they were made of; damaged ones are refused or say it all."""

import copy
import json
import re
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.data.formats.known import BY_NAME
from tasks.data.formats.values import BadRowError, is_blank
from tasks.data.kinds import messages_of
from tasks.data.preparing.convert_rows import remarks

Row = dict[str, object]
Turn = dict[str, str]

# Text as people write it: any characters, something in it, no half pairs, no marks of tool calls or of thinking.
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
    lambda text: not is_blank(text) and "<" not in text
)


def conversations(*, ends: str = "assistant") -> st.SearchStrategy[list[Turn]]:
    """Questions and answers in turn, perhaps after a system turn, up to a turn of ``ends``."""

    @st.composite
    def draw(draw: Callable[[st.SearchStrategy[object]], object]) -> list[Turn]:
        rounds = draw(st.integers(1, 3))
        assert isinstance(rounds, int)
        roles = ["user", "assistant"] * rounds
        roles = roles if ends == "assistant" else roles[:-1]
        roles = ["system", *roles] if draw(st.booleans()) else roles
        return [{"role": role, "content": str(draw(texts))} for role in roles]

    return draw()


def _from_value(turn: Turn) -> Turn:
    who = {"user": "human", "assistant": "gpt", "system": "system"}[turn["role"]]
    return {"from": who, "value": turn["content"]}


def _alpaca(turns: list[Turn]) -> Row:
    system = turns[0]["content"] if turns[0]["role"] == "system" else None
    said = [turn["content"] for turn in turns if turn["role"] != "system"]
    history = [list(pair) for pair in zip(said[:-2:2], said[1:-2:2], strict=True)]
    return {"instruction": said[-2], "input": "", "output": said[-1], "system": system, "history": history}


def _parts(turn: Turn) -> Row:
    middle = len(turn["content"]) // 2
    pieces = (turn["content"][:middle], turn["content"][middle:])
    return {**turn, "content": [{"type": "text", "text": piece} for piece in pieces]}


MADE_OF: dict[str, Callable[[list[Turn]], tuple[str, Row]]] = {
    "messages": lambda turns: ("messages", {"messages": turns}),
    "messages in parts": lambda turns: ("messages", {"messages": [_parts(turn) for turn in turns]}),
    "messages of a table": lambda turns: (
        "messages", {"messages": [{**turn, "name": None, "tool_calls": None} for turn in turns]},
    ),
    "prompt_completion": lambda turns: ("prompt_completion", {"prompt": turns[:-1], "completion": turns[-1:]}),
    "alpaca": lambda turns: ("alpaca", _alpaca(turns)),
    "sharegpt": lambda turns: ("sharegpt", {"conversations": [_from_value(turn) for turn in turns]}),
    "sharegpt with roles": lambda turns: ("sharegpt", {"conversations": turns}),
}  # fmt: skip


@pytest.mark.parametrize("spelling", MADE_OF)
@given(turns=conversations())
def test_a_conversation_is_read_as_what_was_said(spelling: str, turns: list[Turn]) -> None:
    name, row = MADE_OF[spelling](turns)
    assert BY_NAME[name].recognize(row)
    made = BY_NAME[name].convert(row)
    assert messages_of(made["messages"]) == turns
    remarks(made)


ANSWERED: dict[str, Callable[[list[Turn], Turn, Turn], tuple[str, Row]]] = {
    "preference": lambda asked, chosen, rejected: (
        "preference", {"prompt": asked, "chosen": chosen["content"], "rejected": [rejected]},
    ),
    "implicit prompt": lambda asked, chosen, rejected: (
        "implicit_preference", {"chosen": [*asked, chosen], "rejected": [*asked, rejected]},
    ),
    "sharegpt_ranking": lambda asked, chosen, rejected: (
        "sharegpt_ranking",
        {
            "conversations": [_from_value(turn) for turn in asked],
            "chosen": _from_value(chosen), "rejected": _from_value(rejected),
        },
    ),
    "openai_preference": lambda asked, chosen, rejected: (
        "openai_preference",
        {"input": {"messages": asked}, "preferred_output": [chosen], "non_preferred_output": [rejected]},
    ),
    "oumi_preference": lambda asked, chosen, rejected: (
        "oumi_preference",
        {"messages": asked, "chosen": {"messages": [chosen]}, "rejected": {"messages": [rejected]}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("spelling", ANSWERED)
@given(asked=conversations(ends="user"), chosen=texts, rejected=texts)
def test_a_preference_is_read_as_what_was_said(spelling: str, asked: list[Turn], chosen: str, rejected: str) -> None:
    answers = [{"role": "assistant", "content": each} for each in (chosen, rejected)]
    name, row = ANSWERED[spelling](asked, *answers)
    assert BY_NAME[name].recognize(row)
    if chosen == rejected:
        with pytest.raises(BadRowError, match="chosen and rejected are the same"):
            BY_NAME[name].convert(row)
        return
    made = BY_NAME[name].convert(row)
    assert made == {"prompt": asked, "chosen": answers[:1], "rejected": answers[1:], "kind": None}


@given(turns=conversations(), label=st.booleans(), inside=st.booleans())
def test_a_judged_answer_is_read_as_what_was_said(turns: list[Turn], label: bool, inside: bool) -> None:
    made = {"prompt": turns[:-1], "completion": turns[-1:], "label": label}
    apart: Row = {"prompt": turns[:-1], "response": turns[-1]["content"], "label": label}
    whole: Row = {"messages": turns, "label": label}
    if inside:
        whole = {"messages": [*turns[:-1], {**turns[-1], "label": label}]}
    assert BY_NAME["unpaired"].convert(apart) == made
    assert BY_NAME["messages_label"].convert(whole) == made


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
    "reasoning": {"problem": "w0", "thinking": "w1", "solution": "w2"},
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


def words(value: object) -> set[str]:
    return set(re.findall(r"\bw\d+\b", json.dumps(value).replace("\\n", " ")))


@pytest.mark.parametrize("name", BY_NAME)
def test_the_rows_to_damage_are_good(name: str) -> None:
    made = BY_NAME[name].convert(GOOD[name])
    assert words(made) == words(GOOD[name])


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
    assert words(made) == words(read)
