"""What a training reports at every step, as MLflow shows it."""

import json

from tests import training


def test_each_step_has_loss_learning_rate_gradient_norm_speed_and_memory(tmp_path):
    root = training.write_inputs(tmp_path / "inputs")
    run = training.train(training.method("sft"), root, tmp_path / "output")
    assert [step for step, _ in run.reports] == [1, 2, 3]
    for _, metrics in run.reports:
        assert {"loss", "learning_rate", "grad_norm", "tokens_per_second", "memory_gib"} <= metrics.keys()
        assert 0.05 < metrics["memory_gib"] < 100  # torch alone takes hundreds of MiB
    assert json.dumps(run.reports)
