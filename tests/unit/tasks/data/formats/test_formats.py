"""Every format: told from its rows, and what each row becomes."""

import hashlib
import json
import pickle
from collections.abc import Mapping

import pytest

from lineage.artifact import Kind
from tasks.data.formats.detect import Detected, detect
from tasks.data.formats.known import BY_NAME
from tasks.data.kinds import messages_of, tools_of
from tasks.data.preparing.row_split import canonical

Row = dict[str, object]


def user(content: str) -> Row:
    return {"role": "user", "content": content}


def assistant(content: str) -> Row:
    return {"role": "assistant", "content": content}


def system(content: str) -> Row:
    return {"role": "system", "content": content}


def said(who: str, value: str) -> Row:
    return {"from": who, "value": value}


Q, A, B, S = user("q"), assistant("a"), assistant("b"), system("s")
WEATHER = {"name": "weather", "description": "d", "parameters": {"type": "object", "properties": {"z": {}, "a": {}}}}
TOOLS = json.dumps([{"type": "function", "function": WEATHER}])
CALL = {"name": "weather", "arguments": {"z": "Zürich", "a": 1}}
CALLS = json.dumps([{"type": "function", "function": CALL}], ensure_ascii=False)
CALLS_1 = json.dumps([{"type": "function", "id": "1", "function": CALL}], ensure_ascii=False)
OPENAI_CALL = {"id": "1", "type": "function", "function": {**CALL, "arguments": json.dumps(CALL["arguments"])}}
CALLING = {"role": "assistant", "content": "", "tool_calls": CALLS}
RESULT = {"role": "tool", "content": "sun"}

CASES: dict[str, list[tuple[Row, Row]]] = {
    "text": [({"text": " a\n", "id": 1}, {"text": " a\n"})],
    "messages": [
        ({"messages": [S, Q, A, Q, B]}, {"messages": [S, Q, A, Q, B]}),
        ({"messages": [Q, A, Q]}, {"messages": [Q, A, Q]}),
        ({"messages": [{**Q, "role": "Human"}, {**A, "role": "Assistant"}]}, {"messages": [Q, A]}),
        ({"messages": [{**Q, "role": "prompter"}, {**A, "role": "assistant"}]}, {"messages": [Q, A]}),
        ({"messages": json.dumps([Q, A]), "tools": ""}, {"messages": [Q, A]}),
        (
            {"messages": [{**Q, "name": None, "tool_calls": []}, {**A, "weight": 1}], "tools": None},
            {"messages": [Q, A]},
        ),
        (
            {"messages": [{**S, "role": "developer"}, {**Q, "name": "Ann"}, A]},
            {"messages": [S, {**Q, "name": "Ann"}, A]},
        ),
        (
            {"messages": [{**Q, "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]}, A]},
            {"messages": [user("a b"), A]},
        ),
        (
            {
                "messages": [
                    Q,
                    {"role": "assistant", "content": None, "tool_calls": [OPENAI_CALL]},
                    {**RESULT, "tool_call_id": "1"},
                    {**RESULT, "content": ""},
                    A,
                ],
                "tools": [{"type": "function", "function": WEATHER}],
            },
            {
                "messages": [
                    Q,
                    {**CALLING, "tool_calls": CALLS_1},
                    {**RESULT, "tool_call_id": "1"},
                    {**RESULT, "content": ""},
                    A,
                ],
                "tools": TOOLS,
            },
        ),
        (
            {
                "messages": [
                    Q,
                    {"role": "assistant", "content": "wait", "function_call": CALL},
                    {"role": "function", "name": "weather", "content": "sun"},
                    A,
                ],
                "functions": [WEATHER],
            },
            {
                "messages": [Q, {**CALLING, "content": "wait"}, {**RESULT, "name": "weather"}, A],
                "tools": TOOLS,
            },
        ),
        (
            {"messages": [Q, CALLING], "tools": TOOLS},
            {"messages": [Q, CALLING], "tools": TOOLS},
        ),  # a prepared row again
        (
            {"messages": [Q, {"role": "assistant", "tool_calls": [{"name": "f"}]}]},
            {
                "messages": [
                    Q,
                    {**CALLING, "tool_calls": '[{"type": "function", "function": {"name": "f", "arguments": {}}}]'},
                ]
            },
        ),
    ],
    "prompt_completion": [
        ({"prompt": "q", "completion": "a"}, {"messages": [Q, A]}),
        ({"prompt": "q", "response": "a", "completion": None}, {"messages": [Q, A]}),
        ({"prompt": [S, Q], "completion": [A], "tools": TOOLS}, {"messages": [S, Q, A], "tools": TOOLS}),
    ],
    "alpaca": [
        ({"instruction": "q", "input": "", "output": "a"}, {"messages": [Q, A]}),
        ({"instruction": "q", "input": "i", "output": "a"}, {"messages": [user("q\ni"), A]}),
        ({"instruction": "", "input": "i", "output": "a"}, {"messages": [user("i"), A]}),
        (
            {"instruction": "q", "input": None, "output": "a", "system": "s", "history": [["h", "b"]]},
            {"messages": [S, user("h"), B, Q, A]},
        ),
    ],
    "sharegpt": [
        ({"conversations": [said("human", "q"), said("gpt", "a")], "id": "x"}, {"messages": [Q, A]}),
        *(
            ({"conversations": [said("user", "q"), said(who, "a")], "system": "s"}, {"messages": [S, Q, A]})
            for who in ("assistant", "chatgpt", "bing", "bard", "GPT", "model", "ai", "Bot")
        ),
        *(
            (
                {
                    "conversations": [
                        said("system", "s"),
                        said("human", "q"),
                        said("function_call", json.dumps(CALL)),
                        said(who, "sun"),
                        said("gpt", "a"),
                    ],
                    "tools": json.dumps([WEATHER]),
                },
                {"messages": [S, Q, CALLING, RESULT, A], "tools": TOOLS},
            )
            for who in ("observation", "tool", "function_response")
        ),
        ({"conversations": [Q, A], "tools": "[]"}, {"messages": [Q, A]}),
        ({"conversations": [{**said("human", "q"), "weight": None}, said("gpt", "a")]}, {"messages": [Q, A]}),
    ],
    "reasoning": [
        (
            {"problem": "q", "thinking": "t", "solution": "a"},
            {"messages": [Q, assistant("<think>\nt\n</think>\n\na")]},
        ),
        (
            {"question": "q", "reasoning": "t", "answer": "a", "system": "s"},
            {"messages": [S, Q, assistant("<think>\nt\n</think>\n\na")]},
        ),
    ],
    "function_calling": [
        (
            {"query": "q", "tools": json.dumps([WEATHER]), "answers": json.dumps([CALL]), "id": 3},
            {"messages": [Q, CALLING], "tools": TOOLS},
        ),
        ({"query": "q", "tools": [WEATHER], "answers": [CALL]}, {"messages": [Q, CALLING], "tools": TOOLS}),
    ],
    "preference": [
        (
            {"prompt": "q", "chosen": "a", "rejected": "b", "kind": "k"},
            {"prompt": [Q], "chosen": [A], "rejected": [B], "kind": "k"},
        ),
        (
            {"prompt": [S, Q], "chosen": [A], "rejected": [B], "tools": [WEATHER]},
            {"prompt": [S, Q], "chosen": [A], "rejected": [B], "kind": None, "tools": TOOLS},
        ),
        (
            {"prompt": "q", "chosen": [S, Q, A], "rejected": [S, Q, B]},
            {"prompt": [S, Q], "chosen": [A], "rejected": [B], "kind": None},
        ),
        (
            {"prompt": "q", "chosen": [CALLING], "rejected": "b"},
            {"prompt": [Q], "chosen": [CALLING], "rejected": [B], "kind": None},
        ),
    ],
    "implicit_preference": [
        (
            {"chosen": [S, Q, A, Q, A], "rejected": [S, Q, A, Q, B]},
            {"prompt": [S, Q, A, Q], "chosen": [A], "rejected": [B], "kind": None},
        ),
        (
            {"chosen": "q a", "rejected": "q b"},
            {"prompt": [Q], "chosen": [assistant(" a")], "rejected": [assistant(" b")], "kind": None},
        ),
    ],
    "transcript_preference": [
        (
            {"chosen": "\n\nHuman: q\n\nAssistant: a", "rejected": "\n\nHuman: q\n\nAssistant: b"},
            {"prompt": [Q], "chosen": [A], "rejected": [B], "kind": None},
        ),
        (
            {
                "prompt": "\n\nSystem: s\n\nHuman: q\n\nAssistant: a\n\nHuman: q\n\nAssistant:",
                "chosen": " a",
                "rejected": "\n\nAssistant: b",
                "kind": "k",
            },
            {"prompt": [S, Q, A, Q], "chosen": [A], "rejected": [B], "kind": "k"},
        ),
    ],
    "sharegpt_ranking": [
        (
            {"conversations": [said("human", "q")], "chosen": said("gpt", "a"), "rejected": said("gpt", "b")},
            {"prompt": [Q], "chosen": [A], "rejected": [B], "kind": None},
        ),
        (
            {"conversations": [said("human", "q")], "chosen": "a", "rejected": B, "system": "s"},
            {"prompt": [S, Q], "chosen": [A], "rejected": [B], "kind": None},
        ),
    ],
    "openai_preference": [
        (
            {
                "input": {"messages": [Q], "tools": [WEATHER], "parallel_tool_calls": True},
                "preferred_output": [A],
                "non_preferred_output": [B],
            },
            {"prompt": [Q], "chosen": [A], "rejected": [B], "kind": None, "tools": TOOLS},
        )
    ],
    "oumi_preference": [
        (
            {"messages": [S, Q], "chosen": {"messages": [A], "metadata": {"n": 1}}, "rejected": {"messages": [B]}},
            {"prompt": [S, Q], "chosen": [A], "rejected": [B], "kind": None},
        ),
        (
            {"messages": [S, Q], "chosen": "a", "rejected": [B], "kind": ""},
            {"prompt": [S, Q], "chosen": [A], "rejected": [B], "kind": None},
        ),
        (
            {"messages": [S, Q], "chosen": A, "rejected": B},
            {"prompt": [S, Q], "chosen": [A], "rejected": [B], "kind": None},
        ),
    ],
    "unpaired": [
        *(
            ({"prompt": "q", "completion": "a", "label": label}, {"prompt": [Q], "completion": [A], "label": wanted})
            for label, wanted in [(True, True), (0, False), (1.0, True), ("false", False), ("True", True)]
        ),
        (
            {"prompt": [Q], "response": [A], "label": False, "tools": [WEATHER]},
            {"prompt": [Q], "completion": [A], "label": False, "tools": TOOLS},
        ),
    ],
    "messages_label": [
        ({"messages": [Q, A, Q, B], "label": True}, {"prompt": [Q, A, Q], "completion": [B], "label": True}),
        ({"messages": [Q, {**A, "label": False}]}, {"prompt": [Q], "completion": [A], "label": False}),
    ],
    "prompts": [
        ({"prompt": "q"}, {"prompt": [Q]}),
        (
            {"prompt": [S, Q], "z": 1, "answer": ["Zürich", None], "group": "g", "tools": [WEATHER]},
            {"prompt": [S, Q], "columns": '{"answer": ["Zürich", null], "z": 1}', "tools": TOOLS},
        ),
    ],
}
ALL = [(name, row, made) for name, cases in CASES.items() for row, made in cases]


def test_every_format_has_examples() -> None:
    assert CASES.keys() == BY_NAME.keys()


@pytest.mark.parametrize(("name", "row", "made"), ALL, ids=[f"{name}-{index}" for index, (name, *_) in enumerate(ALL)])
def test_a_row_is_told_and_brought_into_the_form_of_its_kind(name: str, row: Row, made: Row) -> None:
    before = json.dumps(row)
    detected = detect([row], "rows.jsonl")
    assert detected.name == name
    assert detected.evidence.endswith(": 1 of 1 rows looked at")
    assert detected.convert(row) == made
    assert json.dumps(row) == before, "the user's row is left as it is"
    assert detect([row], "rows.jsonl", stated=name).convert(row) == made
    copied: Detected = pickle.loads(pickle.dumps(detected))
    assert copied == detected
    assert copied.convert(row) == made


KINDS = {
    Kind.TEXT: {"text"},
    Kind.CONVERSATIONS: {"messages", "tools"},
    Kind.PREFERENCES: {"prompt", "chosen", "rejected", "kind", "tools"},
    Kind.UNPAIRED: {"prompt", "completion", "label", "tools"},
    Kind.PROMPTS: {"prompt", "columns", "tools"},
}


@pytest.mark.parametrize(("name", "row", "made"), ALL, ids=[f"{name}-{index}" for index, (name, *_) in enumerate(ALL)])
def test_a_row_has_the_columns_of_its_kind_and_is_decoded_as_chat_templates_take_it(
    name: str, row: Row, made: Row
) -> None:
    assert made.keys() <= KINDS[BY_NAME[name].kind]
    for column in ("messages", "prompt", "chosen", "rejected", "completion"):
        for message in messages_of(made.get(column, [])):
            assert isinstance(message["content"], str)
            for call in message.get("tool_calls", []):  # type: ignore[attr-defined]
                assert call["type"] == "function"
                assert isinstance(call["function"]["arguments"], dict)
    if "tools" in made:
        assert tools_of(made) == [{"type": "function", "function": WEATHER}]


def test_tools_and_arguments_keep_the_order_of_their_keys() -> None:
    row = CASES["function_calling"][0][0]
    made = detect([row], "rows").convert(row)
    assert list(tools_of(made)[0]["function"]["parameters"]["properties"]) == ["z", "a"]  # type: ignore[index]
    (call,) = messages_of(made["messages"])[1]["tool_calls"]  # type: ignore[misc]
    assert list(call["function"]["arguments"]) == ["z", "a"]


@pytest.mark.parametrize(
    ("row", "row_id"),
    [
        ({"text": "Grüße, 世界"}, "96126b7969a88287"),
        ({"messages": [S, Q, A]}, "9e41d07551568a06"),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "8232f3251b1ae517"),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "kind": "k"}, "4eb808286f7ff7cd"),
    ],
)
def test_plain_rows_keep_the_ids_that_they_had_before_there_were_formats(row: Row, row_id: str) -> None:
    made: Mapping[str, object] = detect([row], "rows").convert(row)
    assert hashlib.sha256(canonical(made).encode()).hexdigest()[:16] == row_id
