"""Built-in rewards: right, nearly right, empty, hostile and very long answers."""

import json
import time

import pytest

from lineage.errors import ConfigError, DataError
from tasks.reward_functions import RewardFunction, check_columns, check_rewards, scorers
from tasks.reward_functions.built_in import evaluated

LONG = 300_000  # characters


class Words:
    """A tokenizer whose tokens are words."""

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": list(range(len(text.split())))}


def score(name: str, completion: str, row: dict[str, object] | None = None, **options: object) -> float:
    (scorer,) = scorers({name: RewardFunction(**options)}, Words())
    columns = {column: [value] for column, value in (row or {}).items()}
    check_columns([scorer], columns)
    (value,) = scorer([[{"role": "user", "content": "?"}]], [completion], columns)
    return value


@pytest.mark.parametrize(
    ("completion", "answer", "value"),
    [
        ("12345", "12345", 1), (" 12345\n", 12345, 1), ("1 2  3", "1 2 3", 1), ("ﬁne", "fine", 1), ("true", True, 1),
        ("12354", "12345", 0.6 * 0.5), ("1234", "12345", 0.8 * 0.5), ("Yes", "yes", 2 / 3 * 0.5), ("", "12345", 0),
        ("12345" * LONG, "12345", pytest.approx(5 / 100_000 * 0.5)), ("\x00\ud800", "12", 0),
    ],
)  # fmt: skip
def test_exact(completion, answer, value):
    assert score("exact", completion, {"answer": answer}, partial_credit=0.5) == value
    assert score("exact", completion, {"answer": answer}) == (value if value == 1 else 0)


@pytest.mark.parametrize(
    ("completion", "value"),
    [("so <answer> 7 </answer>.", 1), ("<answer>6</answer> <answer>7</answer>", 1), ("7", 0), ("<answer>7", 0),
     ("</answer>7<answer>", 0), ("<answer></answer>", 0)],
)  # fmt: skip
def test_with_a_tag_only_the_text_in_it_is_an_answer(completion, value):
    assert score("exact", completion, {"answer": "7"}, answer_tag="answer") == value


@pytest.mark.parametrize(
    ("completion", "answer", "value"),
    [
        ("The answer is 42.", "42", 1), ("first 7, then 42", 42, 1), ("42 %", "0.42", 1), (r"42\%", 0.42, 1),
        ("1,234,567.5", 1234567.5, 1), ("3/4", 0.75, 1), (r"$\frac{3}{4}$", "0.75", 1), (r"-\dfrac{3}{4}", -0.75, 1),
        ("\u22125", -5, 1), ("7-5", 5, 1), ("x = -5", -5, 1), ("1.5e3", 1500, 1), (".5", "1/2", 1),
        ("$18", "#### 18", 1), ("½", 0.5, 1), ("-1½", -1.5, 1), ("⅓", "1/3", 1), (r"\frac12", 0.5, 1),
        (r"-\frac 3{4}", -0.75, 1), ("1_234_567.5", 1234567.5, 1), ("x_1 = 2_000", 2000, 1), ("1½" * LONG, 42, None),
        ("1,2,3", 3, 1), ("41", 42, 41 / 42 * 0.5), ("", 42, 0), ("no number", 42, 0), ("1/0", 42, 0),
        ("9" * LONG, 42, 0), ("1," * LONG, 42, 0.5 / 42), ("1,111" * LONG, 42, 0), ("1/" * LONG + "42", 42, None),
        ("84", 42, 0), ("-42", 42, 0), ("1e400", 42, 0), ("NaN inf", 42, 0), ("42" + " %" * LONG, 0.42, None),
        ("(" * LONG, 42, 0), ("$" * LONG, 42, 0), ("\\frac{" * LONG, 42, 0),
        (r"\boxed{1{,}000}", 1000, 1), (r"1,\!234,\!567", 1234567, 1), (r"10\,000", r"10{,}000", 1),
        ("1\u202f000", 1000, 1), (r"1\frac{1}{2}", 1.5, 1), (r"-2\tfrac12", -2.5, 1), ("1 1/2 cups", 1.5, 1),
        ("2 5/2", 2.5, 1), ("2\u20443", "2/3", 1), (r"\frac{3}{-4}", -0.75, 1), (r"\frac{-3}{-4}", 0.75, 1),
        (r"1.5 \times 10^{-3}", 0.0015, 1), ("2*10^3", 2000, 1),
        ("5 cm^2", 5, 1), (r"5\text{ cm}^{2}", "5 cm\u00b2", 1), ("9 = x^2", 9, 1), ("3 x 10^8", 3e8, 1),
        ("10^-3", 0.001, 1),
        ("1.5\u00b710\u207b\u00b3", 0.0015, 1), ("2^{10}", 1024, 1), ("10\u00b2 m", 100, 1), ("9^999", 999, 1),
        ("2^" * LONG, 42, None), ("x^2" * LONG, 42, None), ("10\u00b2" * LONG, 42, None), ("1 x 10" * LONG, 42, None),
        ("\uff11\uff0c\uff10\uff10\uff10", 1000, 1), ("50\uff05", 0.5, 1),
        ("9" * 400 + "½", 42, 0), ("1" * 5000 + "½", 42, 0), ("1 " * LONG, 42, None), ("1 1/" * LONG, 42, None),
        ("1{,}000" * LONG, 42, None), ("1*10^" * LONG, 42, None),
    ],
)  # fmt: skip
def test_numeric(completion, answer, value):
    start = time.process_time()
    found = score("numeric", completion, {"answer": answer}, partial_credit=0.5)
    assert 0 <= found <= 1 if value is None else found == pytest.approx(value)
    assert time.process_time() - start < 2


def test_numeric_has_an_absolute_and_a_relative_tolerance():
    assert score("numeric", "0.3333", {"answer": "1/3"}) == 0
    assert score("numeric", "0.3333", {"answer": "1/3"}, tolerance=1e-4) == 1
    assert score("numeric", "102", {"answer": 100}, relative_tolerance=0.02) == 1
    assert score("numeric", "103", {"answer": 100}, relative_tolerance=0.02) == 0
    with pytest.raises(DataError, match="row 0 of the prompts: answer is 'none', without a number"):
        score("numeric", "1", {"answer": "none"})
    with pytest.raises(DataError, match=r"answer is \[1, 2\], without a number"):
        score("numeric", "1", {"answer": [1, 2]})


def test_regex_of_an_option_or_a_column():
    assert score("regex", "a = 7", pattern=r"=\s*\d$") == 1
    assert score("regex", "a = b", pattern=r"=\s*\d$") == 0
    assert score("regex", "cats", {"answer": "cats?"}) == score("regex", "a cat", {"wanted": "cats?"}, column="wanted")
    assert score("regex", "", pattern="x") == 0
    with pytest.raises(ConfigError, match=r"rewards.regex: pattern '\(': .* a regular expression is accepted"):
        check_rewards({"regex": RewardFunction(pattern="(")})
    with pytest.raises(ConfigError, match="pattern and column=answer: one of them holds the pattern"):
        check_rewards({"regex": RewardFunction(pattern="a", column="answer")})
    for value in ("(", None):
        with pytest.raises(DataError, match="row 0 of the prompts: answer is"):
            score("regex", "", {"answer": value})


@pytest.mark.parametrize("pattern", [r"(a|aa)+$", r"(.*)*x", r"(a+)+$"])
def test_a_search_that_would_not_end_finds_nothing(pattern, monkeypatch):
    monkeypatch.setattr("tasks.reward_functions.answer.SEARCH_SECONDS", 0.05)
    assert score("regex", "a" * 50_000 + "!", pattern=pattern) == 0
    assert score("format", "a" * 50_000 + "!", pattern=pattern) == 0


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ("<think>2 + 2</think>\n<answer>4</answer>", 1), (" <think>a</think><answer>4</answer>\n", 1),
        ("<think>a</think> so <answer>4</answer>", 1 * 0.5), ("<think>a</think><answer> </answer>", 1 * 0.5),
        ("<answer>4</answer><think>a</think>", 1 * 0.5), ("<think>a</think><answer>4", 0.75 * 0.5),
        ("<think>" * 2 + "a</think><answer>4</answer>", 0.75 * 0.5), ("", 0), ("4", 0), ("<answer>" * LONG, 0),
    ],
)  # fmt: skip
def test_format(completion, value):
    assert score("format", completion, partial_credit=0.5) == value
    assert score("format", completion) == (value if value == 1 else 0)


def test_format_of_own_tags_or_a_pattern():
    assert score("format", "<a>1</a><b-c>2</b-c>", tags=("a", "b-c")) == 1
    assert score("format", "<a>1</a>", tags=("a", "b-c"), partial_credit=0.5) == 0.25
    assert score("format", "7 days", pattern=r"\d+ days") == 1 and score("format", "7 days!", pattern=r"\d+ days") == 0
    for options, found in (
        ({"tags": ("a b",)}, "names such as"), ({"tags": ()}, "names such as"),
        ({"tags": ("a", "a")}, "different names such as"),
        ({"pattern": "a", "tags": ("a",)}, "pattern with tags="),
        ({"pattern": "a", "partial_credit": 0.5}, "is of tags"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"rewards.format: .*{found}"):
            check_rewards({"format": RewardFunction(**options)})


@pytest.mark.parametrize(
    ("words", "options", "value"),
    [
        (20, {}, 1), (15, {}, 0.75), (25, {}, 0.75), (40, {}, 0), (0, {}, 0), (LONG, {}, 0),
        (15, {"width_tokens": 10}, 0.5), (30, {"width_tokens": 10}, 0),
        (3, {"bound": "upper"}, 1), (25, {"bound": "upper"}, 0.75), (25, {"bound": "both"}, 0.75),
    ],
)  # fmt: skip
def test_length_counts_tokens(words, options, value):
    assert score("length", "w " * words, target_tokens=20, **options) == value


def test_length_needs_a_target_and_a_tokenizer():
    with pytest.raises(ConfigError, match=r"rewards.length: target_tokens is not set"):
        check_rewards({"length": RewardFunction()})
    with pytest.raises(ConfigError, match="length counts tokens, and no tokenizer was given"):
        scorers({"length": RewardFunction(target_tokens=20)})


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


def test_no_answer_keeps_a_schema_busy():
    start = time.process_time()
    slow = {"properties": {"a": {"pattern": "^(a+)+$"}}}
    assert score("json", json.dumps({"a": "a" * 40 + "!"}), {"answer": slow}, column="answer") == 0
    many = [1, "a", *({"k": each} for each in range(6000))]
    different = {"uniqueItems": True}
    assert score("json", json.dumps(many), {"answer": different}, column="answer") == 1
    assert score("json", json.dumps([*many, {"k": 7.0}]), {"answer": different}, column="answer") == 0
    assert score("json", "[1, true, 0, false, [1], [true]]", {"answer": different}, column="answer") == 1
    assert score("json", "[" + '{"a": ' * 200 + "1" + "}" * 200 + "]", {"answer": different}, column="answer") == 1
    assert time.process_time() - start < 5


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
