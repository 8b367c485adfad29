"""Rows as Anthropic's HH has them are turns, and not one text in a chat template."""

import pytest

from lineage.errors import DataError
from tasks.data.formats.detect import detect
from tests.data_command import call as call  # a fixture
from tests.data_command import lines

Row = dict[str, object]


def transcript(place: int, answer: str, *, turns: int = 2) -> str:
    """Questions and answers, the last of which is given."""
    said = "".join(
        f"\n\nHuman: What is {place} of {turn}?\n\nIn short?\n\nAssistant: It is {place * turn}.\n- A list:"
        for turn in range(turns - 1)
    )
    return f"{said}\n\nHuman: And what is {place}?\n\nAssistant: {answer}"


def hh(count: int) -> list[Row]:
    return [
        {"chosen": transcript(place, f"{place}, surely.\n"), "rejected": transcript(place, f"No idea of {place}")}
        for place in range(count)
    ]


def test_every_turn_is_a_message_of_its_role_and_the_answers_stand_alone() -> None:
    detected = detect(hh(4), "hh.jsonl")
    assert detected.name == "transcript_preference"
    assert detected.evidence == "has chosen and rejected and turns of Human and Assistant: 4 of 4 rows looked at"
    assert detected.mapping == {"chosen": "prompt and chosen", "rejected": "prompt and rejected"}
    assert detected.convert(hh(4)[3]) == {
        "prompt": [
            {"role": "user", "content": "What is 3 of 0?\n\nIn short?"},
            {"role": "assistant", "content": "It is 0.\n- A list:"},
            {"role": "user", "content": "And what is 3?"},
        ],
        "chosen": [{"role": "assistant", "content": "3, surely."}],
        "rejected": [{"role": "assistant", "content": "No idea of 3"}],
        "kind": None,
    }  # fmt: skip


def test_the_transcript_may_be_in_the_prompt() -> None:
    rows: list[Row] = [{"prompt": transcript(place, ""), "chosen": " yes", "rejected": " no"} for place in range(3)]
    detected = detect(rows, "hh.jsonl")
    assert detected.name == "transcript_preference"
    made = detected.convert(rows[0])
    assert [turn["role"] for turn in made["prompt"]] == ["user", "assistant", "user"]  # type: ignore[attr-defined]
    assert made["chosen"] == [{"role": "assistant", "content": "yes"}]
    whole: list[Row] = [{**row, "prompt": transcript(place, "")} for place, row in enumerate(hh(3))]
    assert detect(whole, "hh.jsonl").convert(whole[1]) == detect(hh(3), "hh.jsonl").convert(hh(3)[1])
    plain: list[Row] = [{**row, "prompt": f"And what is {place}?"} for place, row in enumerate(hh(3))]
    assert detect(plain, "hh.jsonl").convert(plain[1]) == detect(hh(3), "hh.jsonl").convert(hh(3)[1])


def test_a_stated_format_reads_them_as_one_text() -> None:
    made = detect(hh(2), "hh.jsonl", stated="implicit_preference").convert(hh(2)[1])
    assert len(made["prompt"]) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize("said", ["Human rights: a short history", "He said:\n\nHuman: who?\n\nAssistant: I"])
def test_texts_that_are_no_transcripts_stay_texts(said: str) -> None:
    rows: list[Row] = [{"prompt": f"{said} {place}", "chosen": "a", "rejected": "b"} for place in range(3)]
    assert detect(rows, "rows.jsonl").name == "preference"
    begun: list[Row] = [{"chosen": f"{said} {place}a", "rejected": f"{said} {place}b"} for place in range(3)]
    assert detect(begun, "rows.jsonl").name == "implicit_preference"


def test_transcripts_among_other_rows_are_no_row_of_their_format() -> None:
    rows: list[Row] = [{"chosen": f"q {place} a", "rejected": f"q {place} b"} for place in range(9)]
    with pytest.raises(DataError, match=r"two formats fit: implicit_preference .*, transcript_preference"):
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
