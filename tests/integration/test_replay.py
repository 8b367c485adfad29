"""What a data stage makes of the rows that a model was trained on before."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lineage.artifact import Kind, Source
from tasks.context import TrainContext
from tasks.data.kinds import ROW_KINDS, messages_of
from tasks.method import Input
from tasks.prepare_data import PrepareConversations, PreparePreferences, PrepareText
from tests import tiny

REPLAY = PrepareText(held_out=0.2, replay_share=0.25)


def generation(
    directory: Path, name: str, rows: Sequence[Mapping[str, object]], old: str | None = None, method=REPLAY
) -> dict[str, float]:
    file = directory / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    inputs = {"rows": Input(name="rows", kind=Kind.ROWS, fingerprint="", path=file, source=Source(path=str(file)))}
    if old:
        inputs["replay"] = Input(name="source:old", kind=Kind.TEXT, fingerprint=old, path=directory / old)
    return dict(method.run(inputs, TrainContext(output_dir=directory / name, work_dir=directory)))


def numbered(start: int, end: int) -> list[dict[str, str]]:
    return [{"text": f"row {index}"} for index in range(start, end)]


def column(directory: Path, name: str, sides: Sequence[str], column: str = "row_id") -> set[str]:
    tables = [pq.read_table(directory / name / f"{side}.parquet") for side in sides]
    return {str(value) for table in tables for value in table[column].to_pylist()}


def ids(directory: Path, name: str, *sides: str) -> set[str]:
    found = column(directory, name, sides)
    assert len(found) == sum(pq.read_table(directory / name / f"{side}.parquet").num_rows for side in sides)
    return found


def test_new_rows_and_a_share_of_old_ones_are_trained_on(tmp_path: Path) -> None:
    assert "replay_share" not in PrepareText().recipe() and "replay_share" in REPLAY.recipe()
    first = generation(tmp_path, "a", numbered(0, 300))
    assert (first["new_rows"], first["replayed_rows"]) == (300, 0)
    second = generation(tmp_path, "b", numbered(0, 500), old="a")
    assert (second["rows"], second["new_rows"]) == (500, 200)
    assert second["replayed_rows"] / second["train_rows"] == pytest.approx(0.25, abs=0.005)
    old, now = ids(tmp_path, "a", "train"), ids(tmp_path, "b", "train")
    assert len(old & now) == second["replayed_rows"]
    assert ids(tmp_path, "b", "train", "resting") > old
    report = json.loads((tmp_path / "b" / "report.json").read_text())
    assert {name: report[name] for name in second} == second


def test_a_row_that_rested_is_old_in_every_later_generation_and_what_was_held_out_stays_so(tmp_path: Path) -> None:
    """Also where the source holds it no longer, and each generation draws anew."""
    generation(tmp_path, "a", numbered(0, 300))
    generation(tmp_path, "b", numbered(300, 500), old="a")
    third = generation(tmp_path, "c", numbered(0, 600), old="b")
    assert third["new_rows"] == 100
    sides = ("train", "held_out", "resting")
    assert ids(tmp_path, "c", *sides) == ids(tmp_path, "b", *sides) | ids(tmp_path, "c", "train", "held_out")
    assert len(ids(tmp_path, "c", *sides)) == 600
    again = {name: ids(tmp_path, name, "train") & ids(tmp_path, "a", "train") for name in ("b", "c")}
    assert again["c"] and not again["c"] <= again["b"]
    assert ids(tmp_path, "a", "held_out") < ids(tmp_path, "b", "held_out")
    assert not ids(tmp_path, "b", "held_out") & ids(tmp_path, "b", "train", "resting")


def test_few_old_rows_or_those_of_a_set_without_new_ones_are_all_replayed(tmp_path: Path) -> None:
    old = generation(tmp_path, "few", numbered(0, 20))
    made = generation(tmp_path, "many", numbered(0, 500), old="few")
    assert made["replayed_rows"] == old["train_rows"]
    assert ids(tmp_path, "many", "resting") == set()
    same = generation(tmp_path, "same", numbered(0, 20), old="few")
    assert (same["new_rows"], same["replayed_rows"]) == (0, old["train_rows"])
    for side in ("train", "held_out"):
        assert ids(tmp_path, "few", side) == ids(tmp_path, "same", side)


def test_a_copy_of_an_old_row_goes_where_that_one_is(tmp_path: Path) -> None:
    grouped = [{**row, "group": f"first {index // 10}"} for index, row in enumerate(numbered(0, 200))]
    generation(tmp_path, "a", grouped)
    regrouped = [{**row, "group": f"second {index // 10}"} for index, row in enumerate(numbered(0, 200))]
    made = generation(tmp_path, "b", [*regrouped, *regrouped, {"text": "new"}], old="a")
    assert (made["new_rows"], made["duplicates"]) == (201, 200)
    contents = {side: {row.partition("-")[0] for row in ids(tmp_path, "b", side)} for side in ("train", "held_out")}
    assert not contents["train"] & contents["held_out"]


def test_groups_and_the_pairs_of_a_prompt_keep_their_side(tmp_path: Path) -> None:
    """Also after a generation that replayed nothing."""
    grouped = [{**row, "group": str(index % 40)} for index, row in enumerate(numbered(0, 400))]
    generation(tmp_path, "a", grouped[:200], method=replace(REPLAY, replay_share=None))
    generation(tmp_path, "b", grouped, old="a")
    group = {row["text"]: row["group"] for row in grouped}
    train, held_out = (
        {group[text] for text in column(tmp_path, "b", [side], "text")} for side in ("train", "held_out")
    )
    assert held_out and not train & held_out

    method = PreparePreferences(held_out=0.3, replay_share=0.5)
    pairs = [{"prompt": f"q{index % 30}", "chosen": f"good {index}", "rejected": "bad"} for index in range(120)]
    generation(tmp_path, "c", pairs[:60], method=method)
    generation(tmp_path, "d", pairs, old="c", method=method)
    held_out = column(tmp_path, "d", ["held_out"], "prompt")
    assert held_out and not held_out & column(tmp_path, "d", ["train", "resting"], "prompt")


def test_old_rows_of_an_earlier_version_come_out_in_the_columns_of_now(tmp_path: Path) -> None:
    """Messages once had a role and a content, and nothing else."""
    (tmp_path / "a").mkdir()
    turns = [{"role": "user", "content": "old"}, {"role": "assistant", "content": "a"}]
    for side, row_id in (("train", "0" * 16), ("held_out", "1" * 16)):
        table = pa.Table.from_pylist([{"row_id": row_id, "messages": turns}], schema=tiny.CONVERSATIONS_SCHEMA)
        pq.write_table(table, tmp_path / "a" / f"{side}.parquet")
    rows = [{"messages": [{"role": "user", "content": f"q{index}"}, turns[1]]} for index in range(30)]
    made = generation(tmp_path, "b", rows, old="a", method=PrepareConversations(held_out=0.2, replay_share=0.03))
    assert made["replayed_rows"] == 1
    for side, row_id in (("train", "0" * 16), ("held_out", "1" * 16)):
        table = pq.read_table(tmp_path / "b" / f"{side}.parquet")
        assert table.schema.equals(ROW_KINDS[Kind.CONVERSATIONS].schema)
        last = table.to_pylist()[-1]
        assert (last["row_id"], messages_of(last["messages"]), last["tools"]) == (row_id, turns, None)
