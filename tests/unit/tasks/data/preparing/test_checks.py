"""What is said of rows is said of those that were written."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from lineage.errors import DataError
from tasks.prepare_data import PrepareText
from tests.prepared import SIDES, numbered, prepare, prepare_slots, report, side


def test_near_duplicates_are_listed_by_the_ids_that_rows_have_in_the_output(tmp_path: Path) -> None:
    long = [" ".join(f"word{index}" for index in range(start, start + 100)) for start in range(0, 4000, 100)]
    method = PrepareText(held_out=0.1, proportions={"rows": 0.7, "more": 0.3})
    rows = [{"text": text + end} for end in ("", " end") for text in long]
    prepare_slots(tmp_path, method, {"rows": ([*rows, *rows], {}), "more": (numbered(60), {})})
    written = {row["row_id"] for name in SIDES for row in side(tmp_path, name)}
    pairs = pq.read_table(tmp_path / "out" / "near_duplicates.parquet").to_pylist()
    assert pairs and {pair[name] for pair in pairs for name in ("row_id", "other_row_id")} <= written


def test_of_no_rows_no_lengths_are_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="leaves none"):
        prepare(tmp_path, PrepareText(max_bad_rows=3), [{"text": ""}] * 3)
    assert report(tmp_path)["lengths"] is None


def test_lengths_are_those_of_all_rows_that_were_written(tmp_path: Path) -> None:
    method = PrepareText(held_out=0.2, proportions={"rows": 0.5, "more": 0.5}, stopping="all_exhausted")
    metrics = prepare_slots(tmp_path, method, {"rows": (numbered(90), {}), "more": (numbered(30, "other"), {})})
    assert metrics["repeated_rows"]
    lengths = report(tmp_path)["lengths"]
    assert lengths["rows"] == metrics["train_rows"] + metrics["held_out_rows"]  # type: ignore[index]
