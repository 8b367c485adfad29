"""Pipelines in miniature on one GPU."""

import json
from pathlib import Path

import pytest

from tests.command import Command
from tests.miniature import MODEL, STEPS, overrides_of, write_own_rows


def losses(row: dict[str, str]) -> list[float]:
    lines = Path(row["output"]).with_name("metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["metrics"]["loss"] for line in lines]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_stage_trains_on_a_gpu_and_dpo_starts_at_ln_2(tmp_path, precision):
    trained = [f"stages.{stage}.method.precision={precision}" for stage in ("cpt", "sft", "reward", "dpo")]
    command = Command(tmp_path, *MODEL, *STEPS, *write_own_rows(tmp_path), "resources=gpu", *trained)
    rows = command.run()
    assert losses(rows["dpo"])[0] == pytest.approx(0.693147, abs=1e-3)
    for stage in ("cpt", "sft", "reward"):
        assert losses(rows[stage])[-1] != losses(rows[stage])[0]


@pytest.mark.parametrize("pipeline", ["sft-grpo", "qlora-sft-dpo"])
def test_a_shipped_pipeline_runs_on_a_gpu(tmp_path, pipeline):
    rows = Command(tmp_path, *overrides_of(pipeline, gated=False), "resources=gpu").run()
    assert {row["state"] for row in rows.values()} == {"run"}
