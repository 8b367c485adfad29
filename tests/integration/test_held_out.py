"""How many rows are held out, and that no row changes its side as rows are added."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lineage.errors import ConfigError, DataError
from tasks.prepare_data import PrepareConversations, PrepareText
from tests.prepared import SIDES, Fields, numbered, prepare, report, side, texts


def test_a_count_holds_out_as_many_rows_and_leaves_as_many_between_the_sides(tmp_path: Path) -> None:
    metrics = prepare(tmp_path, PrepareText(held_out=50), numbered(1000))
    assert metrics["held_out_rows"] == 50
    assert 20 <= metrics["dropped"] <= 90  # as many as fall between t and 2 t
    assert metrics["rows"] == 1000 - metrics["dropped"] == 50 + metrics["train_rows"]
    assert report(tmp_path)["sources"]["rows"]["dropped"] == {"between the sides": metrics["dropped"]}


def test_a_count_holds_out_whole_groups(tmp_path: Path) -> None:
    rows = [{"text": f"row {index}", "group": f"g{index % 50}"} for index in range(500)]
    metrics = prepare(tmp_path, PrepareText(held_out=25), rows)
    group = {row["text"]: row["group"] for row in rows}
    held_out, train = ({group[text] for text in texts(tmp_path, name)} for name in ("held_out", "train"))
    assert metrics["held_out_rows"] == 30
    assert len(held_out) == 3 and not held_out & train


@pytest.mark.parametrize("held_out", [0.1, 50])
def test_no_row_changes_its_side_as_a_set_grows(tmp_path: Path, held_out: float) -> None:
    for count in (500, 550, 990):
        prepare(tmp_path, PrepareText(held_out=held_out), numbered(count), str(count))
    before, *grown = (
        {name: set(texts(tmp_path, name, out)) for name in ("train", "held_out")} for out in ("500", "550", "990")
    )
    for after in grown:
        assert not before["held_out"] & after["train"]
        assert not before["train"] & after["held_out"]
        assert before["train"] <= after["train"]


def test_no_row_is_held_out_after_it_was_trained_on_however_much_a_set_grows(tmp_path: Path) -> None:
    for count in (500, 2500):
        prepare(tmp_path, PrepareText(held_out=25), numbered(count), str(count))
    assert not set(texts(tmp_path, "train", "500")) & set(texts(tmp_path, "held_out", "2500"))


def test_a_count_that_leaves_nothing_to_train_on_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^held_out=150 of \d+ rows leaves none to train on; give more rows"):
        prepare(tmp_path, PrepareText(held_out=150), numbered(150))


@pytest.mark.parametrize("held_out", [0, -1, 0.0, 1.0, -0.5, True])
def test_what_is_neither_share_nor_count_is_refused(held_out: float) -> None:
    with pytest.raises(ConfigError) as refusal:
        PrepareText(held_out=held_out)
    assert str(refusal.value) == (
        f"held_out={held_out}: a share of the rows above 0.0 and below 1.0, or a count of them from 1 on, is accepted; "
        "state held_out=0.05 or held_out=200"
    )


def test_a_count_cannot_go_with_replay() -> None:
    with pytest.raises(ConfigError, match=r"^held_out=50 and replay_share=0\.3: .*give a share: held_out=0\.05$"):
        PrepareText(held_out=50, replay_share=0.3)


def test_copies_of_a_row_are_on_one_side_whatever_their_groups(tmp_path: Path) -> None:
    rows = [{"text": f"row {index % 100}", "group": f"g{index}"} for index in range(300)]
    metrics = prepare(tmp_path, PrepareText(held_out=0.5), rows)
    assert metrics["duplicates"] == 200
    assert not set(texts(tmp_path, "train")) & set(texts(tmp_path, "held_out"))
    ids = [str(row["row_id"]) for name in ("train", "held_out") for row in side(tmp_path, name)]
    assert len(set(ids)) == 300
    assert sum(row_id.endswith("-2") for row_id in ids) == 100


def test_a_copy_that_is_not_where_its_group_is_is_told(tmp_path: Path) -> None:
    rows = [{"text": f"row {index % 100}", "group": f"g{index}"} for index in range(300)]
    prepare(tmp_path, PrepareText(held_out=0.5), rows)
    grouped = [{"text": f"row {index % 100}", "group": f"g{index % 100}"} for index in range(300)]
    prepare(tmp_path, PrepareText(held_out=0.5), grouped, "one group")
    found = report(tmp_path)["sources"]["rows"]["remarks"]  # type: ignore[index]
    told = found["away from its group, beside the row that it is a copy of"]
    assert 60 <= told["count"] <= 140
    written = {row["row_id"] for name in ("train", "held_out") for row in side(tmp_path, name)}
    assert len(told["places"]) == 5 and {*told["places"]} <= written
    assert report(tmp_path, "one group")["sources"]["rows"]["remarks"] == {}  # type: ignore[index]


QUESTIONS = {
    "prompt_completion": lambda question, answer: {"prompt": question, "completion": answer},
    "alpaca": lambda question, answer: {"instruction": question, "output": answer},
    "messages": lambda question, answer: {
        "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    },
}


@pytest.mark.parametrize("row", QUESTIONS.values(), ids=QUESTIONS)
def test_all_answers_to_one_question_are_on_one_side(tmp_path: Path, row: Callable[[str, str], Fields]) -> None:
    prepare(tmp_path, PrepareConversations(held_out=0.3), [row(f"q{index % 40}", f"a{index}") for index in range(200)])
    train, held_out = ({found["messages"][0]["content"] for found in side(tmp_path, name)} for name in SIDES)  # type: ignore[index]
    assert len(train) + len(held_out) == 40 and train and held_out


def test_a_system_prompt_moves_no_row(tmp_path: Path) -> None:
    rows = [QUESTIONS["messages"](f"q{index}", "a") for index in range(100)]
    for out, prompt in (("without", None), ("with", "Be brief.")):
        prepare(tmp_path, PrepareConversations(held_out=0.3, system_prompt=prompt), rows, out)
    without, given = (
        {row["messages"][-2]["content"] for row in side(tmp_path, "held_out", out)}  # type: ignore[index]
        for out in ("without", "with")
    )
    assert without == given
