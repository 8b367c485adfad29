"""Rows that a format refuses: what is found and the reason that it is counted by; and odd rows that it reads."""

import pickle
from datetime import date

import pytest

from lineage.errors import ConfigError
from tasks.data.formats.detect import BY_NAME
from tasks.data.formats.proposals import placeholders, with_prompt
from tasks.data.formats.turns import BadRowError, optional_name
from tasks.data.kinds import messages_of
from tasks.data.preparing.convert_rows import remarks, with_system
from tasks.data.reading.chunk import Unread

Q = {"role": "user", "content": "q"}
A = {"role": "assistant", "content": "a"}
CALLING = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
HUMAN, GPT = {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}
HH = "\n\nHuman: q\n\nAssistant: "


def test_an_index_after_the_last_choice_says_that_the_other_rows_may_be_wrong_too():
    with pytest.raises(BadRowError, match="if indexes begin at 1, the other rows are wrong too"):
        BY_NAME["multiple_choice"].convert({"question": "q", "choices": ["a", "b"], "answer": 2})


def call(**function):
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f", **function}}]}


def calling(*ids):
    return {"role": "assistant", "tool_calls": [{"id": each, "name": "f", "arguments": {}} for each in ids]}


def result(id=None):
    return {"role": "tool", "content": "r", "tool_call_id": id}


def answered(content, **more):
    return {"messages": [Q, {"role": "assistant", "content": content, **more}]}


def xlam(arguments):
    return {"query": "q", "tools": "[]", "answers": f'[{{"name": "f", "arguments": {arguments}}}]'}


OPENAI = {"input": {"messages": [Q]}, "preferred_output": [A], "non_preferred_output": [{**A, "content": "b"}]}
UNCLOSED, UNREADABLE = "unclosed tool call", "tool call that cannot be read"
CASES = [  # format, row, how what is found begins, reason
    ("text", {"body": "a", "id": 1}, "no field 'text' (fields: body, id)", "missing field"),
    ("text", {"text": None}, "text is null", "no text"),
    ("text", {"text": ["a"]}, "text is a list", "not text"),
    ("text", {"text": "ab\ud83d"}, "text has half a surrogate pair at character 2", "half a surrogate pair"),
    ("messages", {"messages": []}, "messages is empty", "no answer"),
    ("messages", {"messages": "a"}, "messages is the text 'a'", "no messages"),
    ("messages", {"messages": ["a"]}, "messages[0] is the text 'a'", "not of the format"),
    ("messages", {"messages": [{"content": "q"}]}, "messages[0] has no 'role' (it has: content)", "unknown role"),
    ("messages", {"messages": [Q, {**A, "role": "critic"}]}, "messages[1] has the role 'critic'", "unknown role"),
    ("messages", {"messages": [Q, {"role": "assistant"}]}, "messages[1] has no 'content' (it has: role)", "no answer"),
    ("messages", answered(True), "messages[1] content is the boolean true", "not text"),
    ("messages", {"messages": [{**Q, "content": ""}, A]}, "messages[0] content is empty", "empty prompt"),
    ("messages", answered("a", refusal="r"), "messages[1] has refusal", "unknown field"),
    ("messages", {"messages": [{**Q, "name": 3}, A]}, "messages[0] name is the number 3", "not text"),
    ("messages", {"messages": [{**Q, "type": ["text"]}, A]}, "messages[0] has type", "unknown field"),
    ("messages", {"messages": [A]}, "messages[0] has the role 'assistant' at the beginning", "wrong role order"),
    ("messages", {"messages": [Q, Q, A]}, "messages[1] has the role 'user' after 'user'", "wrong role order"),
    ("messages", {"messages": [Q, CALLING, Q, A]}, "messages[2] has the role 'user' after a tool call that", UNCLOSED),
    ("messages", {"messages": [Q, CALLING, {**result(), "content": None}]}, "messages[2] content is null",
     "no tool result"),
    ("messages", {"messages": [Q, {"role": "assistant", "tool_calls": [{"type": "web"}]}]},
     "messages[1] tool_calls[0] type is the text 'web'", UNREADABLE),
    ("messages", {"messages": [Q, call(arguments="[1")]}, "messages[1] tool_calls[0] arguments is not JSON", UNCLOSED),
    ("messages", {"messages": [Q, call(arguments="[1]")]}, "messages[1] tool_calls[0] arguments is a list", UNREADABLE),
    ("messages", {"messages": [Q, call(arguments='{"a": NaN}')]},
     "messages[1] tool_calls[0] arguments is not JSON: NaN", UNCLOSED),
    ("messages", {"messages": [Q, call(parameters={"a": 1})]}, "messages[1] tool_calls[0] has parameters",
     "unknown field"),
    ("messages", {"messages": [Q, calling("x", "y"), result("x"), A]},
     "messages[1] calls 'y', which no tool answered", UNCLOSED),
    ("messages", {"messages": [Q, calling(None, None), result(), A]},
     "messages[1] calls 2 functions, of which 1 answered", UNCLOSED),
    ("messages", {"messages": [Q, calling("x"), result("x"), result("z"), A]},
     "messages[1] calls 'x', and a tool answers 'z'", UNCLOSED),
    ("messages", answered("<tool_call><tool_call>{}</tool_call>"),
     "messages[1] content has <tool_call> without </tool_call>", UNCLOSED),
    ("messages", answered("<tool_call>{}</tool_call></tool_call>"),
     "messages[1] content has </tool_call> without <tool_call>", UNCLOSED),
    ("messages", answered('<tool_call>{"name": "f"</tool_call>'), "messages[1] content <tool_call> is not JSON: ",
     UNCLOSED),
    ("messages", {"messages": [Q, A], "tools": "{"}, "tools is not JSON: Expecting", "tools that cannot be read"),
    ("messages", {"messages": [Q, A], "tools": 3}, "tools is the number 3", "tools that cannot be read"),
    ("messages", {"messages": [Q, A], "tools": [{"description": "d"}]}, "tools[0] names no function",
     "tools that cannot be read"),
    ("messages", {"messages": [Q, A], "tools": [{"name": "f"}], "functions": [{"name": "g"}]},
     "tools and functions are both there", "not of the format"),
    ("messages", {"messages": '[{"role": "user", "content": "q", "content": "p"}]'},
     "messages is not JSON: the key 'content' is there twice", "no messages"),
    ("messages", {"messages": [{**Q, "content": [{"type": "image_url", "image_url": {"url": "u"}}]}, A]},
     "messages[0] content[0] is of type 'image_url'", "media that is not read"),
    ("prompt_completion", {"prompt": "q"}, "no field 'completion' (fields: prompt)", "no answer"),
    ("prompt_completion", {"prompt": " ", "completion": "a"}, "prompt is empty", "empty prompt"),
    ("prompt_completion", {"prompt": "q", "completion": "a", "response": "b"},
     "completion and response are both there", "not of the format"),
    ("prompt_completion", {"prompt": [Q, A], "completion": "a"}, "prompt ends with the role 'assistant'",
     "wrong role order"),
    ("alpaca", {"instruction": "", "input": "", "output": "a"}, "instruction is empty", "empty prompt"),
    ("alpaca", {"instruction": "q", "output": "a", "history": [["q"]]}, "history[0] is a list of 1",
     "not of the format"),
    ("sharegpt", {"conversations": [HUMAN, {"from": "narrator", "value": "a"}]},
     "conversations[1] has the role 'narrator'", "unknown role"),
    ("sharegpt", {"conversations": [HUMAN, {"from": "gpt", "value": None}]}, "conversations[1] value is null",
     "no answer"),
    ("sharegpt", {"conversations": [HUMAN, {"from": "function_call", "value": "f()"}]},
     "conversations[1] value is not JSON: Expecting value", UNCLOSED),
    ("sharegpt", {"conversations": [HUMAN, {"from": "function_call", "value": '{"arguments": {}}'}]},
     "conversations[1] value[0] names no function", UNREADABLE),
    ("reasoning", {"problem": "q", "thinking": " ", "solution": "a"}, "thinking is empty", "no thinking"),
    ("reasoning", {"problem": "q", "thinking": "<think>t</think>", "solution": "a"},
     "thinking has a thought, and there is a <think> in it or in the content", "two thoughts"),
    ("multiple_choice", {"question": "q", "choices": ["a", "b"], "answer": 2},
     "answer is the number 2, which is none of the choices A, B", "no answer"),
    ("multiple_choice", {"question": "q", "choices": ["2", "1", "0"], "answer": "2"},
     "answer is the text '2', which may be C or A", "no answer"),
    ("multiple_choice", {"question": "q", "choices": [2, 1, 0], "answer": 0},
     "answer is the number 0, which may be A or C", "no answer"),
    ("multiple_choice", {"question": "q", "choices": ["b", "a"], "answer": "a"},
     "answer is the text 'a', which may be B or A", "no answer"),
    ("multiple_choice", {"question": "q", "choices": ["a", "b"], "answer": ""}, "answer is the text ''", "no answer"),
    ("multiple_choice", {"question": " ", "choices": ["a", "b"], "answer": "A"}, "question is empty", "empty prompt"),
    ("multiple_choice", {"question": "q", "choices": ["a"], "answer": "A"}, "choices holds no choices", "no choices"),
    ("function_calling", {"query": "q", "tools": "[]", "answers": "[]"}, "answers is empty", "no answer"),
    ("function_calling", xlam('{"city": "Paris", "city": "Rome"}'), "answers is not JSON: the key 'city' is there twi",
     UNCLOSED),
    ("function_calling", xlam('{"x": 1e400}'), "answers is not a JSON value: Out of range", "not of the format"),
    ("preference", {"prompt": "q", "chosen": "a"}, "no field 'rejected' (fields: chosen, prompt)", "no answer"),
    ("preference", {"prompt": "q", "chosen": "a", "rejected": "a"}, "chosen and rejected are the same",
     "nothing to prefer"),
    ("preference", {"prompt": "q", "chosen": [Q, A], "rejected": "b"}, "chosen has messages of user, assistant",
     "wrong role order"),
    ("preference", {"prompt": "q", "chosen": "a", "rejected": "b", "kind": 3}, "kind is the number 3", "not text"),
    ("implicit_preference", {"chosen": [Q, A], "rejected": [{**Q, "content": "other"}, A]},
     "chosen and rejected have no common beginning, and there is", "empty prompt"),
    ("implicit_preference", {"chosen": "q a", "rejected": [Q, A]}, "chosen is the text 'q a'", "not of the format"),
    ("transcript_preference", {"chosen": f"{HH}a", "rejected": f"{HH}a\n\nHuman: w\n\nAssistant: b"},
     "chosen and rejected differ from turn 2", "another beginning"),
    ("transcript_preference", {"chosen": f"{HH}a\n\nHuman: and?", "rejected": f"{HH}b"},
     "chosen ends with a turn of the user", "wrong role order"),
    ("transcript_preference", {"chosen": f"{HH}a", "rejected": "b"}, "rejected does not begin with 'Human:'",
     "no transcript"),
    ("transcript_preference", {"chosen": f"{HH}a", "rejected": HH}, "rejected[0] content is empty", "no answer"),
    ("sharegpt_ranking", {"conversations": [HUMAN, GPT], "chosen": GPT, "rejected": {**GPT, "value": "b"}},
     "conversations ends with the role 'assistant'", "wrong role order"),
    ("openai_preference", {**OPENAI, "input": {}}, "no field 'messages' (fields: none)", "empty prompt"),
    ("openai_preference", {**OPENAI, "input": "q"}, "input is the text 'q'", "not of the format"),
    ("openai_preference", {**OPENAI, "input": {"messages": [Q], "system": "s"}}, "input has system", "unknown field"),
    ("oumi_preference", {"messages": [Q], "chosen": {"messages": [A], "system": "s"}, "rejected": "b"},
     "chosen has system", "unknown field"),
    ("unpaired", {"prompt": "q", "completion": "a", "label": "sports"}, "label is the text 'sports'", "no label"),
    ("messages_label", {"messages": [Q, A]}, "label is null", "no label"),
    ("messages_label", {"messages": [Q, A, Q], "label": True}, "messages ends with the role 'user'", "no answer"),
    ("prompts", {"prompt": "q", "prompt_ids": [1]}, "the column prompt_ids is reserved", "reserved column"),
    ("prompts", {"prompt": "q", "x": float("nan")}, "x is not a JSON value: Out of range", "not of the format"),
    ("prompts", {"prompt": "q", "a": 1, "day": date(2026, 1, 2)}, "day is not a JSON value: of type date",
     "not of the format"),
    ("prompts", {"prompt": "q", "a": 1, "x": {"y": [Unread("geo")]}}, "x is not a JSON value: of Arrow's type geo",
     "not of the format"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "row", "found", "reason"), CASES, ids=range(len(CASES)))
def test_a_bad_row_is_refused_with_what_is_found_and_counted_by_its_reason(name, row, found, reason):
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
        ({"text": 7}, 'text is the number 7; accepted: {"text": "..."}; correct or remove the row'),
        ({"\ud83d": 1}, "no field 'text' (fields: \\ud83d); "),
    ],
)  # fmt: skip
def test_a_refusal_names_what_is_found_what_is_accepted_and_the_remedy(row, message):
    with pytest.raises(BadRowError) as refusal:
        BY_NAME["text"].convert(row)
    assert str(refusal.value).encode().decode().startswith(message)


def test_a_group_is_a_name():
    assert [optional_name(each, "group") for each in ("g", None, "")] == ["g", None, None]
    with pytest.raises(BadRowError, match=r"^group is the number 1; accepted: a string or null; "):
        optional_name(1, "group")


@pytest.mark.parametrize(
    "turns",
    [
        [calling("x", "y")],
        [calling("x", "y"), result("y"), result("x")],
        [calling(None, None), result("x"), result("y"), A],
        [calling("x"), result("x"), calling("y"), result("y"), A],
    ],
)
def test_calls_at_the_end_and_answered_ones_are_read(turns):
    made = BY_NAME["messages"].convert({"messages": [Q, *turns]})
    assert len(made["messages"]) == 1 + len(turns)


def test_calls_that_are_written_out_and_large_integers_are_left_as_they_are():
    written = answered("<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>")
    assert BY_NAME["messages"].convert(written) == written
    made = BY_NAME["function_calling"].convert(xlam('{"id": 123456789012345678901234567890}'))
    (each,) = messages_of(made["messages"])[1]["tool_calls"]
    assert each["function"]["arguments"] == {"id": 123456789012345678901234567890}


# Templates of prompts, and system turns.


def test_a_template_takes_its_columns_and_leaves_the_others():
    row = {"context": "c {x}", "question": "q", "year": 1999, "answer": "a"}
    made = with_prompt(row, "{context}\n\n{question} ({year}) {{}}")
    assert made == {"answer": "a", "prompt": "c {x}\n\nq (1999) {}"}
    assert with_prompt({"prompt": "q"}, "Say: {prompt}") == {"prompt": "Say: q"}
    assert with_prompt({"my column": "q"}, "{my column}") == {"prompt": "q"}
    assert placeholders("{b}{a}{b}") == {"a", "b"}


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"b": "q"}, r"no field 'a' \(fields: b\); accepted: the columns of prompt_template, .*; add it, or"),
        ({"a": None}, "a is null"),
        ({"a": ["q"]}, "a is a list"),
        ({"a": "q", "prompt": "p"}, r"prompt is there already; .* put \{prompt\} into the template$"),
    ],
)
def test_a_row_that_a_template_does_not_fit_is_refused(row, found):
    with pytest.raises(BadRowError, match=found):
        with_prompt(row, "{a}")


@pytest.mark.parametrize(
    ("template", "found"),
    [("no", "no placeholder; accepted: text with named placeholders, such as .*; name columns alone"),
     ("{}", "the placeholder {}"), ("{a.b}", "the placeholder {a.b}"), ("{a[0]}", r"the placeholder {a\[0\]}"),
     ("{a!r}", "a conversion or a format"), ("{a", "expected .*; accepted: .*; write {{ for a brace$")],
)  # fmt: skip
def test_a_template_names_columns_alone(template, found):
    with pytest.raises(ConfigError, match=f"^prompt_template: {found}"):
        placeholders(template)


@pytest.mark.parametrize("name", ["messages", "prompt"])
def test_rows_without_a_system_turn_are_given_one(name):
    system = {"role": "system", "content": "s"}
    row = {name: [Q, A], "tools": "[]"}
    assert with_system(row, "s") == {name: [system, Q, A], "tools": "[]"}
    own = {name: [{**system, "content": "own"}, Q]}
    assert with_system(own, "s") == own


# What is odd in a row that is used.

CONTROL, NUL, REPLACED = "control characters", "NUL characters", "replacement characters U+FFFD"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("plain\ttext\r\n, Grüße 世界 \u00a0\u200d", ()), ("a\0\x1b\ufffd", (NUL, CONTROL, REPLACED)),
        ("a\ufeffb", ("byte order marks U+FEFF",)), ("\u202eab", ("bidirectional controls",)),
        *((f"a{chr(code)}b", (CONTROL,)) for code in [*range(1, 9), 11, 12, *range(14, 32), *range(127, 160)]),
    ],
)  # fmt: skip
def test_odd_characters_are_remarked_wherever_they_are(text, found):
    output = {"role": "assistant", "content": text}
    assert remarks({"text": text}) == found
    assert remarks({"messages": [Q, output], "tools": "[]"}) == found
    assert remarks({"prompt": [Q], "chosen": [Q], "rejected": [output], "kind": None}) == found
    assert remarks({"prompt": [Q], "completion": [output], "label": True}) == found


def test_a_conversation_whose_last_turn_nobody_answers_is_remarked():
    assert remarks({"messages": [Q, A, Q]}) == ("no answer to the last turn",)
    assert remarks({"messages": [Q, A]}) == ()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("USER: why? ASSISTANT: because", True), ("x\nHuman: why?", True), ("<|im_start|>user\nwhy?", True),
        ("[INST] why? [/INST]", True), ("the User: field", False), ("a human: being", False),
    ],
)  # fmt: skip
def test_a_transcript_in_an_answer_is_remarked_and_in_a_question_is_not(text, found):
    output, asked = {"role": "assistant", "content": text}, {"role": "user", "content": text}
    marked = ("role marks in an answer",) if found else ()
    assert remarks({"messages": [Q, output]}) == remarks({"prompt": [Q], "chosen": [output], "rejected": [A]}) == marked
    assert remarks({"messages": [asked, A]}) == remarks({"text": text}) == ()
