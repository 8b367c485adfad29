"""Which rows of a source are taken, and in which order they are written."""

from pathlib import Path

import pytest

from tasks.prepare_data import PrepareText
from tests.prepared import Fields, numbered, prepare, report, texts

METHOD = PrepareText(held_out=0.2)


def taken(directory: Path, out: str = "out") -> set[str]:
    return {*texts(directory, "train", out), *texts(directory, "held_out", out)}


def names(indices: range) -> set[str]:
    return {f"row {index}" for index in indices}


@pytest.mark.parametrize(
    ("split", "indices"),
    [
        ("train[:100]", range(100)),
        ("train[90%:]", range(180, 200)),
        ("train[10%:20%]", range(20, 40)),
        ("train[-30:]", range(170, 200)),
        ("train[50:150]", range(50, 150)),
    ],
)
def test_a_slice_takes_the_rows_that_it_names(tmp_path: Path, split: str, indices: range) -> None:
    metrics = prepare(tmp_path, METHOD, numbered(200), split=split)
    assert taken(tmp_path) == names(indices)
    assert (metrics["rows"], metrics["dropped"]) == (len(indices), 200 - len(indices))
    assert report(tmp_path)["sources"]["rows"]["dropped"] == {"outside the slice": 200 - len(indices)}


def test_bad_rows_outside_the_slice_are_of_no_concern(tmp_path: Path) -> None:
    rows: list[Fields] = [*numbered(100), {"text": None}, {"text": ""}]
    prepare(tmp_path, METHOD, rows, split="train[:100]")
    assert not (tmp_path / "out" / "rejects.jsonl").exists()


def test_a_slice_counts_bad_rows_as_rows(tmp_path: Path) -> None:
    rows: list[Fields] = [{"text": None}, *numbered(100)]
    metrics = prepare(tmp_path, PrepareText(held_out=0.2, max_bad_rows=1), rows, split="train[:50]")
    assert taken(tmp_path) == names(range(49))
    assert metrics["dropped"] == 52


def test_reading_ends_with_the_slice(tmp_path: Path) -> None:
    """Of a file of many gigabytes the first thousand rows cost no more than of any other."""
    prepare(tmp_path, METHOD, numbered(4000, "x" * 1000), split="train[:100]")
    assert report(tmp_path)["sources"]["rows"]["rows_read"] < 3000


def test_a_sample_is_of_its_size_and_another_for_another_seed(tmp_path: Path) -> None:
    metrics = prepare(tmp_path, METHOD, numbered(300), "first", sample_count=120)
    prepare(tmp_path, METHOD, numbered(300), "again", sample_count=120)
    prepare(tmp_path, METHOD, numbered(300), "other", sample_count=120, shuffle_seed=1)
    assert (metrics["rows"], metrics["dropped"]) == (120, 180)
    assert report(tmp_path, "first")["sources"]["rows"]["dropped"] == {"not in the sample": 180}
    assert taken(tmp_path, "first") == taken(tmp_path, "again") != taken(tmp_path, "other")
    assert len(taken(tmp_path, "other")) == 120


def test_a_sample_larger_than_the_source_is_all_of_it(tmp_path: Path) -> None:
    assert prepare(tmp_path, METHOD, numbered(50), sample_count=1000)["rows"] == 50


def test_rows_are_written_as_they_stand_unless_they_are_shuffled(tmp_path: Path) -> None:
    prepare(tmp_path, METHOD, numbered(300), "plain")
    prepare(tmp_path, METHOD, numbered(300), "shuffled", shuffle_seed=0)
    prepare(tmp_path, METHOD, numbered(300), "again", shuffle_seed=0)
    prepare(tmp_path, METHOD, numbered(300), "other", shuffle_seed=1)
    orders = {out: texts(tmp_path, "train", out) for out in ("plain", "shuffled", "again", "other")}
    assert orders["plain"] == sorted(orders["plain"], key=lambda text: int(text.split()[1]))
    assert orders["shuffled"] == orders["again"]
    assert len({tuple(order) for order in orders.values()}) == 3
    assert len({frozenset(order) for order in orders.values()}) == 1


def test_a_buffer_bounds_how_far_a_row_moves(tmp_path: Path) -> None:
    prepare(tmp_path, METHOD, numbered(1000), shuffle_seed=0, shuffle_buffer=10)
    order = [int(text.split()[1]) for text in texts(tmp_path, "train")]
    assert order != sorted(order)
    moved = [max(order[: place + 1]) - index for place, index in enumerate(order)]
    assert 0 < max(moved) <= 10
