"""Rows whose answers or labels a format would leave unread are never taken for rows of it."""

import pytest

from lineage.errors import DataError
from tasks.data.formats.detect import detect
from tasks.data.formats.values import BadRowError

Row = dict[str, object]
Q: Row = {"role": "user", "content": "q"}
A: Row = {"role": "assistant", "content": "a"}
CHAT: Row = {"messages": [Q, A]}
SHAREGPT: Row = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}


def refused(*sample: Row) -> str:
    with pytest.raises(DataError) as refusal:
        detect(sample, "rows.jsonl")
    return str(refusal.value)


@pytest.mark.parametrize("value", [0, True, {"text": "a"}])
@pytest.mark.parametrize("name", ["completion", "response"])
def test_a_completion_that_is_no_text_is_a_bad_row(name: str, value: object) -> None:
    rows: list[Row] = [{"prompt": f"q{number}", name: value} for number in range(3)]
    detected = detect(rows, "rows.jsonl")
    assert detected.name == "prompt_completion"
    with pytest.raises(BadRowError, match=f"^{name} "):
        detected.convert(rows[0])


@pytest.mark.parametrize("name", ["text", "output", "solution", "chosen", "label", "answers"])
def test_a_value_of_the_wrong_type_hides_no_format(name: str) -> None:
    good: dict[str, tuple[str, Row]] = {
        "text": ("text", {}), "output": ("alpaca", {"instruction": "q"}),
        "solution": ("reasoning", {"problem": "q", "thinking": "t"}),
        "chosen": ("preference", {"prompt": "q", "rejected": "b"}),
        "label": ("unpaired", {"prompt": "q", "completion": "a"}),
        "answers": ("function_calling", {"query": "q", "tools": "[]"}),
    }  # fmt: skip
    format, row = good[name]
    rows: list[Row] = [{**row, name: None}] * 7 + [{**row, name: 3}] * 3
    detected = detect(rows, "rows.jsonl")
    assert detected.name == format
    for bad in (rows[0], rows[-1]):
        with pytest.raises(BadRowError, match=f"^{name} is "):
            detected.convert(bad)


def test_half_of_the_completions_may_be_null() -> None:
    rows: list[Row] = [{"prompt": "q", "completion": "a" if number % 2 else None} for number in range(20)]
    detected = detect(rows, "rows.jsonl")
    assert (detected.name, detected.evidence) == (
        "prompt_completion", "has prompt and completion: 20 of 20 rows looked at",
    )  # fmt: skip
    with pytest.raises(BadRowError, match=r"^completion is null; "):
        detected.convert(rows[0])


@pytest.mark.parametrize("name", ["completion", "response", "chosen", "rejected"])
def test_a_prompt_with_an_answer_that_is_null_throughout_is_no_prompt_alone(name: str) -> None:
    row: Row = {"prompt": "q", name: None}
    assert f"no format fits the columns prompt, {name} (" in refused(row, row)
    assert detect([row], "rows.jsonl", stated="prompts").convert(row)["prompt"] == [Q]
    assert detect([{**row, name: "a"}], "r", stated="prompts").convert({**row, name: "a"})["columns"]
    later = detect([{"prompt": "q"}], "rows.jsonl")
    with pytest.raises(BadRowError) as refusal:
        later.convert({"prompt": "q", name: "a"})
    assert str(refusal.value) == (
        f"the row has {name}, which prompts does not read; accepted: rows of prompts; "
        f"remove the row, or leave {name} unread with format=prompts"
    )


def test_a_few_labels_are_not_passed_over() -> None:
    rows: list[Row] = [CHAT] * 120 + [{**CHAT, "label": number % 2 == 0} for number in range(80)]
    assert refused(*rows) == (
        "rows.jsonl: its rows are of two formats: messages (has messages: 120 rows from row 1 on), "
        "messages_label (has messages and label: 80 rows from row 121 on); rows of one format are accepted; "
        "make a source of each, or say with format=NAME (sources.NAME.format=...) as what all are read"
    )
    within: list[Row] = [CHAT] * 9 + [{"messages": [Q, {**A, "label": False}]}]
    assert "two formats fit: messages (has messages), messages_label (has messages and label);" in refused(*within)


def test_of_a_table_the_rows_without_a_label_are_bad_ones() -> None:
    rows: list[Row] = [{**CHAT, "label": None}] * 120 + [{**CHAT, "label": False}] * 80
    detected = detect(rows, "rows.parquet")
    assert detected.name == "messages_label"
    with pytest.raises(BadRowError, match=r"^label is null; .* set format=messages$"):
        detected.convert(rows[0])


@pytest.mark.parametrize("row", [CHAT, SHAREGPT, {"prompt": "q", "completion": "a"}])
def test_a_label_beyond_the_rows_looked_at_makes_a_bad_row(row: Row) -> None:
    detected = detect([row], "rows.jsonl")
    with pytest.raises(BadRowError) as refusal:
        detected.convert({**row, "label": False})
    assert refusal.value.found == f"the row has label, which {detected.name} does not read"
    assert detected.convert({**row, "label": None}) == detected.convert(row)
    stated = detect([{**row, "label": 0}], "rows.jsonl", stated=detected.name)
    assert stated.convert({**row, "label": 0}) == detected.convert(row)


def test_answers_beside_messages_are_read() -> None:
    row: Row = {"messages": [Q], "chosen": "a", "rejected": "b"}
    assert detect([row], "rows.jsonl").name == "oumi_preference"
    assert "sharegpt: it does not read chosen" in refused({**SHAREGPT, "chosen": "a"})
    both: Row = {"prompt": "q", "completion": "a", "chosen": "a", "rejected": "b"}
    assert "two formats fit: prompt_completion (has prompt and completion), preference (" in refused(both)


def test_rows_of_two_formats_are_told_apart() -> None:
    rows: list[Row] = [{"text": "t"}] * 5 + [CHAT] * 5
    assert "text (has text: 5 rows from row 1 on), messages (has messages: 5 rows from row 6 on);" in refused(*rows)


@pytest.mark.parametrize("column", ["text", "body"])
def test_a_column_is_never_to_be_renamed_to_itself(column: str) -> None:
    row: Row = {column: None}
    assert refused(row, row).endswith(
        "; fill them: they are null in all rows looked at, or say which format is meant with format=NAME"
    )


def test_messages_as_json_text_are_read() -> None:
    row: Row = {"messages": '[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]'}
    detected = detect([row], "rows.csv")
    assert detected.convert(row) == CHAT
    with pytest.raises(BadRowError, match=r"^messages is not JSON: "):
        detected.convert({"messages": "[{"})
    with pytest.raises(BadRowError, match=r"^messages is the text 'hello'; "):
        detected.convert({"messages": "hello"})
