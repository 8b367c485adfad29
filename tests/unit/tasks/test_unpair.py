"""Pairs are split into single answers: in their order, on their side, and none is lost."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from flows.declare.config import load_pipeline
from lineage.artifact import Kind, Source
from lineage.errors import ConfigError, DataError
from tasks.context import TrainContext
from tasks.data.kinds import PREFERENCES, UNPAIRED
from tasks.data.preparing.convert_rows import detect_source
from tasks.recipe import Input
from tasks.unpair import Unpair
from tests import tiny
from tests.prepared import named

TOOLS = '[{"type": "function"}]'
ADDED = ("+stage@stages.unpaired.method=unpair", "stages.unpaired.inputs.pairs=preferences")
KTO = ("+stage@stages.kto.method=kto", "stages.kto.inputs.policy=sft")


def run(tmp_path: Path, train: list[dict[str, object]], held_out: list[dict[str, object]]) -> dict[str, float]:
    import pyarrow as pa

    source = tmp_path / "pairs"
    source.mkdir()
    for side, rows in (("train", train), ("held_out", held_out)):
        pq.write_table(pa.Table.from_pylist(rows, schema=PREFERENCES.schema), source / f"{side}.parquet")
    given = Input(name="pairs", kind=Kind.PREFERENCES, fingerprint="f", path=source)
    context = TrainContext(output_dir=tmp_path / "out", work_dir=tmp_path)
    return named(Unpair(), {"pairs": given}, Unpair().run({"pairs": given}, context))


def test_each_pair_is_two_rows_that_follow_each_other(tmp_path: Path) -> None:
    pairs = [{**row, "tools": TOOLS if index else None} for index, row in enumerate(tiny.preference_rows(3))]
    metrics = run(tmp_path, pairs[:2], pairs[2:])
    assert metrics == {"rows": 6, "train_rows": 4, "held_out_rows": 2}
    table = pq.read_table(tmp_path / "out" / "train.parquet")
    assert table.schema.equals(UNPAIRED.schema)
    rows = table.to_pylist()
    assert [row["row_id"] for row in rows] == ["p0-chosen", "p0-rejected", "p1-chosen", "p1-rejected"]
    assert [row["label"] for row in rows] == [True, False] * 2
    for row, (pair, side) in zip(
        rows, [(each, side) for each in pairs[:2] for side in ("chosen", "rejected")], strict=True
    ):
        contents = [[message["content"] for message in messages] for messages in (row["prompt"], row["completion"])]
        assert contents == [[message["content"] for message in pair[name]] for name in ("prompt", side)]  # type: ignore[attr-defined]
        assert row["tools"] == pair["tools"]
    held_out = pq.read_table(tmp_path / "out" / "held_out.parquet").to_pylist()
    assert [row["row_id"] for row in held_out] == ["p2-chosen", "p2-rejected"]


def test_without_a_training_pair_there_is_nothing_to_split(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="'pairs' has no training pair"):
        run(tmp_path, [], tiny.preference_rows(1))


def test_a_plan_feeds_kto_from_preferences() -> None:
    stages = load_pipeline([*ADDED, *KTO, "stages.kto.inputs.rows=unpaired"]).stages
    assert stages["unpaired"].method == Unpair()
    with pytest.raises(ConfigError, match=r"preferences gives preferences, this slot takes unpaired; .*unpair.yaml"):
        load_pipeline([*KTO, "stages.kto.inputs.rows=preferences"])


def test_a_file_of_pairs_is_sent_through_the_two_stages_that_make_single_answers(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "q", "chosen": "a", "rejected": "b"}\n')
    source = Source(path=str(tmp_path / "pairs.jsonl"))
    opened = detect_source(source)
    with pytest.raises(
        DataError, match=r"use pipeline=dpo, or conf/stage/preferences.yaml and conf/stage/unpair.yaml after it"
    ):
        opened.require_kind(Kind.UNPAIRED)


@pytest.mark.parametrize("stage", ["dpo", "reward"])
def test_a_plan_feeds_no_method_on_pairs_from_single_answers(stage: str) -> None:
    with pytest.raises(ConfigError, match=r"this slot takes preferences; .*single answers have no pairs, so that kto"):
        load_pipeline([*ADDED, f"stages.{stage}.inputs.pairs=unpaired"])
