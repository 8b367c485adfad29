"""What every format refuses: what is found and the reason that it is counted by."""

import pickle

import pytest

from tasks.data.formats.known import BY_NAME
from tasks.data.formats.values import BadRowError, optional_name

Row = dict[str, object]
Q: Row = {"role": "user", "content": "q"}
A: Row = {"role": "assistant", "content": "a"}
S: Row = {"role": "system", "content": "s"}
CALLING: Row = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
TWO_CALLS: Row = {"role": "assistant", "tool_calls": [{"id": each, "name": "f", "arguments": {}} for each in "xy"]}
RESULT: Row = {"role": "tool", "content": "r"}


def call(**function: object) -> Row:
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f", **function}}]}


HUMAN: Row = {"from": "human", "value": "q"}
GPT: Row = {"from": "gpt", "value": "a"}
GPT_B: Row = {"from": "gpt", "value": "b"}
HH = "\n\nHuman: q\n\nAssistant: "
CASES: list[tuple[str, Row, str, str]] = [  # format, row, how what is found begins, reason
    (
        "messages", {"messages": [Q, call(arguments="[1")]},
        "messages[1] tool_calls[0] arguments is not JSON", "unclosed tool call",
    ),
    (
        "messages", {"messages": [Q, call(arguments="[1]")]},
        "messages[1] tool_calls[0] arguments is a list", "tool call that cannot be read",
    ),
    (
        "messages", {"messages": [Q, call(arguments=3)]},
        "messages[1] tool_calls[0] arguments is the number 3", "tool call that cannot be read",
    ),
    (
        "messages", {"messages": [Q, call(arguments='{"a": NaN}')]},
        "messages[1] tool_calls[0] arguments is not JSON: NaN", "unclosed tool call",
    ),
    (
        "messages", {"messages": [Q, call(parameters={"a": 1})]},
        "messages[1] tool_calls[0] has parameters", "unknown field",
    ),
    (
        "transcript_preference", {"chosen": f"{HH}a", "rejected": f"{HH}a\n\nHuman: w\n\nAssistant: b"},
        "chosen and rejected differ from turn 2", "another beginning",
    ),
    (
        "transcript_preference", {"chosen": f"{HH}a\n\nHuman: and?", "rejected": f"{HH}b"},
        "chosen ends with a turn of the user", "wrong role order",
    ),
    ("text", {"body": "a", "id": 1}, "no field 'text' (fields: body, id)", "missing field"),
    ("text", {"text": None}, "text is null", "no text"),
    ("text", {"text": ["a"]}, "text is a list", "not text"),
    ("text", {"text": 'ab\ud83d'}, "text has half a surrogate pair at character 2", "half a surrogate pair"),
    ("messages", {"text": "a"}, "no field 'messages' (fields: text)", "missing field"),
    ("messages", {"messages": []}, "messages is empty", "no answer"),
    ("messages", {"messages": None}, "messages is null", "no answer"),
    ("messages", {"messages": "a"}, "messages is the text 'a'", "no messages"),
    ("messages", {"messages": ["a"]}, "messages[0] is the text 'a'", "not of the format"),
    (
        "messages", {"messages": [{"from": "user", "content": "q"}]},
        "messages[0] has no 'role' (it has: content, from)", "unknown role",
    ),
    (
        "messages", {"messages": [Q, {"role": "critic", "content": "a"}]},
        "messages[1] has the role 'critic'", "unknown role",
    ),
    ("messages", {"messages": [{"role": None, "content": "a"}]}, "messages[0] has the role null", "unknown role"),
    ("messages", {"messages": [Q, {"role": "assistant"}]}, "messages[1] has no 'content' (it has: role)", "no answer"),
    (
        "messages", {"messages": [Q, {"role": "assistant", "content": True}]},
        "messages[1] content is the boolean true", "not text",
    ),
    ("messages", {"messages": [{"role": "user", "content": ""}, A]}, "messages[0] content is empty", "empty prompt"),
    (
        "messages", {"messages": [{"role": "user", "content": '\ud83d'}, A]},
        "messages[0] content has half a surrogate pair at character 0", "half a surrogate pair",
    ),
    (
        "messages", {"messages": [Q, {"role": "assistant", "content": "a", "reasoning_content": "t"}]},
        "messages[1] has reasoning_content", "unknown field",
    ),
    (
        "messages", {"messages": [Q, {"role": "assistant", "content": "a", "weight": 0}]},
        "messages[1] has weight", "unknown field",
    ),
    (
        "messages", {"messages": [{"role": "user", "content": "q", "name": 3}, A]},
        "messages[0] name is the number 3", "not text",
    ),
    ("messages", {"messages": [A]}, "messages[0] has the role 'assistant' at the beginning", "wrong role order"),
    ("messages", {"messages": [Q, Q, A]}, "messages[1] has the role 'user' after 'user'", "wrong role order"),
    ("messages", {"messages": [Q, A, A]}, "messages[2] has the role 'assistant' after 'assistant'", "wrong role order"),
    (
        "messages", {"messages": [Q, CALLING, Q, A]},
        "messages[2] has the role 'user' after a tool call that no", "unclosed tool call",
    ),
    (
        "messages", {"messages": [Q, CALLING, {"role": "tool", "content": None}]},
        "messages[2] content is null", "no tool result",
    ),
    (
        "messages", {"messages": [Q, {"role": "assistant", "tool_calls": [{"type": "web"}]}]},
        "messages[1] tool_calls[0] type is the text 'web'", "tool call that cannot be read",
    ),
    (
        "messages", {"messages": [Q, CALLING, {"role": "tool", "content": {"a": 1}}]},
        "messages[2] content is an object", "not text",
    ),
    (
        "messages", {"messages": [Q, A], "tools": "{"},
        "tools is not JSON: Expecting property name enclosed in", "tools that cannot be read",
    ),
    ("messages", {"messages": [Q, A], "tools": 3}, "tools is the number 3", "tools that cannot be read"),
    (
        "messages", {"messages": [Q, A], "tools": [{"description": "d"}]},
        "tools[0] names no function", "tools that cannot be read",
    ),
    (
        "messages", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}, A]},
        "messages[0] content[0] is of type 'image_url'", "images are not read",
    ),
    ("prompt_completion", {"prompt": "q"}, "no field 'completion' (fields: prompt)", "no answer"),
    ("prompt_completion", {"prompt": " ", "completion": "a"}, "prompt is empty", "empty prompt"),
    (
        "prompt_completion", {"prompt": "q", "completion": "a", "response": "b"},
        "completion and response are both there", "not of the format",
    ),
    (
        "prompt_completion", {"prompt": [Q, A], "completion": "a"},
        "prompt ends with the role 'assistant'", "wrong role order",
    ),
    ("prompt_completion", {"prompt": "q", "completion": 42}, "completion is the number 42", "not text"),
    ("alpaca", {"instruction": "q", "output": 42}, "output is the number 42", "not text"),
    ("alpaca", {"instruction": "q", "input": ""}, "no field 'output' (fields: input, instruction)", "no answer"),
    ("alpaca", {"instruction": "", "input": "", "output": "a"}, "instruction is empty", "empty prompt"),
    (
        "alpaca", {"instruction": "q", "output": "a", "history": [["q"]]},
        "history[0] is a list of 1", "not of the format",
    ),
    ("alpaca", {"instruction": "q", "output": "a", "history": "h"}, "history is the text 'h'", "not of the format"),
    (
        "sharegpt", {"conversations": [HUMAN, {"from": "narrator", "value": "a"}]},
        "conversations[1] has the role 'narrator'", "unknown role",
    ),
    (
        "sharegpt", {"conversations": [HUMAN, {"from": "gpt", "value": None}]},
        "conversations[1] value is null", "no answer",
    ),
    (
        "sharegpt", {"conversations": [GPT, HUMAN]},
        "conversations[0] has the role 'assistant' at the beginning", "wrong role order",
    ),
    (
        "sharegpt", {"conversations": [HUMAN, {"from": "function_call", "value": "f()"}]},
        "conversations[1] value is not JSON: Expecting value: line 1", "unclosed tool call",
    ),
    (
        "sharegpt", {"conversations": [HUMAN, {"from": "function_call", "value": '{"arguments": {}}'}]},
        "conversations[1] value[0] names no function", "tool call that cannot be read",
    ),
    ("sharegpt", {"conversations": [HUMAN, "a"]}, "conversations[1] is the text 'a'", "not of the format"),
    ("reasoning", {"problem": "q", "thinking": " ", "solution": "a"}, "thinking is empty", "no thinking"),
    ("reasoning", {"problem": "q", "thinking": "t"}, "no field 'solution' (fields: problem, thinking)", "no answer"),
    (
        "reasoning", {"problem": "q", "thinking": "<think>t</think>", "solution": "a"},
        "the thinking or the solution has a <think> of its own", "not of the format",
    ),
    ("function_calling", {"query": "q", "tools": "[]", "answers": "[]"}, "answers is empty", "no answer"),
    (
        "function_calling", {"query": "q", "tools": "[]", "answers": "["},
        "answers is not JSON: Expecting value: line 1 column 2 (char", "unclosed tool call",
    ),
    ("preference", {"prompt": "q", "chosen": "a"}, "no field 'rejected' (fields: chosen, prompt)", "no answer"),
    (
        "preference", {"prompt": "q", "chosen": "a", "rejected": "a"},
        "chosen and rejected are the same", "nothing to prefer",
    ),
    (
        "preference", {"prompt": "q", "chosen": [Q, A], "rejected": "b"},
        "chosen has messages of user, assistant", "wrong role order",
    ),
    ("preference", {"prompt": "q", "chosen": "a", "rejected": "b", "kind": 3}, "kind is the number 3", "not text"),
    (
        "preference", {"prompt": "q", "chosen": "a", "rejected": "b", "kind": '\ud83d'},
        "kind has half a surrogate pair at character 0", "half a surrogate pair",
    ),
    (
        "implicit_preference", {"chosen": [Q, A], "rejected": [{"role": "user", "content": "other"}, A]},
        "chosen and rejected have no common beginning, and there is", "empty prompt",
    ),
    (
        "implicit_preference", {"chosen": [Q, A], "rejected": [Q, A]},
        "chosen and rejected are the same", "nothing to prefer",
    ),
    ("implicit_preference", {"chosen": "q a", "rejected": None}, "rejected is null", "no answer"),
    ("implicit_preference", {"chosen": "q a", "rejected": [Q, A]}, "chosen is the text 'q a'", "not of the format"),
    (
        "transcript_preference", {"chosen": f"{HH}a", "rejected": '\n\nHuman: other\n\nAssistant: b'},
        "chosen and rejected differ from turn 1 on, before their", "another beginning",
    ),
    (
        "transcript_preference", {"chosen": f"{HH}a", "rejected": "b"},
        "rejected does not begin with 'Human:'", "no transcript",
    ),
    (
        "transcript_preference", {"chosen": f"{HH}a", "rejected": '\n\nHuman: q\n\nAssistant: '},
        "rejected[0] content is empty", "no answer",
    ),
    (
        "transcript_preference", {"chosen": f"{HH}a", "rejected": f"{HH}a"},
        "chosen and rejected are the same", "nothing to prefer",
    ),
    (
        "sharegpt_ranking", {"conversations": [HUMAN], "chosen": GPT},
        "no field 'rejected' (fields: chosen, conversations)", "no answer",
    ),
    (
        "sharegpt_ranking", {"conversations": [HUMAN, GPT], "chosen": GPT, "rejected": GPT_B},
        "conversations ends with the role 'assistant'", "wrong role order",
    ),
    (
        "openai_preference", {"input": {}, "preferred_output": [A], "non_preferred_output": [A]},
        "no field 'messages' (fields: none)", "empty prompt",
    ),
    (
        "openai_preference", {"input": "q", "preferred_output": [A], "non_preferred_output": [A]},
        "input is the text 'q'", "not of the format",
    ),
    (
        "openai_preference", {"input": {"messages": [Q]}, "preferred_output": [A]},
        "no field 'non_preferred_output' (fields: input,", "no answer",
    ),
    (
        "oumi_preference", {"messages": [Q], "chosen": [Q, A], "rejected": {"messages": [A]}},
        "chosen has messages of user, assistant", "wrong role order",
    ),
    (
        "oumi_preference", {"messages": [Q], "chosen": {}, "rejected": {"messages": [A]}},
        "no field 'messages' (fields: none)", "no answer",
    ),
    ("unpaired", {"prompt": "q", "completion": "a", "label": "sports"}, "label is the text 'sports'", "no label"),
    ("messages_label", {"messages": [Q, A]}, "label is null", "no label"),
    ("messages_label", {"messages": [Q, A, Q], "label": True}, "messages ends with the role 'user'", "no answer"),
    ("prompts", {"prompt": ""}, "prompt is empty", "empty prompt"),
    ("prompts", {"prompt": "q", "prompt_ids": [1]}, "the column prompt_ids is reserved", "reserved column"),
    ("prompts", {"prompt": [Q, A]}, "prompt ends with the role 'assistant'", "wrong role order"),
    (
        "prompts", {"prompt": "q", "x": float("nan")},
        "one of x is no JSON value: Out of range float values are", "not of the format",
    ),
    (
        "prompts", {"prompt": "q", "x": b"1"},
        "one of x is no JSON value: Object of type bytes is not JSON", "not of the format",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "row", "found", "reason"), CASES, ids=range(len(CASES)))
def test_a_bad_row_is_refused_with_what_is_found_and_counted_by_its_reason(
    name: str, row: Row, found: str, reason: str
) -> None:
    with pytest.raises(BadRowError) as refusal:
        BY_NAME[name].convert(row)
    assert refusal.value.found.startswith(found)
    assert refusal.value.reason == reason
    assert refusal.value.accepted
    copied = pickle.loads(pickle.dumps(refusal.value))
    assert (str(copied), copied.reason) == (str(refusal.value), reason)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": 7}, 'text is the number 7; accepted: {"text": "..."}; write a string'),
        (
            {"body": "a", "id": 1},
            "no field 'text' (fields: body, id); accepted: {\"text\": \"...\"}; add 'text' or rename the field that "
            "holds it",
        ),
        (
            {"text": "ab\ud83d"},
            "text has half a surrogate pair at character 2; accepted: text; write the whole character",
        ),
    ],
)
def test_a_refusal_names_what_is_found_what_is_accepted_and_the_remedy(row: Row, message: str) -> None:
    with pytest.raises(BadRowError) as refusal:
        BY_NAME["text"].convert(row)
    assert str(refusal.value) == message


def test_a_message_can_be_written_whatever_it_quotes() -> None:
    with pytest.raises(BadRowError) as refusal:
        BY_NAME["text"].convert({"\ud83d": 1})
    assert "\\ud83d" in str(refusal.value).encode().decode()


def test_a_group_is_a_name() -> None:
    assert optional_name("g", "group") == "g"
    assert optional_name(None, "group") is None
    assert optional_name("", "group") is None, "the cell of a table may be empty"
    with pytest.raises(BadRowError, match=r"^group is the number 1; accepted: a string or null; "):
        optional_name(1, "group")


@pytest.mark.parametrize("ids", [("x", "y"), ("y", "x"), (None, None)])
def test_calls_that_are_all_answered_are_read(ids: tuple[str | None, ...]) -> None:
    results = [{**RESULT, "tool_call_id": each} for each in ids]
    made = BY_NAME["messages"].convert({"messages": [Q, TWO_CALLS, *results, A]})
    assert len(made["messages"]) == 5  # type: ignore[arg-type]
