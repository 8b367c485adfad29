"""Every format: told from its rows, and what each row becomes."""

import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from lineage.artifact import Kind
from tasks.data.formats.detect import BY_NAME, FORMATS, WITHOUT_LOSS, Detected, detect
from tasks.data.formats.turns import THOUGHTS, BadRowError
from tasks.data.kinds import messages_of, tools_of

Row = dict[str, object]


def user(content: str) -> Row:
    return {"role": "user", "content": content}


def assistant(content: str) -> Row:
    return {"role": "assistant", "content": content}


def system(content: str) -> Row:
    return {"role": "system", "content": content}


def output(who: str, value: str) -> Row:
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
OPENAI_ITEM = {"type": "function_call", "id": "f", "call_id": "1", "name": "weather", "status": "completed",
               "arguments": json.dumps(CALL["arguments"])}  # fmt: skip
OPENAI_RESULT = {"type": "function_call_output", "call_id": "1", "output": "sun"}
GEMINI_Q = {"role": "user", "parts": [{"text": "q"}]}
PAIR: Row = {"prompt": [Q], "chosen": [A], "rejected": [B], "kind": None}

CASES: dict[str, list[tuple[Row, Row]]] = {
    "text": [({"text": " a\n", "id": 1}, {"text": " a\n"})],
    "messages": [
        ({"messages": [S, Q, A, Q, B]}, {"messages": [S, Q, A, Q, B]}),
        ({"messages": [Q, A, Q]}, {"messages": [Q, A, Q]}),
        ({"messages": [{**Q, "role": "Human"}, {**A, "role": "Assistant"}]}, {"messages": [Q, A]}),
        ({"messages": [{**Q, "role": "prompter"}, A], "tools": None}, {"messages": [Q, A]}),
        ({"messages": json.dumps([Q, A]), "tools": ""}, {"messages": [Q, A]}),
        ({"messages": [{**Q, "name": None, "tool_calls": []}, {**A, "weight": 1}]}, {"messages": [Q, A]}),
        ({"messages": [{**S, "role": "developer"}, {**Q, "name": "Ann"}, A]},
         {"messages": [S, {**Q, "name": "Ann"}, A]}),
        ({"messages": [{**Q, "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]}, A]},
         {"messages": [user("a b"), A]}),
        ({"messages": [Q, {"role": "assistant", "content": None, "tool_calls": [OPENAI_CALL]},
                       {**RESULT, "tool_call_id": "1"}, {**RESULT, "content": ""}, A],
          "tools": [{"type": "function", "function": WEATHER}]},
         {"messages": [Q, {**CALLING, "tool_calls": CALLS_1}, {**RESULT, "tool_call_id": "1"},
                       {**RESULT, "content": ""}, A], "tools": TOOLS}),
        ({"messages": [Q, {"role": "assistant", "content": "wait", "function_call": CALL},
                       {"role": "function", "name": "weather", "content": "sun"}, A], "functions": [WEATHER]},
         {"messages": [Q, {**CALLING, "content": "wait"}, {**RESULT, "name": "weather"}, A], "tools": TOOLS}),
        ({"messages": [Q, CALLING], "tools": TOOLS}, {"messages": [Q, CALLING], "tools": TOOLS}),  # prepared before
        ({"messages": [Q, {"role": "assistant", "tool_calls": [{"name": "f"}]}]},
         {"messages": [Q, {**CALLING, "tool_calls": json.dumps([
             {"type": "function", "function": {"name": "f", "arguments": {}}}])}]}),
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
        ({"instruction": "q", "input": None, "output": "a", "system": "s", "history": [["h", "b"]]},
         {"messages": [S, user("h"), B, Q, A]}),
    ],
    "sharegpt": [
        ({"conversations": [output("human", "q"), output("gpt", "a")], "id": "x"}, {"messages": [Q, A]}),
        *(({"conversations": [output("user", "q"), output(who, "a")], "system": "s"}, {"messages": [S, Q, A]})
          for who in ("assistant", "chatgpt", "bing", "bard", "GPT", "model", "ai", "Bot")),
        *(({"conversations": [output("system", "s"), output("human", "q"), output("function_call", json.dumps(CALL)),
                              output(who, "sun"), output("gpt", "a")], "tools": json.dumps([WEATHER])},
           {"messages": [S, Q, CALLING, RESULT, A], "tools": TOOLS})
          for who in ("observation", "tool", "function_response")),
        ({"conversations": [Q, A], "tools": "[]"}, {"messages": [Q, A]}),
        ({"conversations": [{**output("human", "q"), "weight": None}, output("gpt", "a")]}, {"messages": [Q, A]}),
    ],
    "contents": [
        ({"contents": [GEMINI_Q, {"role": "model", "parts": [{"text": "a"}]}]}, {"messages": [Q, A]}),
        ({"systemInstruction": {"parts": [{"text": "s"}]}, "tools": [{"functionDeclarations": [WEATHER]}],
          "contents": [
              GEMINI_Q,
              {"role": "model", "parts": [{"functionCall": {"name": "weather", "args": CALL["arguments"]},
                                           "thoughtSignature": "x"}]},
              {"role": "function", "parts": [{"functionResponse": {"name": "weather", "response": "sun"}}]},
              {"role": "model", "parts": [{"text": "t", "thought": True}, {"text": "a"}]},
          ]},
         {"messages": [S, Q, CALLING, RESULT, assistant("<think>\nt\n</think>\n\na")], "tools": TOOLS}),
    ],
    "responses": [
        ({"input": "q", "output": [{"id": "m", "type": "message", "status": "completed", "role": "assistant",
                                    "content": [{"type": "output_text", "text": "a", "annotations": []}]}]},
         {"messages": [Q, A]}),
        ({"instructions": "s", "input": [Q, OPENAI_ITEM, OPENAI_RESULT], "tools": [{**WEATHER, "type": "function"}],
          "output": [{"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "t"}]},
                     {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]}]},
         {"messages": [S, Q, {**CALLING, "tool_calls": CALLS_1}, {**RESULT, "tool_call_id": "1"},
                       assistant("<think>\nt\n</think>\n\na")], "tools": TOOLS}),
    ],
    "reasoning": [
        ({"problem": "q", "thinking": "t", "solution": "a"}, {"messages": [Q, assistant("<think>\nt\n</think>\n\na")]}),
        ({"question": "q", "reasoning": "t", "answer": "a", "system": "s"},
         {"messages": [S, Q, assistant("<think>\nt\n</think>\n\na")]}),
    ],
    "multiple_choice": [
        (row, {"messages": [{"role": "user", "content": "q\n\nA. x\nB. y"}, assistant("B. y")]})
        for row in (
            {"question": "q", "choices": ["x", "y"], "answer": 1, "subject": "s"},
            {"question": "q", "options": ["A) x", "B) y"], "correct": "B"},
            {"question": "q", "choices": {"text": ["x", "y"], "label": ["A", "B"]}, "answerKey": "B"},
            {"question": "q", "options": {"A": "x", "B": "y"}, "answer_idx": "B", "answer": "y"},
            {"question": "q", "A": "x", "B": "y", "answer": "B"}, {"question": "q", "opa": "x", "opb": "y", "cop": 1},
            {"ctx": "q", "endings": ["x", "y"], "label": "1"}, {"question": "q", "options": ["x", "y"], "answer": "y"},
            {"question": "q", "choices": [{"label": "A", "text": "x"}, {"label": "B", "text": "y"}], "answer": "B"},
            {"question": "q", "options": {"A": "x", "B": "y", "C": None}, "answer": "b"},  # of a table
            {"question_stem": "q", "choices": ["x", "y"], "answer": "(B)"},
            {"question": "q", "choices": ["x", "y"], "answer": "B. y"},
            {"query": "q", "choices": ["x", "y"], "label": 1.0},
        )
    ] + [
        ({"question": "q", "options": ["x", "y"], "reasoning": "t", "answer": "B"},
         {"messages": [{"role": "user", "content": "q\n\nA. x\nB. y"}, assistant("<think>\nt\n</think>\n\nB. y")]}),
        ({"question": "q", "options": ["1", "2"], "answer": 1},
         {"messages": [{"role": "user", "content": "q\n\nA. 1\nB. 2"}, assistant("B. 2")]}),
        ({"article": "c", "question": "q", "choices": {"text": [4, 7], "label": ["1", "2"]}, "answer": "2"},
         {"messages": [{"role": "user", "content": "c\n\nq\n\n1. 4\n2. 7"}, assistant("2. 7")]}),
    ],
    "function_calling": [
        ({"query": "q", "tools": json.dumps([WEATHER]), "answers": json.dumps([CALL]), "id": 3},
         {"messages": [Q, CALLING], "tools": TOOLS}),
        ({"query": "q", "tools": [WEATHER], "answers": [CALL]}, {"messages": [Q, CALLING], "tools": TOOLS}),
    ],
    "preference": [
        ({"prompt": "q", "chosen": "a", "rejected": "b", "kind": "k"}, {**PAIR, "kind": "k"}),
        ({"prompt": [S, Q], "chosen": [A], "rejected": [B], "tools": [WEATHER]},
         {**PAIR, "prompt": [S, Q], "tools": TOOLS}),
        ({"prompt": "q", "chosen": [S, Q, A], "rejected": [S, Q, B]}, {**PAIR, "prompt": [S, Q]}),
        ({"prompt": "q", "chosen": [CALLING], "rejected": "b"}, {**PAIR, "chosen": [CALLING]}),
    ],
    "implicit_preference": [
        ({"chosen": [S, Q, A, Q, A], "rejected": [S, Q, A, Q, B]}, {**PAIR, "prompt": [S, Q, A, Q]}),
        *(({"chosen": both + chosen, "rejected": both + rejected},
           {**PAIR, "prompt": [user(both)], "chosen": [assistant(chosen)], "rejected": [assistant(rejected)]})
          for both, chosen, rejected in (("2+2?", " 4", " 5"), ("Q: 2+2? A: 4", "5", "6"), ("Q:", "4", "42"))),
    ],
    "transcript_preference": [
        ({"chosen": "\n\nHuman: q\n\nAssistant: a", "rejected": "\n\nHuman: q\n\nAssistant: b"}, PAIR),
        ({"prompt": "\n\nSystem: s\n\nHuman: q\n\nAssistant: a\n\nHuman: q\n\nAssistant:", "chosen": " a",
          "rejected": "\n\nAssistant: b", "kind": "k"}, {**PAIR, "prompt": [S, Q, A, Q], "kind": "k"}),
    ],
    "sharegpt_ranking": [
        ({"conversations": [output("human", "q")], "chosen": output("gpt", "a"), "rejected": output("gpt", "b")}, PAIR),
        ({"conversations": [output("human", "q")], "chosen": "a", "rejected": B, "system": "s"},
         {**PAIR, "prompt": [S, Q]}),
    ],
    "openai_preference": [
        ({"input": {"messages": [Q], "tools": [WEATHER], "parallel_tool_calls": True}, "preferred_output": [A],
          "non_preferred_output": [B]}, {**PAIR, "tools": TOOLS}),
    ],
    "oumi_preference": [
        ({"messages": [Q], "chosen": {"messages": [A], "metadata": {"n": 1}}, "rejected": {"messages": [B]}}, PAIR),
        ({"messages": [Q], "chosen": "a", "rejected": [B], "kind": ""}, PAIR),
        ({"messages": [Q], "chosen": A, "rejected": B}, PAIR),
    ],
    "unpaired": [
        *(({"prompt": "q", "completion": "a", "label": label}, {"prompt": [Q], "completion": [A], "label": wanted})
          for label, wanted in [(True, True), (0, False), (1.0, True), ("false", False), ("True", True)]),
        ({"prompt": [Q], "response": [A], "label": False, "tools": [WEATHER]},
         {"prompt": [Q], "completion": [A], "label": False, "tools": TOOLS}),
    ],
    "messages_label": [
        ({"messages": [Q, A, Q, B], "label": True}, {"prompt": [Q, A, Q], "completion": [B], "label": True}),
        ({"messages": [Q, {**A, "label": False}]}, {"prompt": [Q], "completion": [A], "label": False}),
    ],
    "prompts": [
        ({"prompt": "q"}, {"prompt": [Q]}),
        ({"prompt": [S, Q], "z": 1, "answer": ["Zürich", None], "group": "g", "tools": [WEATHER]},
         {"prompt": [S, Q], "columns": '{"answer": ["Zürich", null], "z": 1}', "tools": TOOLS}),
    ],
}  # fmt: skip
ALL = [(name, row, made) for name, cases in CASES.items() for row, made in cases]


def test_every_format_has_examples() -> None:
    assert CASES.keys() == BY_NAME.keys()


@pytest.mark.parametrize(("name", "row", "made"), ALL, ids=[f"{name}-{index}" for index, (name, *_) in enumerate(ALL)])
def test_a_row_is_reported_and_brought_into_the_form_of_its_kind(name: str, row: Row, made: Row) -> None:
    before = json.dumps(row)
    detected = detect([row], "rows.jsonl")
    assert detected.name == name
    assert detected.evidence.endswith(": 1 of 1 rows looked at")
    assert detected.convert(row) == made
    assert json.dumps(row) == before, "the user's row is left as it is"
    assert detect([row], "rows.jsonl", configured=name).convert(row) == made
    copied: Detected = pickle.loads(pickle.dumps(detected))
    assert copied == detected
    assert copied.convert(row) == made


CHAT = [(name, *cases[0]) for name, cases in CASES.items() if name != "text"]


@pytest.mark.parametrize("column", ["system", "system_prompt"])
@pytest.mark.parametrize(("name", "row", "made"), CHAT, ids=[name for name, *_ in CHAT])
def test_a_system_column_is_the_first_turn_of_the_prompt(name: str, row: Row, made: Row, column: str) -> None:
    given = {**row, column: "s"}
    detected = detect([given], "rows.jsonl")
    assert detected.name == name and detected.mapping[column] == "the first turn of the prompt"
    turns = "messages" if "messages" in made else "prompt"
    own = list(made[turns])  # type: ignore[call-overload]
    converted = detected.convert(given)
    assert converted.pop(turns) == (own if own[0] == S else [S, *own])
    columns = {"columns": json.dumps({column: "s"})} if name == "prompts" else {}  # reward functions get it too
    assert {**converted, turns: own} == {**made, **columns}
    if name != "prompts":
        assert detected.convert({**row, column: None}) == detected.convert({**row, column: ""}) == made
    assert column in detected.read_columns(given)


TURNS_IN_JSON: list[Row] = [
    {"prompt": [Q], "chosen": [A], "rejected": [{**A, "content": "no"}]},
    {"chosen": [Q, A], "rejected": [Q, {**A, "content": "no"}]},
    {"conversations": [{"from": "human", "value": "q"}], "chosen": {"from": "gpt", "value": "a"},
     "rejected": {"from": "gpt", "value": "no"}},
    {"prompt": [Q], "completion": [A]},
    {"prompt": [Q], "completion": [A], "label": True},
    {"prompt": [Q]},
    {"messages": [Q, A]},
]  # fmt: skip


@pytest.mark.parametrize("written", [json.dumps, str])
@pytest.mark.parametrize("row", TURNS_IN_JSON, ids=[" ".join(row) for row in TURNS_IN_JSON])
def test_turns_in_text_are_those_turns(row: Row, written: Callable[[object], str]) -> None:
    """As tables of DuckDB have them, and CSV files of pandas."""
    texts = {name: value if name == "label" else written(value) for name, value in row.items()}
    found = detect([texts], "rows.csv")
    assert found.name == detect([row], "rows.jsonl").name
    assert found.convert(texts) == detect([row], "rows.jsonl").convert(row)


def test_turns_as_numpy_prints_them_are_refused() -> None:
    row = {"prompt": f"[{Q} {Q}]", "chosen": "a", "rejected": "b"}
    with pytest.raises(BadRowError, match=r"is turns, and neither JSON nor a list of Python; .* write the column by"):
        detect([row], "rows").convert(row)


def test_json_in_texts_that_are_no_turns_stays_text() -> None:
    flights, object_ = '[{"from": "Ulm", "to": "Rome"}]', '{"role": "admin", "content": 1}'
    for asked, answered in (("q", json.dumps([A])), (flights, object_), (object_, flights)):
        row = {"prompt": asked, "completion": answered}
        assert [turn["content"] for turn in detect([row], "rows").convert(row)["messages"]] == [asked, answered]  # type: ignore[attr-defined]


def test_two_system_prompts_in_one_row_are_refused() -> None:
    row: Row = {"messages": [S, Q, A], "system": "another"}
    with pytest.raises(BadRowError, match="the column system and the first turn are two system prompts"):
        detect([row], "rows").convert(row)
    with pytest.raises(BadRowError, match="system and system_prompt are both there"):
        detect([row], "rows").convert({**row, "system_prompt": "s"})


@pytest.mark.parametrize(
    ("row", "made"),
    [
        ({"instruction": "q", "context": "c", "response": "a", "category": "open_qa"}, [user("q\nc"), A]),
        ({"instruction": "q", "context": "", "response": "a"}, [Q, A]),
    ],
)
def test_the_columns_of_dolly_are_those_of_alpaca(row: Row, made: list[Row]) -> None:
    detected = detect([row], "rows.jsonl")
    assert detected.name == "alpaca" and detected.convert(row) == {"messages": made}
    assert detect([{**row, "prompt": "q"}], "rows.jsonl", configured="alpaca").convert(row) == {"messages": made}
    assert detect([{"prompt": "q", **row, "context": None}], "rows.jsonl").name == "prompt_completion"


@pytest.mark.parametrize(
    ("name", "column", "value"),
    [
        ("preference", "label", 1), ("preference", "weight", 0.5),
        ("alpaca", "label", False), ("messages", "weights", [1, 0]), ("messages", "sample_weight", 0.1),
        ("preference", "reasoning", "t"), ("oumi_preference", "thinking", "t"), ("alpaca", "loss", 2.3),
        ("text", "train", 2), ("reasoning", "tools", [WEATHER]),
        ("openai_preference", "tools", [WEATHER]), ("sharegpt", "functions", [WEATHER]), ("text", "system", "s"),
        ("text", "weight", 0.1), ("preference", "images", ["a.png"]), ("unpaired", "weight", 2),
        ("preference", "system_message", "s"), ("alpaca", "System", "s"), ("text", "systemPrompt", "s"),
        ("messages", "image_path", "a.png"), ("preference", "Weight", 0.5), ("text", "role", "assistant"),
        ("alpaca", "kto_tag", False), ("messages", "rejected_response", "b"), ("prompt_completion", "rejected", "b"),
        ("sharegpt", "rejected_messages", [Q]), ("alpaca", "labels", 0), ("messages", "loss_mask", [1]),
        ("messages", "chat_template_kwargs", {"enable_thinking": False}), ("preference", "response_masks", [1]),
        ("messages", "System Prompt", "s"), ("unpaired", "system-message", "s"), ("prompt_completion", "sys", "s"),
        ("prompt_completion", "thought", "t"), ("text", "speaker", "Bob"), ("messages", "enable_thinking", False),
    ],
)  # fmt: skip
def test_an_unread_column_that_changes_what_is_trained_is_refused(name: str, column: str, value: object) -> None:
    row = CASES[name][0][0]
    detected = detect([row], "rows.jsonl")
    with pytest.raises(BadRowError, match=rf"^the row has {column}") as refusal:
        detected.convert({**row, column: value})
    if column != "images":
        assert f"format={name}" in str(refusal.value)
        assert detect([row], "rows.jsonl", configured=name).convert({**row, column: value}) == CASES[name][0][1]
    for nothing in (None, "", [], {}):
        assert detected.convert({**row, column: nothing}) == CASES[name][0][1]


def test_of_prompts_only_what_the_system_says_under_another_name_is_refused() -> None:
    detected = detect([{"prompt": "q"}], "rows.jsonl")
    assert detected.convert({"prompt": "q", "tools_used": 1, "thought": "t"})["columns"]
    with pytest.raises(BadRowError, match=r"the row has system_message.*format=prompts"):
        detected.convert({"prompt": "q", "system_message": "s"})


@pytest.mark.parametrize(
    "text", ["\n\nHuman: q\n\nAssistant:", "User: q\nAssistant: ", "### Human: q### Assistant:", "USER: q ASSISTANT:"]
)
def test_turns_in_one_text_are_refused_unless_they_are_one_turn_of_the_user(text: str) -> None:
    rows = [
        ("prompt_completion", {"prompt": text, "completion": "a"}), ("prompts", {"prompt": text}),
        ("unpaired", {"prompt": text, "completion": "a", "label": True}),
    ]  # fmt: skip
    if not text.startswith("\n"):  # those are pairs of transcripts
        rows.append(("preference", {"prompt": text, "chosen": "a", "rejected": "b"}))
        rows.append(("implicit_preference", {"chosen": f"{text} a", "rejected": f"{text} b"}))
    for name, row in rows:
        with pytest.raises(BadRowError, match=rf"(?i)turns of (human|user) and assistant in one text.*format={name}"):
            detect([row], "rows.jsonl").convert(row)
        assert detect([row], "rows.jsonl", configured=name).convert(row)


@pytest.mark.parametrize("name", [name for name in CASES if name != "prompts"])
@pytest.mark.parametrize("configured", [None, "set"])
def test_a_row_is_left_out_where_a_column_says_that_it_has_no_loss(name: str, configured: str | None) -> None:
    row, made = CASES[name][0]
    detected = detect([row], "rows.jsonl", configured=configured and name)
    for column, off, on in (
        ("weight", 0, 1.0), ("loss_weight", 0.0, 1), ("loss", False, True), ("train", "false", "true"),
        ("Training", 0, 1), ("train", False, "London to Paris"),
    ):  # fmt: skip
        with pytest.raises(BadRowError, match=rf"{column} is .*; remove {column} to train the row") as refusal:
            detected.convert({**row, column: off})
        assert refusal.value.reason == WITHOUT_LOSS
        assert detected.convert({**row, column: on}) == made
        assert column in detected.read_columns({**row, column: on})


def test_a_prompt_is_left_out_by_a_boolean_alone() -> None:
    row = {"prompt": "q"}
    detected = detect([row], "rows.jsonl")
    with pytest.raises(BadRowError, match="train is the boolean false"):
        detected.convert({**row, "train": False})
    assert detected.convert({**row, "weight": 0})["columns"] == '{"weight": 0}'  # of what is asked


def thought(content: str) -> Row:
    return assistant(f"<think>\nt\n</think>\n\n{content}")


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_thinking_in_a_field_of_its_own_is_that_at_the_beginning_of_the_content(key: str) -> None:
    own: Row = {**A, key: "t"}
    calling: Row = {"role": "assistant", "content": None, "tool_calls": [CALL], key: "t"}
    called: Row = {**thought(""), "tool_calls": CALLS}
    rows: list[tuple[Row, Row]] = [
        ({"messages": [Q, own, Q, {**B, key: None}]}, {"messages": [Q, thought("a"), Q, B]}),
        ({"messages": [Q, {**A, key: "\n\n"}], "system": " "}, {"messages": [Q, A]}),
        ({"messages": [Q, calling, RESULT, own]}, {"messages": [Q, called, RESULT, thought("a")]}),
        ({"conversations": [output("human", "q"), {**output("gpt", "a"), key: "t"}]}, {"messages": [Q, thought("a")]}),
        ({"prompt": "q", "chosen": [own], "rejected": "b"}, {**PAIR, "chosen": [thought("a")]}),
        ({"messages": [Q, {**A, **dict.fromkeys(THOUGHTS, "t")}]}, {"messages": [Q, thought("a")]}),
        ({"messages": [Q, {**thought("a"), key: " t"}]}, {"messages": [Q, thought("a")]}),
        ({"prompt": "q", "completion": own, "label": 1}, {"prompt": [Q], "completion": [thought("a")], "label": True}),
    ]
    for row, made in rows:
        assert detect([row], "rows.jsonl").convert(row) == made
    refused: list[tuple[list[Row], str]] = [
        ([Q, {**A, key: "off"}], rf"messages\[1\] {key} is the text 'off', which is no thought"),
        ([Q, {**A, **dict.fromkeys(THOUGHTS, "t"), key: "u"}], r"messages\[1\] has reasoning_content and thinking and"),
        ([Q, {**A, key: "a </think> b"}], rf"messages\[1\] {key} has a thought, and there is a <think> in it"),
        ([Q, {**thought("a"), key: "u"}], rf"messages\[1\] {key} has a thought, and there is a <think> in it or in"),
        ([Q, {**A, key: 1}], rf"messages\[1\] {key} is the number 1"),
        ([Q, {**A, "content": "", key: "t"}], r"messages\[1\] content is empty"),
        ([{**Q, key: "t"}, A], rf"messages\[0\] has {key}"),
    ]
    for messages, message in refused:
        with pytest.raises(BadRowError, match=message):
            detect([{"messages": [Q, A]}], "rows.jsonl").convert({"messages": messages})


@pytest.mark.parametrize(
    "parts",
    [
        [{"type": "thinking", "thinking": "t", "signature": "x"}, {"type": "text", "text": "a"}],
        [{"type": "thinking", "thinking": [{"type": "text", "text": "t"}]}, {"type": "text", "text": "a"}],
        [{"type": "reasoning", "text": "t"}, {"type": "text", "text": "a"}],
    ],
)
def test_thinking_as_a_part_of_the_content(parts: list[Row]) -> None:
    row: Row = {"messages": [Q, {"role": "assistant", "content": parts}]}
    assert detect([row], "rows.jsonl").convert(row) == {"messages": [Q, thought("a")]}


@pytest.mark.parametrize("column", THOUGHTS)
def test_a_column_of_thinking_is_that_of_the_answer(column: str) -> None:
    rows: list[Row] = [
        {"prompt": "q", "completion": "a"}, {"instruction": "q", "output": "a"}, {"messages": [Q, A]},
        {"conversations": [output("human", "q"), output("gpt", "a")]},
    ]  # fmt: skip
    for row in rows:
        detected = detect([{**row, column: "t"}], "rows.jsonl")
        assert detected.convert({**row, column: "t"}) == {"messages": [Q, thought("a")]}
        for nothing in (None, "\n"):
            assert detected.convert({**row, column: nothing}) == {"messages": [Q, A]}
        assert detected.convert({**row, **dict.fromkeys(THOUGHTS, "t")}) == {"messages": [Q, thought("a")]}
        with pytest.raises(BadRowError, match=r"the row has .* and .*, which differ"):
            detected.convert({**row, **dict.fromkeys(THOUGHTS, "t"), column: "u"})
        with pytest.raises(BadRowError, match=f"{column} is the text 'on', which is no thought"):
            detected.convert({**row, column: "on"})
    for row in ({"prompt": "q", "completion": "a", "label": 0}, {"messages": [Q, A], "label": 0}):
        row = {**row, column: "t"}
        assert detect([row], "rows.jsonl").convert(row)["completion"] == [thought("a")]
    row = {"query": "q", "tools": [WEATHER], "answers": [CALL], column: "t"}
    assert detect([row], "rows.jsonl").convert(row)["messages"][1]["content"] == thought("")["content"]
    row = {"messages": [Q, A, Q, A], column: "t"}
    with pytest.raises(BadRowError, match=f"the row has {column}, and several answers; .*each with a {column} of its"):
        detect([row], "rows.jsonl").convert(row)


@pytest.mark.parametrize(
    ("key", "off", "on"),
    [("weight", 0, 1), ("weight", 0.0, 1.0), ("loss_weight", 0.0, 1.0), ("loss", False, True), ("train", False, True),
     ("training", 0, 1)],
)  # fmt: skip
def test_turns_without_loss_are_listed_by_their_place_among_the_assistants(key: str, off: object, on: object) -> None:
    rows: list[tuple[Row, Row]] = [
        ({"messages": [S, {**Q, key: off}, {**A, key: off}, Q, {**B, key: on}]},
         {"messages": [S, Q, A, Q, B], "untrained": "[0]"}),
        ({"system": "s", "messages": [Q, {**A, key: None}, Q, {**B, key: off}, Q, A]},
         {"messages": [S, Q, A, Q, B, Q, A], "untrained": "[1]"}),
        ({"conversations": [output("human", "q"), {**output("gpt", "a"), key: off}]},
         {"messages": [Q, A], "untrained": "[0]"}),
        ({"messages": [{**Q, key: off}, {**A, key: on}]}, {"messages": [Q, A]}),
        ({"prompt": [Q, {**A, key: off}, Q], "chosen": [{**A, key: on}], "rejected": "b"},
         {**PAIR, "prompt": [Q, A, Q]}),
    ]  # fmt: skip
    for row, made in rows:
        assert detect([row], "rows.jsonl").convert(row) == made


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [Q, {**A, "weight": 0.5}]}, r"messages\[1\] weight is the number 0.5; accepted: 0 and 1"),
        ({"messages": [Q, {**A, "loss_weight": 2}]}, r"messages\[1\] loss_weight is the number 2"),
        (
            {"messages": [Q, {**A, "train": "no"}]},
            r"messages\[1\] train is the text 'no'; accepted: 0 and 1, false and",
        ),
        (
            {"messages": [{**Q, "train": True}, A]},
            r"messages\[0\] train is the boolean true, and it is a turn of the user",
        ),
        ({"messages": [Q, {**A, "train_detail": [{"begin_offset": 0}]}]}, r"messages\[1\] has train_detail"),
        ({"prompt": "q", "chosen": [{**A, "loss": False}], "rejected": "b"}, "chosen has a turn without loss"),
        ({"prompt": "q", "completion": {**A, "weight": 0}, "label": 1}, "completion has a turn without loss"),
    ],
)
def test_losses_that_no_turn_can_have_are_refused(row: Row, message: str) -> None:
    with pytest.raises(BadRowError, match=message):
        detect([row], "rows.jsonl").convert(row)


CALLED = [CALLING, RESULT, A]


@pytest.mark.parametrize(
    ("row", "made"),
    [
        ({"prompt": "q", "chosen": CALLED, "rejected": [B]}, {**PAIR, "chosen": CALLED}),
        ({"prompt": [Q], "chosen": [A, Q, A], "rejected": CALLED}, {**PAIR, "chosen": [A, Q, A], "rejected": CALLED}),
        ({"prompt": "q", "chosen": [Q, *CALLED], "rejected": [Q, B]}, {**PAIR, "chosen": CALLED}),
        ({"chosen": [S, Q, *CALLED], "rejected": [S, Q, B]}, {**PAIR, "prompt": [S, Q], "chosen": CALLED}),
        ({"chosen": [Q, *CALLED], "rejected": [Q, CALLING, {**RESULT, "content": "rain"}, B]},  # they share the call
         {**PAIR, "chosen": CALLED, "rejected": [CALLING, {**RESULT, "content": "rain"}, B]}),
        ({"conversations": [output("human", "q")], "chosen": CALLED, "rejected": "b"}, {**PAIR, "chosen": CALLED}),
        ({"input": {"messages": [Q]}, "preferred_output": CALLED, "non_preferred_output": [B]},
         {**PAIR, "chosen": CALLED}),
        ({"messages": [Q], "chosen": {"messages": CALLED}, "rejected": "b"}, {**PAIR, "chosen": CALLED}),
        ({"prompt": "q", "completion": CALLED, "label": True}, {"prompt": [Q], "completion": CALLED, "label": True}),
        ({"prompt": "q", "completion": CALLED}, {"messages": [Q, *CALLED]}),
    ],
)  # fmt: skip
def test_an_answer_may_be_a_call_its_result_and_what_is_reported_of_it(row: Row, made: Row) -> None:
    assert detect([row], "rows.jsonl").convert(row) == made


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ([Q, A], "chosen has messages of user, assistant; what precedes the answer belongs to prompt"),
        ([CALLING, RESULT], "chosen has messages of assistant, tool; .* and it ends with the assistant"),
        ([CALLING, A], r"chosen\[1\] has the role 'assistant' after a tool call that no tool answered"),
        ([A, B], r"chosen\[1\] has the role 'assistant' after 'assistant'"),
        ([RESULT], "chosen has messages of tool"),
    ],
)
def test_an_answer_in_another_order_is_refused(chosen: list[Row], message: str) -> None:
    row: Row = {"prompt": "q", "chosen": chosen, "rejected": "b"}
    with pytest.raises(BadRowError, match=message):
        detect([row], "rows.jsonl").convert(row)


@pytest.mark.parametrize("arguments", [None, "null", "", " ", {}, "{}", "[]"])
def test_a_call_without_arguments(arguments: object) -> None:
    bare = json.dumps([{"type": "function", "function": {"name": "f", "arguments": {}}}])
    row: Row = {"messages": [Q, {**CALLING, "tool_calls": [{"name": "f", "arguments": arguments}]}]}
    assert detect([row], "rows.jsonl").convert(row) == {"messages": [Q, {**CALLING, "tool_calls": bare}]}


WRITTEN = f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>"
RESPONSE = "<tool_response>\n{}\n</tool_response>"
IN_SYSTEM = system(f"You call functions within <tools> </tools>: <tools> [{json.dumps(WEATHER)}] </tools>")
ANTHROPIC_TOOL = {"name": "weather", "description": "d", "input_schema": WEATHER["parameters"]}
USE = {"type": "tool_use", "id": "1", "name": "weather", "input": CALL["arguments"]}
ANSWERED = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "sun"}]}


@pytest.mark.parametrize(
    ("row", "made"),
    [
        # Hermes: tools in the system turn and in a column, calls and results as text.
        ({"conversations": [output("system", str(IN_SYSTEM["content"])), output("human", "q"), output("gpt", WRITTEN),
                            output("tool", f"{RESPONSE.format('sun')}\n{RESPONSE.format(' rain ')}\n"),
                            output("gpt", "a")], "tools": json.dumps([WEATHER])},
         {"messages": [IN_SYSTEM, Q, assistant(WRITTEN), RESULT, {**RESULT, "content": "rain"}, A]}),
        ({"messages": [Q, assistant(f"<tool_call>\n{CALL}\n</tool_call>\nwait"), RESULT, A]},
         {"messages": [Q, assistant(f"<tool_call>\n{CALL}\n</tool_call>\nwait"), RESULT, A]}),
        ({"messages": [Q, assistant(WRITTEN), Q, A], "tools": [WEATHER]},
         {"messages": [Q, assistant(WRITTEN), Q, A], "tools": TOOLS}),
        ({"messages": [user("<tool_response>q</tool_response> "), assistant(WRITTEN)], "system": IN_SYSTEM["content"],
          "tools": [WEATHER]},
         {"messages": [IN_SYSTEM, user("<tool_response>q</tool_response> "), assistant(WRITTEN)]}),
        ({"prompt": [IN_SYSTEM, Q], "tools": [WEATHER]}, {"prompt": [IN_SYSTEM, Q], "tools": TOOLS}),
        # Anthropic: calls and results as parts.
        ({"messages": [Q, {**A, "content": [{"type": "text", "text": "wait"}, USE]},
                       {**Q, "content": [ANSWERED, {"type": "text", "text": "q"}]}, A], "tools": [ANTHROPIC_TOOL]},
         {"messages": [Q, {**CALLING, "content": "wait", "tool_calls": CALLS_1}, {**RESULT, "tool_call_id": "1"}, Q, A],
          "tools": TOOLS}),
        ({"prompt": "q", "chosen": [{**A, "content": [USE]}, {**Q, "content": [{**ANSWERED, "content": "sun"}]}, A],
          "rejected": [B]},
         {**PAIR, "chosen": [{**CALLING, "tool_calls": CALLS_1}, {**RESULT, "tool_call_id": "1"}, A]}),
        # OpenAI's Responses.
        ({"messages": [{**Q, "type": "message", "content": [{"type": "input_text", "text": "q"}]},
                       {**A, "content": [{"type": "output_text", "text": "a", "annotations": []}]}]},
         {"messages": [Q, A]}),
        ({"messages": [Q, {**A, "content": "wait"}, OPENAI_ITEM, {**OPENAI_ITEM, "call_id": "2"}, OPENAI_RESULT,
                       {**OPENAI_RESULT, "call_id": "2"}, {"type": "reasoning", "summary": []}, A]},
         {"messages": [Q, {**CALLING, "content": "wait", "tool_calls": json.dumps(
             [*json.loads(CALLS_1), {**json.loads(CALLS_1)[0], "id": "2"}], ensure_ascii=False)},
             {**RESULT, "tool_call_id": "1"}, {**RESULT, "tool_call_id": "2"}, A]}),
        # ToolACE: calls as text.
        ({"system": "s", "conversations": [output("user", "q"), output("assistant", "[Weather API(city='a', n=[1])]"),
                                           output("tool", "sun"), output("assistant", "a")]},
         {"messages": [S, Q, assistant("[Weather API(city='a', n=[1])]"), RESULT, A]}),
        ({"messages": [{**Q, "content": [{"text": "q"}]}, {**A, "content": [{"text": "a"}]}]}, {"messages": [Q, A]}),
        # UltraFeedback: both conversations, and the chosen one again.
        ({"prompt": "q", "prompt_id": "1", "chosen": [Q, A], "rejected": [Q, B], "messages": [Q, A],
          "score_chosen": 8.0, "score_rejected": 2.0}, PAIR),
    ],
)  # fmt: skip
def test_calls_and_pairs_as_public_sets_have_them(row: Row, made: Row) -> None:
    assert detect([row], "rows.jsonl").convert(row) == made


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([Q, {**A, "content": [USE]}, A], "role 'assistant' after a tool call that no tool answered"),
        ([Q, {**A, "content": [ANSWERED]}], r"\[1\] has the role .*assistant.* and tool_result; accepted: tool_use"),
        ([Q, {**A, "content": [USE]}, {**Q, "content": [{**ANSWERED, "tool_use_id": "2"}]}, A], "a tool answers '2'"),
        ([Q, assistant(WRITTEN), A], "role 'assistant' after a call in its text"),
        ([Q, assistant("[see](this) [1]"), RESULT, A], "role 'tool' after 'assistant'"),
        ([Q, OPENAI_ITEM, A], "role 'assistant' after a tool call that no tool answered"),
        ([Q, {**OPENAI_ITEM, "namespace": "n"}, OPENAI_RESULT, A], r"messages\[1\] has namespace"),
    ],
)
def test_calls_in_parts_and_texts_that_nobody_answered(messages: list[Row], message: str) -> None:
    with pytest.raises(BadRowError, match=message):
        detect([{"messages": messages}], "rows.jsonl").convert({"messages": messages})


def test_tools_and_arguments_keep_the_order_of_their_keys() -> None:
    row = CASES["function_calling"][0][0]
    made = detect([row], "rows").convert(row)
    assert list(tools_of(made)[0]["function"]["parameters"]["properties"]) == ["z", "a"]  # type: ignore[index]
    (call,) = messages_of(made["messages"])[1]["tool_calls"]  # type: ignore[misc]
    assert list(call["function"]["arguments"]) == ["z", "a"]


ROW = re.compile(r"^\| `(\w+)` \| `(\{.*\})` \| (\w+)", re.MULTILINE)
ON_THE_PAGE = ROW.findall((Path(__file__).parents[5] / "docs" / "data.md").read_text(encoding="utf-8"))


def test_every_format_is_in_docs_data_md():
    assert [name for name, _, _ in ON_THE_PAGE] == [each.name for each in FORMATS]


@pytest.mark.parametrize(("name", "row", "kind"), ON_THE_PAGE, ids=[name for name, _, _ in ON_THE_PAGE])
def test_a_row_of_docs_data_md_is_detected_as_what_it_says(name, row, kind):
    detected = detect([json.loads(row)], "the page")
    assert detected.name == name and detected.format.kind == Kind(kind)
    assert detected.convert(json.loads(row))
