"""Built-in rewards for formal languages: right, nearly right, empty, hostile and very long answers."""

import json

import pytest

from lineage.errors import DataError
from tasks.reward_functions.built_in import evaluated
from tests.unit.tasks.reward_functions.test_texts import LONG, score

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a", "b"]}
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {
        "type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"], "additionalProperties": False}}},
    {"type": "function", "function": {"name": "now"}},
]  # fmt: skip
HOSTILE = ["", "[" * LONG, '{"a": ' * LONG, "1" * LONG, "NaN", "{'a': 1}", '"\ud800"', "```json\n" * 1000, "null" * 9]


@pytest.mark.parametrize(
    ("completion", "value"),
    [('{"a": 1, "b": 2}', 1), ('So:\n```json\n{"a": 1, "b": 2}\n```\n', 1), ('{"a": 1}', 0.25),
     ('{"b": 1, "c": 2}', 0.25),
     ("[]", 0), *((text, 0) for text in HOSTILE)],
)  # fmt: skip
def test_json_has_the_keys_of_a_column(completion, value):
    assert score("json", completion, {"keys": ["a", "b"]}, column="keys", partial_credit=0.5) == value


@pytest.mark.parametrize(
    ("completion", "value"),
    [('{"a": 1, "b": 2}', 1), ('{"a": "1", "b": 2}', 0.5), ('{"a": 1}', 0.25), *((text, 0) for text in HOSTILE)],
)
@pytest.mark.parametrize("written", [SCHEMA, json.dumps(SCHEMA)])
def test_json_fits_the_schema_of_a_column(completion, value, written):
    assert score("json", completion, {"answer": written}, column="answer", partial_credit=0.5) == value


def test_json_without_a_column_is_any_json():
    assert score("json", "[1, 2]") == score("json", " 7 ") == 1
    assert [score("json", text) for text in HOSTILE if text != "1" * LONG] == [0] * (len(HOSTILE) - 1)


@pytest.mark.parametrize("value", ["no json", 7, [], [1], {"type": "nothing"}, None])
def test_a_column_without_keys_or_a_schema_is_refused(value):
    with pytest.raises(DataError, match=r"rewards.json: row 0 of the prompts: answer is"):
        score("json", "{}", {"answer": value}, column="answer")


def test_a_schema_fetches_nothing():
    remote = {"$ref": "http://127.0.0.1:9/schema.json"}
    assert score("json", "{}", {"answer": remote}, column="answer") == 0


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ('<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>', 1), ('{"name": "now"}', 1),
        ('[{"name": "now"}, {"name": "add", "arguments": {"x": 2.5}}]', 1),
        ('<tool_call>{"name": "add", "arguments": {"x": "1"}}</tool_call>', 0.25),
        ('<tool_call>{"name": "now"}</tool_call><tool_call>{"name": "later"}</tool_call>', 0.25),
        ('{"name": "add", "arguments": {"x": 1, "y": 2}}', 0.25), ('{"name": "add", "arguments": "x"}', 0.25),
        ('{"name": "now", "code": "rm"}', 0.25), ('{"name": ["now"]}', 0), ("[]", 0), ("add(1)", 0),
        ("<tool_call>" * 5000, 0), *((text, 0) for text in HOSTILE),
    ],
)  # fmt: skip
@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS), [tool["function"] for tool in TOOLS]])
def test_tool_calls_are_of_declared_tools(completion, value, tools):
    assert score("tool_call", completion, {"tools": tools}, partial_credit=0.5) == value


@pytest.mark.parametrize(
    "tools", [[], "no", [{"type": "function"}], [{"name": "a", "parameters": {"type": "b"}}], None]
)
def test_a_column_without_tools_is_refused(tools):
    with pytest.raises(DataError, match=r"rewards.tool_call: row 0 of the prompts: tools"):
        score("tool_call", "{}", {"tools": tools})


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ("(25 - 5) * 3", 1), ("Let me see.\n(25 - 5) * 3 = 60\n", 1), ("25*3 - 5*3", 0), ("25 + 5 + 3", 0.1),
        ("-5 * 3 + 25", 0.1), ("(25 \u2212 5) \u00d7 3", 1), ("60", 0), ("25 - 5", 0), ("25 / (5 - 5) * 3", 0), ("", 0),
        ("25 ** 5 ** 3", 0), ("__import__('os').system('exit 1')", 0), ("(" * LONG, 0), ("25 + 5 * 3 +" * LONG, 0),
        ("25 // 5 * 3", 0), ("(25 5 3)", 0), ("-" * 400 + "25 - 5 * 3", 0.1),
    ],
)  # fmt: skip
def test_countdown_uses_each_number_once(completion, value):
    found = score("countdown", completion, {"numbers": [3, 5, 25], "target": 60}, partial_credit=0.1)
    assert found == pytest.approx(value)


def test_countdown_is_exact_and_checks_its_columns():
    assert evaluated("1/3 + 1/3 + 1/3") == (1, [1, 3, 1, 3, 1, 3])
    for row in ({"numbers": ["1"], "target": 1}, {"numbers": [1], "target": "x"}, {"numbers": [1], "target": True}):
        with pytest.raises(DataError, match=r"rewards.countdown: row 0 of the prompts"):
            score("countdown", "1", row)
    assert score("countdown", "1 / 2", {"numbers": [1, 2], "wanted": 0.5}, column="wanted") == 1
