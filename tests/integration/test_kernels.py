"""What a training takes from its machine reaches the trainer, and keeps its trajectory."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from lineage.errors import StoppedError
from tasks.context import Metrics, Resources, TrainContext
from tasks.train import kernels
from tests import training
from tests.training import same, weights

RESOURCES = Resources(micro_batch_size=4)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return training.write_inputs(tmp_path_factory.mktemp("inputs"))


def test_auto_without_a_gpu_is_fp32_to_the_bit(root: Path, tmp_path: Path) -> None:
    found = [
        training.train(training.method("sft", precision=each), root, tmp_path / each / "output")
        for each in ("fp32", "auto")
    ]
    assert same(*(weights(each.output) for each in found))


def test_a_precision_that_the_environment_sets_changes_no_training(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = training.train(training.method("sft"), root, tmp_path / "expected" / "output")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    found = training.train(training.method("sft"), root, tmp_path / "found" / "output")
    assert found.losses == expected.losses


def scale_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a CPU train in fp16 with a loss scale, as accelerate does on a GPU alone."""
    original = Accelerator.__init__

    def with_scaler(self: Accelerator, *args: object, **kwargs: object) -> None:
        original(self, *args, **kwargs)
        if self.state.mixed_precision == "fp16":
            self.native_amp, self.scaler = True, torch.amp.GradScaler("cpu")

    monkeypatch.setattr(Accelerator, "__init__", with_scaler)
    monkeypatch.setattr(kernels, "require_precision", lambda precision, on_gpu: None)


def test_fp16_scales_its_loss_and_resumes_to_the_bit(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale_on_the_cpu(monkeypatch)
    monkeypatch.setattr(kernels, "FIRST_SCALE", 2.0**22)  # overflows: steps are skipped, and the scale falls
    stage = training.method("sft", num_steps=6, precision="fp16")
    found = {}
    for name, stops in (("whole", False), ("parts", True)):
        reports: dict[int, Metrics] = {}
        ctx = TrainContext(
            output_dir=tmp_path / name / "output", work_dir=tmp_path / name / "work", resources=RESOURCES,
            report=lambda step, metrics, into=reports: into.update({step: dict(metrics)}),  # type: ignore[misc]
            checkpoint_dir=tmp_path / name / "checkpoints", should_stop=lambda into=reports, on=stops: on and 2 in into,
        )  # fmt: skip
        given = training.inputs(root, stage)
        if stops:
            with pytest.raises(StoppedError):
                stage.run(given, ctx)
            [saved] = (tmp_path / name / "checkpoints").glob("step-*")
            assert (saved / "scaler.pt").exists()
            ctx = replace(ctx, resume_from=saved, should_stop=lambda: False)
        stage.run(given, ctx)
        found[name] = reports
    scales = [found["whole"][step]["loss_scale"] for step in range(1, 7)]
    assert scales == [2.0**21, 2.0**20, 2.0**19, 2.0**19, 2.0**18, 2.0**18]  # it falls at each skipped step
    assert scales == [found["parts"][step]["loss_scale"] for step in range(1, 7)]
    assert same(*(weights(tmp_path / name / "output") for name in found))


def test_fp16_follows_fp32(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = training.train(training.method("sft"), root, tmp_path / "fp32" / "output")
    scale_on_the_cpu(monkeypatch)
    found = training.train(training.method("sft", precision="fp16"), root, tmp_path / "fp16" / "output")
    assert found.losses != expected.losses
    assert found.losses == pytest.approx(expected.losses, rel=5e-3)
    assert [metrics["loss_scale"] for _, metrics in found.reports] == [1024.0] * 3
