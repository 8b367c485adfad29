"""Prepared rows come back in order, in parts that are bounded by rows and by bytes."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.data import ordered_pool as batches
from tasks.data.ordered_pool import row_batches


@pytest.mark.parametrize("per_group", [7, 100])
@pytest.mark.parametrize("longest", [0, 500])
def test_parts_are_bounded_by_rows_and_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, per_group: int, longest: int
) -> None:
    monkeypatch.setattr(batches, "MAX_BYTES", 1000)
    texts = [f"{place} {'x' * (longest if place % 20 > 15 else 3)}" for place in range(100)]
    rows = pa.table({"row_id": list(map(str, range(100))), "text": texts})
    pq.write_table(rows, tmp_path / "rows.parquet", row_group_size=per_group)
    found = list(row_batches(tmp_path / "rows.parquet", 10, ["text", "tools"]))
    assert [text for part in found for text in part.column("text").to_pylist()] == texts
    assert all(part.schema.names == ["text"] and len(part) <= 10 and part.nbytes <= 1000 for part in found)
    assert len(found) < 60


def test_a_row_above_the_bound_comes_alone_and_brings_nothing_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "MAX_BYTES", 1000)
    texts = ["short", "x" * 5000, "short", "short"]
    pq.write_table(pa.table({"text": texts}), tmp_path / "rows.parquet")
    found = list(row_batches(tmp_path / "rows.parquet", 10))
    assert [part.column("text").to_pylist() for part in found if part.nbytes > 1000] == [["x" * 5000]]
    assert all(part.get_total_buffer_size() < part.nbytes + 200 for part in found)


def test_a_file_without_rows_has_no_parts(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "rows.parquet")
    assert list(row_batches(tmp_path / "rows.parquet", 10)) == []
