"""Pairs without a prompt: what both answers begin with, by TRL's rule."""

import pytest

from lineage.errors import DataError
from tasks.data.formats.detect import detect
from tasks.data.formats.values import BadRowError


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        ("2+2? 4", "2+2? 5", "2+2?"),
        ("The sky is blue.", "The sky is green.", "The sky is"),
        ("Q: 2+2? A: 45", "Q: 2+2? A: 46", "Q: 2+2? A: 4"),
        ("Q:4", "Q:42", "Q:"),
    ],
)
def test_what_two_texts_begin_with_is_the_prompt(chosen: str, rejected: str, prompt: str) -> None:
    row = {"chosen": chosen, "rejected": rejected}
    detected = detect([row], "rows.jsonl")
    assert detected.name == "implicit_preference"
    assert detected.convert(row) == {
        "prompt": [turn("user", prompt)], "chosen": [turn("assistant", chosen[len(prompt) :])],
        "rejected": [turn("assistant", rejected[len(prompt) :])], "kind": None,
    }  # fmt: skip


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
    with pytest.raises(DataError) as refusal:
        detect([row], "rows.jsonl")
    assert f"implicit_preference: it does not read {name}" in str(refusal.value)
    made = detect([row], "rows.jsonl", columns={"prompt": name}).convert(row)
    assert made["prompt"] == [turn("user", "2+2?")]
    with pytest.raises(BadRowError, match=f"^the row has {name}, which implicit_preference does not read"):
        detect([{"chosen": "It is 4", "rejected": "It is 5"}], "rows.jsonl").convert(row)
