"""Rows come out by their positions, whatever order and pieces they come in."""

from pathlib import Path

import pyarrow as pa
import pytest

from tasks.data.preparing import reorder


@pytest.mark.parametrize("bytes_at_once", [64, 2**25])
@pytest.mark.parametrize("per_batch", [1, 7, 1000])
def test_rows_come_out_by_their_positions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bytes_at_once: int, per_batch: int
) -> None:
    monkeypatch.setattr(reorder, "_BYTES_AT_ONCE", bytes_at_once)
    positions = [place * 7 % 50 for place in range(50)]
    batches = (
        pa.record_batch({"text": list(map(str, part)), "position": part})
        for part in (positions[start : start + per_batch] for start in range(0, 50, per_batch))
    )
    found = list(reorder.in_order(batches, tmp_path, num_rows=50, num_bytes=1000))
    assert [text for batch in found for text in batch.column("text").to_pylist()] == list(map(str, range(50)))
    assert not list(tmp_path.iterdir())
