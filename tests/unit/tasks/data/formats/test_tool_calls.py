"""Calls of tools: each answered, none changed on its way, none lost."""

import pytest

from tasks.data.formats.known import BY_NAME
from tasks.data.formats.values import BadRowError
from tasks.data.kinds import messages_of

Row = dict[str, object]
Q: Row = {"role": "user", "content": "q"}
A: Row = {"role": "assistant", "content": "a"}


def calling(*ids: str | None) -> Row:
    return {"role": "assistant", "tool_calls": [{"id": each, "name": "f", "arguments": {}} for each in ids]}


def result(id: str | None = None) -> Row:
    return {"role": "tool", "content": "r", "tool_call_id": id}


def said(content: str) -> list[Row]:
    return [Q, {**A, "content": content}]


def refused(row: Row, name: str = "messages") -> BadRowError:
    with pytest.raises(BadRowError) as refusal:
        BY_NAME[name].convert(row)
    return refusal.value


@pytest.mark.parametrize(
    ("turns", "found"),
    [
        ([calling("x", "y"), result("x")], "messages[1] calls 'y', which no tool answered"),
        ([calling("x", "y"), result("x"), A], "messages[1] calls 'y', which no tool answered"),
        ([calling(None, None), result(), A], "messages[1] calls 2 functions, of which 1 answered"),
        ([calling("x", "y"), result(), A], "messages[1] calls 2 functions, of which 1 answered"),
        ([calling("x", "x"), result("x"), A], "messages[1] calls 2 functions, of which 1 answered"),
        ([calling("x"), result("z"), A], "messages[1] calls 'x', and a tool answers 'z'"),
        ([calling("x"), result("x"), result("z"), A], "messages[1] calls 'x', and a tool answers 'z'"),
    ],
)
def test_a_call_that_is_not_answered_is_refused(turns: list[Row], found: str) -> None:
    error = refused({"messages": [Q, *turns]})
    assert (error.found, error.reason) == (found, "unclosed tool call")


@pytest.mark.parametrize(
    "turns",
    [
        [calling("x", "y")],
        [calling("x", "y"), result("y"), result("x")],
        [calling(None, None), result("x"), result("y"), A],
        [calling("x"), result("x"), calling("y"), result("y"), A],
    ],
)
def test_calls_at_the_end_and_answered_ones_are_read(turns: list[Row]) -> None:
    made = BY_NAME["messages"].convert({"messages": [Q, *turns]})
    assert len(made["messages"]) == 1 + len(turns)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("</tool_call>\n<tool_call>", "has <tool_call> without </tool_call>"),
        ("<tool_call>{}", "has <tool_call> without </tool_call>"),
        ("<tool_call><tool_call>{}</tool_call>", "has <tool_call> without </tool_call>"),
        ("<tool_call>{}</tool_call></tool_call>", "has </tool_call> without <tool_call>"),
        (
            '<tool_call>{"name": "f"</tool_call>',
            "<tool_call> is not JSON: Expecting ',' delimiter: line 1 column 13 (char 12)",
        ),
    ],
)
def test_a_call_that_is_written_out_has_to_begin_and_end(content: str, found: str) -> None:
    error = refused({"messages": said(content)})
    assert (error.found, error.reason) == (f"messages[1] content {found}", "unclosed tool call")


@pytest.mark.parametrize(
    "content",
    [
        'Wait.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "g"}\n</tool_call>',
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    ],
)
def test_calls_that_are_written_out_are_left_as_they_are(content: str) -> None:
    assert BY_NAME["messages"].convert({"messages": said(content)}) == {"messages": said(content)}


def xlam(arguments: str) -> Row:
    return {"query": "q", "tools": "[]", "answers": f'[{{"name": "f", "arguments": {arguments}}}]'}


def test_integers_beyond_64_bits_survive() -> None:
    made = BY_NAME["function_calling"].convert(xlam('{"id": 123456789012345678901234567890}'))
    (call,) = messages_of(made["messages"])[1]["tool_calls"]  # type: ignore[misc]
    assert call["function"]["arguments"] == {"id": 123456789012345678901234567890}
    assert refused(xlam('{"x": 1e400}'), "function_calling").found.startswith("answers is no JSON value: Out of range")


@pytest.mark.parametrize(
    "row",
    [
        xlam('{"city": "Paris", "city": "Rome"}'),
        {"messages": [Q, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"a": 1, "a": 2}'}]}]},
        {"messages": [Q, A], "tools": '[{"name": "f", "name": "g"}]'},
        {"messages": '[{"role": "user", "content": "q", "content": "p"}]'},
    ],
)
def test_keys_that_are_there_twice_are_refused(row: Row) -> None:
    error = refused(row, "function_calling" if "query" in row else "messages")
    assert "is there twice" in error.found


@pytest.mark.parametrize(
    ("name", "row", "found"),
    [
        (
            "messages", {"messages": [Q, A], "tools": [{"name": "f"}], "functions": [{"name": "g"}]},
            "tools and functions are both there",
        ),
        (
            "openai_preference",
            {"input": {"messages": [Q], "system": "s"}, "preferred_output": [A], "non_preferred_output": said("b")[1:]},
            "input has system",
        ),
        (
            "oumi_preference",
            {"messages": [Q], "chosen": {"messages": [A], "system": "s"}, "rejected": {"messages": said("b")[1:]}},
            "chosen has system",
        ),
    ],
)  # fmt: skip
def test_what_a_row_says_beside_is_not_lost(name: str, row: Row, found: str) -> None:
    assert refused(row, name).found == found
