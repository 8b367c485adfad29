"""A training on a GPU that ended early and went on gives the weights of one that did not, to the bit."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests import training
from tests.integration.test_resume import LORA, SAVING, stop_and_go_on


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_dropout_that_is_drawn_on_the_gpu_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as the process of a stage has it
    stage = training.method("sft", num_steps=6, adapter=LORA, lr_schedule="cosine", precision=precision)
    root = training.write_inputs(tmp_path / "inputs")
    stop_and_go_on(stage, root, tmp_path, replace(SAVING, gpus_per_worker=1, deterministic=True))
