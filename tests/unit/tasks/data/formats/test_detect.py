"""How the format of a source is told, set, mapped and refused; no answer and no label of a row is lost unread."""

import pytest

from lineage.errors import ConfigError, DataError
from tasks.data.formats.detect import detect
from tasks.data.formats.turns import BadRowError
from tests.data_command import call as call
from tests.data_command import lines

Row = dict[str, object]
Q: Row = {"role": "user", "content": "q"}
A: Row = {"role": "assistant", "content": "a"}
ALPACA: Row = {"instruction": "q", "input": "i", "output": "a"}
NAMES = (
    "text, messages, prompt_completion, alpaca, sharegpt, contents, responses, reasoning, "
    "multiple_choice, function_calling, preference, implicit_preference, transcript_preference, sharegpt_ranking, "
    "openai_preference, oumi_preference, unpaired, messages_label, prompts"
)


def refused(*sample: Row, columns: dict[str, str] | None = None, configured: str | None = None) -> str:
    with pytest.raises((DataError, ConfigError)) as refusal:
        detect(sample, "rows.jsonl", columns=columns, configured=configured)
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


def test_two_formats_that_explain_a_source_as_well_are_refused_and_either_can_be_set():
    row = {**ALPACA, "text": "t"}
    assert refused(row).startswith("rows.jsonl: 2 formats fit: text (has text: 1 rows from row 1 on), alpaca (has")
    assert detect([row], "rows.jsonl", configured="text").convert(row) == {"text": "t"}
    assert detect([row], "rows.jsonl", configured="alpaca").convert(row).keys() == {"messages"}


def test_what_a_source_without_a_format_lacks_is_named():
    assert refused() == 'rows.jsonl: no rows; give at least one row, such as a line {"text": "..."}'
    assert "no format fits the columns none;" in refused({})
    assert refused({"body": "a"}) == (
        "rows.jsonl: no format fits the columns body; accepted: the columns of one of 19 formats, such as "
        "prompt and completion, messages, or text; name it, such as columns.text=body, "
        "or say which format is meant with format=NAME"
    )
    assert detect([{"body": "a"}], "rows.jsonl", columns={"text": "body"}).convert({"body": "a"}) == {"text": "a"}
    for column in ("text", "body"):  # never to be renamed to itself
        assert refused({column: None}, {column: None}).endswith(
            "; fill them: they are null in all rows looked at, or say which format is meant with format=NAME"
        )


def test_a_source_of_no_format_is_refused_with_what_the_nearest_ones_miss() -> None:
    assert refused({"instruction": "q", "odd": "a", "id": 1}).startswith(
        "rows.jsonl: no format fits the columns instruction, odd, id (alpaca: no field 'output' (fields: id, "
        "instruction, odd)); accepted: the columns of one of "
    )
    assert "(alpaca: no field 'output' (fields: instruction);" in refused(ALPACA, *[{"instruction": "q"}] * 2)


def test_a_set_format_has_to_exist_and_to_be_that_of_a_row() -> None:
    assert refused(ALPACA, configured="alpacca") == (
        f"format=alpacca: no such format; accepted: {NAMES}; did you mean alpaca?"
    )
    assert "columns instruction, input, output (text: no field 'text' (fields: " in refused(ALPACA, configured="text")
    assert detect([{"odd": 1}] * 9 + [ALPACA], "rows.jsonl", configured="alpaca").name == "alpaca"


def test_columns_are_renamed_before_anything_is_reported():
    row = {"context": "c", "question": "q", "answer": "a", "score": 1}
    columns = {"instruction": "question", "input": "context", "output": "answer"}
    detected = detect([row], "rows.jsonl", columns=columns)
    assert detected.convert(row) == {"messages": [{"role": "user", "content": "q\nc"}, A]}
    assert detected.mapping == {
        "question": "the user's turn", "context": "the user's turn, below the instruction",
        "answer": "the assistant's turn",
    }  # fmt: skip
    assert detected.read_columns(row) == {"context", "question", "answer"}
    swapped = {"prompt": "a", "completion": "q"}
    changed = detect([swapped], "r", columns={"prompt": "completion", "completion": "prompt"})
    assert changed.convert(swapped) == {"messages": [Q, A]}
    with pytest.raises(BadRowError) as refusal:  # a later row that a rename would damage
        detect([{"body": "a"}], "rows.jsonl", columns={"text": "body"}).convert({"body": "a", "text": "b"})
    assert refusal.value.found == "columns makes two columns 'text' of this row"


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        (
            {"text": "body"},
            "columns.text=body: 'body' is not a column; there are: instruction, input, output; name one of these",
        ),
        (
            {"instruction": "q"},
            "columns.instruction=q: 'q' is not a column; there are: instruction, input, output; name one of these",
        ),
        (
            {"instruction": "prompt", "output": "completion"},
            "columns.instruction=prompt: 'prompt' is not a column; there are: instruction, input, output; columns maps "
            "our name to the rows' column: set columns.prompt=instruction",
        ),
        (
            {"output": "input"},
            "columns.output=input: there is a column 'output' already; one column of a name is accepted; rename the "
            "other one too",
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


def test_rows_with_images_are_refused_and_rows_without_are_not():
    rows = [{"messages": [Q, A], "images": ["1.jpg"]}, {"messages": [Q, A], "images": []}]
    detected = detect(rows, "rows.jsonl")
    with pytest.raises(BadRowError) as refusal:
        detected.convert(rows[0])
    assert str(refusal.value) == (
        "the row has images; accepted: text, and images in rows of messages: no audio, no video; correct "
        "or remove the row"
    )
    assert refusal.value.reason == "media that is not read"
    assert detected.convert(rows[1]) == {"messages": [Q, A]}
    document = {"text": "a", "image": "https://example.org/a.png"}  # the address of its picture
    assert detect([document], "rows.jsonl").convert(document) == {"text": "a"}


CHAT: Row = {"messages": [Q, A]}
SHAREGPT: Row = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}


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


@pytest.mark.parametrize("name", ["completion", "response", "chosen", "rejected"])
def test_a_prompt_with_an_answer_that_is_null_throughout_is_no_prompt_alone(name: str) -> None:
    row: Row = {"prompt": "q", name: None}
    assert f"no format fits the columns prompt, {name} (" in refused(row, row)
    assert detect([row], "rows.jsonl", configured="prompts").convert(row)["prompt"] == [Q]
    assert detect([{**row, name: "a"}], "r", configured="prompts").convert({**row, name: "a"})["columns"]
    later = detect([{"prompt": "q"}], "rows.jsonl")
    with pytest.raises(
        BadRowError, match=f"^the row has {name}, which prompts does not read; accepted: rows of prompts"
    ):
        later.convert({"prompt": "q", name: "a"})


def test_a_few_labels_are_not_passed_over() -> None:
    rows: list[Row] = [CHAT] * 120 + [{**CHAT, "label": number % 2 == 0} for number in range(80)]
    assert refused(*rows).startswith(
        "rows.jsonl: 2 formats fit: messages (has messages: 120 rows from row 1 on), "
        "messages_label (has messages and label: 80 rows from row 121 on); "
    )
    within: list[Row] = [CHAT] * 9 + [{"messages": [Q, {**A, "label": False}]}]
    assert "2 formats fit: messages (" in refused(*within)


@pytest.mark.parametrize("row", [CHAT, SHAREGPT, {"prompt": "q", "completion": "a"}])
def test_a_label_beyond_the_rows_looked_at_makes_a_bad_row(row: Row) -> None:
    detected = detect([row], "rows.jsonl")
    with pytest.raises(BadRowError) as refusal:
        detected.convert({**row, "label": False})
    assert refusal.value.found == f"the row has label, which {detected.name} does not read"
    assert detected.convert({**row, "label": None}) == detected.convert(row)
    settings = detect([{**row, "label": 0}], "rows.jsonl", configured=detected.name)
    assert settings.convert({**row, "label": 0}) == detected.convert(row)


def test_answers_beside_messages_are_read() -> None:
    row: Row = {"messages": [Q], "chosen": "a", "rejected": "b"}
    assert detect([row], "rows.jsonl").name == "oumi_preference"
    assert "sharegpt: it does not read chosen" in refused({**SHAREGPT, "chosen": "a"})
    both: Row = {"prompt": "q", "completion": "a", "chosen": "a", "rejected": "b"}
    assert "2 formats fit: prompt_completion (" in refused(both)


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_a_row_without_a_prompt_among_rows_that_have_one_is_a_bad_row() -> None:
    rows: list[dict[str, object]] = [{"prompt": "q", "chosen": "It is 4", "rejected": "It is 5"}] * 9
    for bad in ({"chosen": "It is 4", "rejected": "It is 5"}, {**rows[0], "prompt": None}, {**rows[0], "prompt": ""}):
        detected = detect([*rows, bad], "rows.jsonl")
        assert detected.name == "preference"
        with pytest.raises(BadRowError) as refusal:
            detected.convert(bad)
        assert refusal.value.reason == "empty prompt"


@pytest.mark.parametrize("name", ["question", "instruction", "query", "problem", "input"])
def test_a_column_that_may_be_the_prompt_is_to_be_named_so(name: str) -> None:
    row = {name: "2+2?", "chosen": "It is 4", "rejected": "It is 5"}
    guessed = detect([row], "rows.jsonl")
    assert guessed.guess and guessed.guess.overrides == [f"columns.prompt={name}"]
    for detected in (guessed, detect([row], "rows.jsonl", columns={"prompt": name})):
        assert detected.convert(row)["prompt"] == [turn("user", "2+2?")]
    with pytest.raises(BadRowError, match=f"^the row has {name}, which implicit_preference does not read"):
        detect([{"chosen": "It is 4", "rejected": "It is 5"}], "rows.jsonl").convert(row)


def transcript(place: int, answer: str, *, turns: int = 2) -> str:
    """Questions and answers, the last of which is given."""
    message = "".join(
        f"\n\nHuman: What is {place} of {turn}?\n\nIn short?\n\nAssistant: It is {place * turn}.\n- A list:"
        for turn in range(turns - 1)
    )
    return f"{message}\n\nHuman: And what is {place}?\n\nAssistant: {answer}"


def hh(count: int) -> list[Row]:
    return [
        {"chosen": transcript(place, f"{place}, surely.\n"), "rejected": transcript(place, f"No idea of {place}")}
        for place in range(count)
    ]


def test_every_turn_is_a_message_of_its_role_and_the_answers_stand_alone():
    detected = detect(hh(4), "hh.jsonl")
    assert detected.name == "transcript_preference"
    assert detected.evidence == "has chosen and rejected and turns of Human and Assistant: 4 of 4 rows looked at"
    assert detected.mapping == {"chosen": "prompt and chosen", "rejected": "prompt and rejected"}
    made = detected.convert(hh(4)[3])
    assert made == {
        "prompt": [
            {"role": "user", "content": "What is 3 of 0?\n\nIn short?"},
            {"role": "assistant", "content": "It is 0.\n- A list:"},
            {"role": "user", "content": "And what is 3?"},
        ],
        "chosen": [{"role": "assistant", "content": "3, surely."}],
        "rejected": [{"role": "assistant", "content": "No idea of 3"}],
        "kind": None,
    }  # fmt: skip
    for prompt in (transcript(3, ""), "And what is 3?"):  # the transcript may be in the prompt
        row = {**hh(4)[3], "prompt": prompt}
        assert detect([row] * 3, "hh.jsonl").convert(row) == made
    answers = {"prompt": transcript(3, ""), "chosen": " 3, surely.", "rejected": "No idea of 3"}
    assert detect([answers] * 3, "hh.jsonl").convert(answers) == made
    as_one_text = detect(hh(2), "hh.jsonl", configured="implicit_preference").convert(hh(2)[1])
    assert len(as_one_text["prompt"]) == 1


@pytest.mark.parametrize("message", ["Human rights: a short history", "He said:\n\nHuman: who?\n\nAssistant: I"])
def test_texts_that_are_no_transcripts_stay_texts(message: str) -> None:
    rows: list[Row] = [{"prompt": f"{message} {place}", "chosen": "a", "rejected": "b"} for place in range(3)]
    assert detect(rows, "rows.jsonl").name == "preference"
    begun: list[Row] = [{"chosen": f"{message} {place}a", "rejected": f"{message} {place}b"} for place in range(3)]
    assert detect(begun, "rows.jsonl").name == "implicit_preference"


def test_transcripts_among_other_rows_are_no_row_of_their_format() -> None:
    rows: list[Row] = [{"chosen": f"q {place} a", "rejected": f"q {place} b"} for place in range(9)]
    with pytest.raises(DataError, match=r"2 formats fit: implicit_preference .*, transcript_preference"):
        detect([*rows, *hh(2)], "rows.jsonl")


def test_rows_without_one_beginning_are_named_by_file_and_line(call) -> None:  # type: ignore[no-untyped-def]
    rows = hh(40)
    rows[6]["rejected"] = transcript(77, "No idea")
    rows[9]["chosen"] = "Sure."

    code, out, err = call("hh.jsonl", hh_jsonl=lines(rows))

    assert code == 2 and "2 of 40 rows cannot be used" in err
    assert "hh.jsonl:7: chosen and rejected differ from turn 1 on, before their last answers" in err
    assert "hh.jsonl:10: chosen does not begin with 'Human:'" in err
    code, out, err = call("hh.jsonl", "max_bad_rows=2")
    assert code == 0 and "another beginning: 1" in out and "no transcript: 1" in out


def test_prompts_read_every_column():
    detected = detect([{"prompt": "q", "answer": 1}], "rows.jsonl")
    assert detected.read_columns({"prompt": "q", "answer": 1}) == {"prompt", "answer"}
    assert detected.mapping == {"prompt": "prompt", "*": "columns, for a reward function"}


@pytest.mark.parametrize(
    ("rows", "name", "evidence", "bad"),
    [
        ([ALPACA] * 50 + [{"instruction": "q"}, {"odd": 1}] * 25, "alpaca", "has instruction and output: 50 of 100",
         r"^no field 'output' \(fields: instruction\)"),
        ([{"prompt": "q", "completion": "a"}, {"prompt": "q", "completion": None}] * 10, "prompt_completion",
         "has prompt and completion: 20 of 20", r"^completion is null; "),
        ([{**CHAT, "label": False}] * 80 + [{**CHAT, "label": None}] * 120, "messages_label",
         "has messages and label: 200 of 200", r"^label is null; .* set format=messages$"),
    ],
    ids=["of other rows", "null completions", "a table with null labels"],
)  # fmt: skip
def test_bad_rows_among_good_ones_do_not_hide_the_format(rows, name, evidence, bad):
    detected = detect(rows, "rows.jsonl")
    assert (detected.name, detected.evidence) == (name, f"{evidence} rows looked at")
    with pytest.raises(BadRowError, match=bad):
        detected.convert(next(row for row in rows if row != rows[0]))
