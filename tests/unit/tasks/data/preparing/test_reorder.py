"""Rows come out by their positions, whatever order and pieces they come in."""

from pathlib import Path

import pyarrow as pa
import pytest

from tasks.data.preparing import write
from tasks.prepare_data import PrepareText
from tests.prepared import numbered, prepare


@pytest.mark.parametrize(("bytes_at_once", "borders"), [(64, [3, 4, 20]), (2**25, [])])
@pytest.mark.parametrize("per_batch", [1, 7, 1000])
def test_rows_come_out_by_their_positions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bytes_at_once: int, borders: list[int], per_batch: int
) -> None:
    monkeypatch.setattr(write, "BYTES_AT_ONCE", bytes_at_once)
    positions = [place * 7 % 50 for place in range(50)]
    batches = (
        pa.record_batch({"text": list(map(str, part)), "position": part})
        for part in (positions[start : start + per_batch] for start in range(0, 50, per_batch))
    )
    found = list(write.in_order(batches, tmp_path, borders))
    assert [text for batch in found for text in batch.column("text").to_pylist()] == list(map(str, range(50)))
    assert not list(tmp_path.iterdir())


def test_rows_are_parted_by_their_bytes_and_not_by_their_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parted, in_order = [], write.in_order
    monkeypatch.setattr(write, "BYTES_AT_ONCE", 10_000)
    monkeypatch.setattr(
        write, "in_order", lambda rows, at, borders: parted.append(borders) or in_order(rows, at, borders)
    )
    long = [{"text": f"{number} {'x' * 5000}"} for number in range(10)]
    prepare(tmp_path, PrepareText(held_out=0.3), [*long, *numbered(100)], shuffle_seed=0, shuffle_buffer=1)
    (borders,) = parted
    assert len(borders) == 5 and borders[-1] < 15
