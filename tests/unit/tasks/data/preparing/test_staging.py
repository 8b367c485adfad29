"""Prepared rows: refused by name, written in order, read back in bounded parts."""

from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lineage.artifact import Kind, Source
from lineage.errors import DataError
from tasks.data import kinds as ordered_pool
from tasks.data.kinds import row_batches
from tasks.data.preparing import convert_rows as staging
from tasks.data.preparing.convert_rows import ConvertRows, detect_source
from tasks.prepare_data import PrepareConversations, PreparePreferences, PrepareText
from tests.prepared import SIDES, numbered, prepare, prepare_slots, report, side


def test_near_duplicates_are_listed_by_the_ids_that_rows_have_in_the_output(tmp_path: Path) -> None:
    long = [" ".join(f"word{index}" for index in range(start, start + 100)) for start in range(0, 4000, 100)]
    method = PrepareText(held_out=0.1, proportions={"rows": 0.7, "more": 0.3})
    rows = [{"text": text + end} for end in ("", " end") for text in long]
    prepare_slots(tmp_path, method, {"rows": ([*rows, *rows], {}), "more": (numbered(60), {})})
    written = {row["row_id"] for name in SIDES for row in side(tmp_path, name)}
    pairs = pq.read_table(tmp_path / "out" / "near_duplicates.parquet").to_pylist()
    assert pairs and {pair[name] for pair in pairs for name in ("row_id", "other_row_id")} <= written


def test_lengths_are_those_of_all_rows_that_were_written(tmp_path: Path) -> None:
    method = PrepareText(held_out=0.2, proportions={"rows": 0.5, "more": 0.5}, stopping="all_exhausted")
    metrics = prepare_slots(tmp_path, method, {"rows": (numbered(90), {}), "more": (numbered(30, "other"), {})})
    assert metrics["repeated_rows"]
    lengths = report(tmp_path)["lengths"]
    assert lengths["rows"] == metrics["train_rows"] + metrics["held_out_rows"]  # type: ignore[index]


def test_rows_behind_a_thousand_that_cannot_be_read_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text((("x" * 1023) + "\n") * 3000 + '{"text": "a"}\n', encoding="utf-8")
    opened = detect_source(Source(path=str(path)))
    detected, chunks = opened.detected, opened.chunks
    assert detected is None

    convert = ConvertRows(kind=Kind.TEXT, seed=0, system_prompt=None, prompt_template=None, detected=detected)
    rejects = [reject for chunk in chunks for _, reject in convert(chunk).rejects]

    assert len(rejects) == 3001
    assert (rejects[-1].where, rejects[-1].reason) == (f"{path}:3001", "format not known")
    assert rejects[-1].problem == (
        "its format is not known, since no row before it can be read; accepted: rows of one format; "
        "correct the first rows"
    )


CALL = {"name": "f", "arguments": {"x": 1, "y": None}}  # as `datasets` writes JSON lines: with the keys of all calls
TOOL = {
    "name": "f",
    "strict": None,
    "parameters": {"properties": {"x": {"type": "integer", "default": None}, "z": None}},
}


def test_nulls_beside_calls_and_tools_are_no_nulls_of_other_calls(tmp_path: Path) -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": '{"y": null}'}]}
    result, answer = {"role": "tool", "content": "r", "name": None}, {"role": "assistant", "content": "a"}
    tools = [{"name": "f", "parameters": {"default": None}}]
    rows = [
        {
            "input": {"messages": [{"role": "user", "content": f"q{n}", "tool_calls": None}], "tools": tools},
            "preferred_output": [called, result, answer],
            "non_preferred_output": [{"role": "assistant", "content": "b", "refusal": None}],
        }
        for n in range(9)
    ]
    prepare_slots(tmp_path, PreparePreferences(held_out=0.3), {"rows": (rows, {})})
    assert '"y": null' in str(side(tmp_path, SIDES[0])[0]["chosen"])


@pytest.mark.parametrize(("tool_nulls", "kept"), [(None, None), ("drop", False), ("keep", True)])
@pytest.mark.parametrize("part", ["messages", "tools"])
def test_nulls_of_other_calls_are_dropped_and_counted_or_kept_as_is_reported(
    tmp_path: Path, tool_nulls: Literal["drop", "keep"] | None, kept: bool | None, part: str
) -> None:
    answer = {"role": "assistant", "content": "", "tool_calls": [CALL]} if part == "messages" else "a"
    more = {"tools": [TOOL]} if part == "tools" else {}
    lines = [{"prompt": str(number), "completion": answer, **more} for number in range(9)]
    method = PrepareConversations(held_out=0.3, tool_nulls=tool_nulls)
    if kept is None:
        message = r"(y|strict) is null, as `datasets` .* tool_nulls=drop, or .* tool_nulls=keep"
        with pytest.raises(DataError, match=message):
            prepare_slots(tmp_path, method, {"rows": (lines, {})})
        return
    prepare_slots(tmp_path, method, {"rows": (lines, {})})
    row = side(tmp_path, SIDES[0])[0]
    text = str(row["tools"] if part == "tools" else row["messages"])
    assert ("null" in text, '"x": ' in text) == (kept, True)
    remarks = report(tmp_path)["sources"]["rows"]["remarks"]  # type: ignore[index]
    assert remarks.get("nulls dropped from calls and tools", {}).get("count") == (None if kept else 9)


@pytest.mark.parametrize(("bytes_at_once", "borders"), [(64, [3, 4, 20]), (2**25, [])])
@pytest.mark.parametrize("per_batch", [1, 7, 1000])
def test_rows_come_out_by_their_positions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bytes_at_once: int, borders: list[int], per_batch: int
) -> None:
    monkeypatch.setattr(staging, "BYTES_AT_ONCE", bytes_at_once)
    positions = [place * 7 % 50 for place in range(50)]
    batches = (
        pa.record_batch({"text": list(map(str, part)), "position": part})
        for part in (positions[start : start + per_batch] for start in range(0, 50, per_batch))
    )
    found = list(staging.sorted_rows(batches, tmp_path, borders))
    assert [text for batch in found for text in batch.column("text").to_pylist()] == list(map(str, range(50)))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("per_group", [7, 100])
@pytest.mark.parametrize("longest", [0, 500])
def test_parts_are_bounded_by_rows_and_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, per_group: int, longest: int
) -> None:
    monkeypatch.setattr(ordered_pool, "MAX_BYTES", 1000)
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
    monkeypatch.setattr(ordered_pool, "MAX_BYTES", 1000)
    texts = ["short", "x" * 5000, "short", "short"]
    pq.write_table(pa.table({"text": texts}), tmp_path / "rows.parquet")
    found = list(row_batches(tmp_path / "rows.parquet", 10))
    assert [part.column("text").to_pylist() for part in found if part.nbytes > 1000] == [["x" * 5000]]
    assert all(part.get_total_buffer_size() < part.nbytes + 200 for part in found)


def test_a_file_without_rows_has_no_parts(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "rows.parquet")
    assert list(row_batches(tmp_path / "rows.parquet", 10)) == []


def test_of_no_rows_no_lengths_are_reported(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="leaves none"):
        prepare(tmp_path, PrepareText(max_bad_rows=3), [{"text": ""}] * 3)
    assert report(tmp_path)["lengths"] is None
