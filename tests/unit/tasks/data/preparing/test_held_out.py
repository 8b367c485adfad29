"""How many rows are held out, and that no row changes its side as rows are added."""

from pathlib import Path

import pytest

from lineage.errors import ConfigError, DataError
from tasks.prepare_data import PrepareText
from tests.prepared import numbered, prepare, report, side, texts


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
@pytest.mark.parametrize("grown", [1100, 1500, 1990])
def test_no_row_is_trained_on_after_it_was_held_out_or_the_other_way(
    tmp_path: Path, held_out: float, grown: int
) -> None:
    method = PrepareText(held_out=held_out)
    prepare(tmp_path, method, numbered(1000), "before")
    prepare(tmp_path, method, numbered(grown), "after")
    before, after = (
        {name: set(texts(tmp_path, name, out)) for name in ("train", "held_out")} for out in ("before", "after")
    )
    assert not before["held_out"] & after["train"]
    assert not before["train"] & after["held_out"]
    assert before["train"] <= after["train"]


@pytest.mark.parametrize("count", [150, 200])
def test_a_count_that_leaves_nothing_to_train_on_is_refused(tmp_path: Path, count: int) -> None:
    with pytest.raises(DataError, match=rf"^held_out={count} of \d+ rows leaves none to train on; give more rows"):
        prepare(tmp_path, PrepareText(held_out=count), numbered(150))


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
