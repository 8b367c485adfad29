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


def ids(directory: Path, name: str, *sides: str) -> set[str]:
    tables = [pq.read_table(directory / name / f"{side}.parquet") for side in sides]
    found = [row_id for table in tables for row_id in table["row_id"].to_pylist()]
    assert len(found) == len(set(found))
    return set(found)


def test_a_data_stage_without_replay_is_what_it_was() -> None:
    assert "replay_share" not in PrepareText().recipe()
    assert "replay_share" in REPLAY.recipe()


def test_new_rows_and_a_share_of_old_ones_are_trained_on(tmp_path: Path) -> None:
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


def test_what_was_held_out_stays_so_and_is_measured_again(tmp_path: Path) -> None:
    generation(tmp_path, "a", numbered(0, 300))
    generation(tmp_path, "b", numbered(200, 500), old="a")
    assert ids(tmp_path, "a", "held_out") < ids(tmp_path, "b", "held_out")
    assert not ids(tmp_path, "b", "held_out") & ids(tmp_path, "b", "train", "resting")


def test_a_row_that_rested_is_old_in_every_later_generation(tmp_path: Path) -> None:
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


def test_few_old_rows_are_all_replayed_and_counted(tmp_path: Path) -> None:
    old = generation(tmp_path, "a", numbered(0, 20))
    made = generation(tmp_path, "b", numbered(0, 500), old="a")
    assert made["replayed_rows"] == old["train_rows"]
    assert ids(tmp_path, "b", "resting") == set()


def test_where_nothing_is_new_all_old_rows_are_replayed(tmp_path: Path) -> None:
    old = generation(tmp_path, "a", numbered(0, 300))
    made = generation(tmp_path, "b", numbered(0, 300), old="a")
    assert (made["new_rows"], made["replayed_rows"]) == (0, old["train_rows"])
    for side in ("train", "held_out"):
        assert ids(tmp_path, "a", side) == ids(tmp_path, "b", side)


def test_a_copy_of_an_old_row_goes_where_that_one_is(tmp_path: Path) -> None:
    grouped = [{**row, "group": f"first {index // 10}"} for index, row in enumerate(numbered(0, 200))]
    generation(tmp_path, "a", grouped)
    regrouped = [{**row, "group": f"second {index // 10}"} for index, row in enumerate(numbered(0, 200))]
    made = generation(tmp_path, "b", [*regrouped, *regrouped, {"text": "new"}], old="a")
    assert (made["new_rows"], made["duplicates"]) == (201, 200)
    contents = {side: {row.partition("-")[0] for row in ids(tmp_path, "b", side)} for side in ("train", "held_out")}
    assert not contents["train"] & contents["held_out"]


def test_a_group_keeps_its_side_after_a_generation_that_replayed_nothing(tmp_path: Path) -> None:
    grouped = [{**row, "group": str(index % 40)} for index, row in enumerate(numbered(0, 400))]
    generation(tmp_path, "a", grouped[:200], method=replace(REPLAY, replay_share=None))
    generation(tmp_path, "b", grouped, old="a")
    group = {row["text"]: row["group"] for row in grouped}
    sides = [
        {group[text] for text in pq.read_table(tmp_path / "b" / f"{side}.parquet")["text"].to_pylist()}
        for side in ("train", "held_out")
    ]
    assert sides[1] and not sides[0] & sides[1]


def test_the_pairs_of_an_old_prompt_keep_their_side(tmp_path: Path) -> None:
    method = PreparePreferences(held_out=0.3, replay_share=0.5)
    pairs = [{"prompt": f"q{index % 30}", "chosen": f"good {index}", "rejected": "bad"} for index in range(120)]
    generation(tmp_path, "a", pairs[:60], method=method)
    generation(tmp_path, "b", pairs, old="a", method=method)
    prompts = {
        side: {str(row["prompt"]) for row in pq.read_table(tmp_path / "b" / f"{side}.parquet").to_pylist()}
        for side in ("train", "held_out", "resting")
    }
    assert prompts["held_out"] and not prompts["held_out"] & (prompts["train"] | prompts["resting"])


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
