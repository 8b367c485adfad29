"""Optimizers on a GPU: those whose state pages to the CPU, and those with kernels of their own there."""

from dataclasses import replace
from pathlib import Path

import pytest

from tasks.method import Optimizer
from tasks.train.optim.optimizers import OPTIMIZERS
from tests import training
from tests.integration.test_resume import SAVING, stop_and_go_on

NAMES = [name for name, entry in OPTIMIZERS.items() if entry.needs_gpu] + ["adamw_8bit", "lion_8bit", "muon"]


@pytest.mark.parametrize("name", NAMES)
def test_a_training_resumes_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as the process of a stage has it
    stage = training.method("sft", num_steps=6, optimizer=Optimizer(name=name))
    root = training.write_inputs(tmp_path / "inputs")
    stop_and_go_on(stage, root, tmp_path, replace(SAVING, gpus_per_worker=1, deterministic=True))
