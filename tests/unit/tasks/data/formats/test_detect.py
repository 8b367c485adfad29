"""How the format of a source is told, stated, mapped, and refused."""

import pytest

from lineage.errors import ConfigError, DataError
from tasks.data.formats.detect import detect
from tasks.data.formats.values import BadRowError

Row = dict[str, object]
Q: Row = {"role": "user", "content": "q"}
A: Row = {"role": "assistant", "content": "a"}
ALPACA: Row = {"instruction": "q", "input": "i", "output": "a"}
NAMES = (
    "text, messages, prompt_completion, alpaca, sharegpt, reasoning, function_calling, preference, "
    "implicit_preference, transcript_preference, sharegpt_ranking, "
    "openai_preference, oumi_preference, unpaired, messages_label, prompts"
)


def refused(*sample: Row, columns: dict[str, str] | None = None, stated: str | None = None) -> str:
    with pytest.raises((DataError, ConfigError)) as refusal:
        detect(sample, "rows.jsonl", columns=columns, stated=stated)
    return str(refusal.value)


def test_the_evidence_says_how_many_rows_were_seen_to_be_of_the_format() -> None:
    detected = detect([{**ALPACA, "id": 1}, ALPACA, {"instruction": "q"}], "rows.jsonl")
    assert detected.evidence == "has instruction and output: 2 of 3 rows looked at"
    assert detected.mapping == {
        "instruction": "the user's turn", "input": "the user's turn, below the instruction",
        "output": "the assistant's turn",
    }  # fmt: skip
    assert detected.read_columns({**ALPACA, "id": 1, "tools": []}) == {"instruction", "input", "output", "tools"}
    assert detected.format.name == "alpaca"


def test_bad_rows_among_good_ones_do_not_hide_the_format() -> None:
    rows: list[Row] = [ALPACA] * 50 + [{"instruction": "q"}, {"odd": 1}] * 25
    detected = detect(rows, "rows.jsonl")
    with pytest.raises(BadRowError, match=r"^no field 'output' \(fields: instruction\)"):
        detected.convert(rows[50])


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"messages": [Q, A], "label": True}, "messages_label"),
        ({"prompt": "q", "completion": "a", "label": True}, "unpaired"),
        ({"prompt": "q", "completion": "a"}, "prompt_completion"),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "preference"),
        ({"messages": [Q], "chosen": {"messages": [A]}, "rejected": {"messages": [A]}}, "oumi_preference"),
        ({"prompt": "q", "answer": "a"}, "prompts"),
    ],
)
def test_a_format_that_explains_more_columns_wins(row: Row, name: str) -> None:
    assert detect([row], "rows.jsonl").name == name


def test_two_formats_that_explain_a_source_as_well_are_refused_and_either_can_be_stated() -> None:
    row: Row = {**ALPACA, "text": "t"}
    assert refused(row) == (
        "rows.jsonl: two formats fit: text (has text), alpaca (has instruction and output); "
        "say which with format=NAME (sources.NAME.format=...)"
    )
    assert detect([row], "rows.jsonl", stated="text").convert(row) == {"text": "t"}
    assert detect([row], "rows.jsonl", stated="alpaca").convert(row).keys() == {"messages"}


def test_three_formats_are_refused_alike() -> None:
    assert refused({**ALPACA, "text": "t", "prompt": "q"}).startswith("rows.jsonl: 3 formats fit: text (")


def test_a_source_of_no_format_is_refused_with_what_the_nearest_ones_miss() -> None:
    assert refused({"instruction": "q", "answers": "a", "id": 1}) == (
        "rows.jsonl: no format fits the columns instruction, answers, id ("
        "alpaca: no field 'output' (fields: answers, id, instruction); "
        "function_calling: no field 'query' (fields: answers, id, instruction)); "
        f"accepted: {NAMES}; name columns, such as columns={{prompt: question}}, "
        "or say which format is meant with format=NAME"
    )
    assert "(alpaca: no field 'output' (fields: instruction);" in refused(ALPACA, *[{"instruction": "q"}] * 2)


def test_the_one_column_of_texts_is_named() -> None:
    assert refused({"body": "a"}) == (
        f"rows.jsonl: no format fits the columns body; accepted: {NAMES}; name it: columns={{text: body}}, "
        "or say which format is meant with format=NAME"
    )
    assert detect([{"body": "a"}], "rows.jsonl", columns={"text": "body"}).convert({"body": "a"}) == {"text": "a"}


def test_an_empty_source_is_refused() -> None:
    assert refused() == 'rows.jsonl: no rows; give at least one row, such as a line {"text": "..."}'
    assert "no format fits the columns none;" in refused({})


def test_a_stated_format_has_to_exist_and_to_be_that_of_a_row() -> None:
    assert refused(ALPACA, stated="alpacca") == (
        f"format=alpacca: no such format; accepted: {NAMES}; did you mean alpaca?"
    )
    assert refused(ALPACA, stated="text") == (
        "rows.jsonl: not of format=text (text: no field 'text' (fields: input, instruction, output)); "
        "columns found: instruction, input, output; give its columns, or name columns, such as "
        "columns={prompt: question}"
    )
    assert detect([{"odd": 1}] * 9 + [ALPACA], "rows.jsonl", stated="alpaca").name == "alpaca"


def test_columns_are_renamed_before_anything_is_told() -> None:
    row: Row = {"context": "c", "question": "q", "answer": "a", "score": 1}
    columns = {"instruction": "question", "input": "context", "output": "answer"}
    detected = detect([row], "rows.jsonl", columns=columns)
    assert detected.convert(row) == {"messages": [{"role": "user", "content": "q\nc"}, A]}
    assert detected.mapping == {
        "question": "the user's turn", "context": "the user's turn, below the instruction",
        "answer": "the assistant's turn",
    }  # fmt: skip
    assert detected.read_columns(row) == {"context", "question", "answer"}


def test_two_columns_can_change_names() -> None:
    detected = detect(
        [{"prompt": "a", "completion": "q"}], "r", columns={"prompt": "completion", "completion": "prompt"}
    )
    assert detected.convert({"prompt": "a", "completion": "q"}) == {"messages": [Q, A]}


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        (
            {"text": "body"},
            "columns.text=body: 'body' is no column; there are: instruction, input, output; name one of these",
        ),
        (
            {"instruction": "prompt", "output": "completion"},
            "columns.instruction=prompt: 'prompt' is no column; there are: instruction, input, output; columns maps "
            "our name to the rows' column: state columns.prompt=instruction",
        ),
        (
            {"output": "input"},
            "columns.output=input: there is a column 'output' already; one column of a name is "
            "accepted; give the other one another name as well",
        ),
        (
            {"text": "output", "prompt": "output"},
            "columns.text=output: the column 'output' is named twice; one name for a column is accepted; remove the "
            "other",
        ),
    ],
)
def test_renames_that_do_not_fit_are_refused(columns: dict[str, str], problem: str) -> None:
    assert refused(ALPACA, columns=columns) == f"rows.jsonl: {problem}"


def test_a_later_row_that_a_rename_would_damage_is_refused() -> None:
    detected = detect([{"body": "a"}], "rows.jsonl", columns={"text": "body"})
    with pytest.raises(BadRowError) as refusal:
        detected.convert({"body": "a", "text": "b"})
    assert str(refusal.value) == (
        "columns makes two columns 'text' of this row; accepted: one column of a name; rename or remove one of them"
    )


def test_rows_with_images_are_refused_and_rows_without_are_not() -> None:
    rows: list[Row] = [{"messages": [Q, A], "images": ["1.jpg"]}, {"messages": [Q, A], "images": []}]
    detected = detect(rows, "rows.jsonl")
    with pytest.raises(BadRowError) as refusal:
        detected.convert(rows[0])
    assert str(refusal.value) == (
        "the row has images; accepted: text: images, audio and video are not read; "
        "remove the row, or train it elsewhere"
    )
    assert refusal.value.reason == "images are not read"
    assert detected.convert(rows[1]) == {"messages": [Q, A]}


def test_a_document_may_come_with_the_address_of_its_picture() -> None:
    row: Row = {"text": "a", "image": "https://example.org/a.png"}
    assert detect([row], "rows.jsonl").convert(row) == {"text": "a"}


def test_prompts_read_every_column() -> None:
    detected = detect([{"prompt": "q", "answer": 1}], "rows.jsonl")
    assert detected.read_columns({"prompt": "q", "answer": 1}) == {"prompt", "answer"}
    assert detected.mapping == {"prompt": "prompt", "*": "columns, for a reward function"}
