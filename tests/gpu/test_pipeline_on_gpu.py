"""The miniature pipeline on one GPU, in bf16 and in fp32."""

import pytest

from tests.command import Command
from tests.integration.test_pipeline import losses
from tests.miniature import MODEL, STEPS, write_own_rows


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_stage_trains_on_a_gpu_and_dpo_starts_at_ln_2(tmp_path, precision):
    trained = [f"stages.{stage}.method.precision={precision}" for stage in ("cpt", "sft", "reward", "dpo")]
    command = Command(tmp_path, *MODEL, *STEPS, *write_own_rows(tmp_path), "resources=gpu", *trained)
    rows = command.run()
    assert losses(rows["dpo"])[0] == pytest.approx(0.693147, abs=1e-3)
    for stage in ("cpt", "sft", "reward"):
        assert losses(rows[stage])[-1] != losses(rows[stage])[0]
