"""Precision and kernels that only a GPU has follow the training with default kernels."""

from dataclasses import replace
from pathlib import Path

import pytest

from tasks.context import Resources
from tests import training
from tests.integration.test_resume import LORA, SAVING, stop_and_go_on

ON_GPU = Resources(micro_batch_size=4, gpus_per_worker=1, deterministic=True)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return training.write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(autouse=True)
def _as_in_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.mark.parametrize("name", ["cpt", "sft", "reward", "dpo"])
@pytest.mark.parametrize(
    ("fields", "package"),
    [
        ({"deterministic": "auto"}, None),
        ({"gradient_checkpointing": 2}, None),
        ({"weights": "fp32"}, None),
        ({"attention": "eager"}, None),
        ({"compile": True}, None),
        ({"empty_cache_steps": 1}, None),
        ({"liger": True}, "liger_kernel"),
        ({"attention": "flash_attention_2", "deterministic": False}, "flash_attn"),
        ({"attention": "flash_attention_3", "deterministic": False}, "flash_attn_interface"),
    ],
)
def test_kernels_keep_the_trajectory(
    root: Path, tmp_path: Path, name: str, fields: dict[str, object], package: str | None
) -> None:
    if package:
        pytest.importorskip(package)
    stage = training.method(name, precision="bf16", adapter=LORA if "weights" in fields else None)
    losses = [
        training.train(stage, root, tmp_path / str(index) / "output", resources=resources).losses
        for index, resources in enumerate((ON_GPU, replace(ON_GPU, **fields)))
    ]
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)


@pytest.mark.parametrize(("precision", "package"), [("fp16", None), ("fp8", "torchao")])
def test_a_precision_follows_bf16_and_resumes_to_the_bit(
    root: Path, tmp_path: Path, precision: str, package: str | None
) -> None:
    if package:
        pytest.importorskip(package)
    losses = [
        training.train(
            training.method("sft", precision=each), root, tmp_path / each / "output", resources=ON_GPU
        ).losses
        for each in ("bf16", precision)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=3e-2) and losses[1] != losses[0]
    resources = replace(SAVING, gpus_per_worker=1, deterministic=True)
    stop_and_go_on(training.method("sft", num_steps=6, precision=precision), root, tmp_path, resources)
