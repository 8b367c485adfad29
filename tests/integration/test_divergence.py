"""A training whose loss is no number: it fails, or goes back to its best model."""

import logging
import math
from pathlib import Path

import pytest
from safetensors.torch import load_file

from lineage.errors import PipelineError
from tasks.best import Best
from tests import training
from tests.stage_folder import StageFolder, write_inputs
from tests.training import same, weights

# The first step has a learning rate of 0, the second one that no weight survives.
EXPLODING = {"num_steps": 8, "learning_rate": 1e38, "warmup_ratio": 0.5, "lr_schedule": "constant"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def test_a_training_that_diverges_ends_with_its_best_model(root: Path, tmp_path: Path, caplog) -> None:
    stage = training.method("sft", **EXPLODING, best=Best(every_steps=1), on_divergence="best")
    ran = StageFolder(tmp_path, root)
    with caplog.at_level(logging.ERROR):
        metrics = ran(stage)
    best = min(ran.held_out(), key=lambda step: ran.held_out()[step])
    assert metrics["best_step"] == best
    assert metrics["held_out_loss"] == ran.held_out()[best]
    assert metrics["diverged_at_step"] == metrics["steps"] == len(ran.reports) + 1 < 8
    assert same(weights(ran.output), load_file(ran.store.path(best) / "model.safetensors"))
    assert "training diverged: at step" in caplog.text
    assert f"the output is the model of step {best}" in caplog.text


def test_a_training_that_diverges_fails_and_names_its_last_good_checkpoint(root: Path, tmp_path: Path) -> None:
    ran = StageFolder(tmp_path / "saving", root, save_steps=1)
    with pytest.raises(PipelineError, match=r"diverged: .* last good checkpoint is that of step \d .* lower learning_"):
        ran(training.method("sft", **EXPLODING))
    assert all(math.isfinite(ran.store.read(step).metrics["loss"]) for step in ran.store.steps())
    stage = training.method("sft", **EXPLODING, best=Best(every_steps=7), on_divergence="best")
    with pytest.raises(PipelineError, match=r"nothing was saved; on_divergence=best: no model has competed yet"):
        StageFolder(tmp_path / "late", root)(stage)
