"""Every method on a GPU: the losses of a CPU, and a resume to the bit in bf16; bases in few bits; an evaluation."""

from dataclasses import replace
from pathlib import Path

import pytest

from tasks.context import Resources
from tasks.method import Adapter
from tasks.train.generation.generating import Sampling
from tasks.train.models.quantization import FORMATS, missing
from tests import training
from tests.integration.test_resume import LORA, SAVING, stop_and_go_on

ON_GPU = replace(SAVING, gpus_per_worker=1, deterministic=True)
# Their completions are other ones: a GPU draws other noise.
READING = [name for name in training.METHODS if name not in training.GENERATING]
ROUNDED = [name for name, row in FORMATS.items() if row.rounds]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return training.write_inputs(tmp_path_factory.mktemp("inputs"), num_held_out=8)


@pytest.fixture(autouse=True)
def _as_in_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.mark.parametrize("name", READING)
def test_the_losses_are_those_of_a_cpu(root: Path, tmp_path: Path, name: str) -> None:
    on = {"cpu": Resources(micro_batch_size=4), "gpu": Resources(micro_batch_size=4, gpus_per_worker=1)}
    losses = {
        device: training.train(training.method(name), root, tmp_path / device / "output", resources=resources).losses
        for device, resources in on.items()
    }
    assert losses["gpu"] == pytest.approx(losses["cpu"], rel=1e-3)


@pytest.mark.parametrize("adapter", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("name", training.METHODS)
def test_a_resume_in_bf16_is_unbroken_to_the_bit(
    root: Path, tmp_path: Path, name: str, adapter: Adapter | None
) -> None:
    stage = training.method(name, num_steps=6, adapter=adapter, precision="bf16")
    stop_and_go_on(stage, root, tmp_path, ON_GPU)


@pytest.mark.parametrize("name", ["grpo", "ppo"])
@pytest.mark.parametrize(
    "sampling",
    [{"top_p": 0.9}, {"top_k": 20, "min_p": 0.01}, {"temperature": 0.7, "repetition_penalty": 1.2}],
    ids=lambda fields: "-".join(fields),
)
def test_sampling_has_deterministic_kernels(root: Path, tmp_path: Path, name: str, sampling: dict[str, float]) -> None:
    stage = training.method(name, num_steps=2, precision="bf16", sampling=Sampling(**sampling))
    rewards = [
        [
            metrics["reward"]
            for _, metrics in training.train(stage, root, tmp_path / side / "output", resources=ON_GPU).reports
        ]
        for side in ("first", "second")
    ]
    assert rewards[0] == rewards[1]


def test_a_base_in_four_bits_is_merged_beside_kernels_of_liger(root: Path, tmp_path: Path) -> None:
    pytest.importorskip("liger_kernel")
    stage = training.method("sft", adapter=replace(LORA, quantization="nf4"), precision="bf16")
    found = training.train(stage, root, tmp_path / "output", resources=replace(ON_GPU, liger=True))
    assert found.metrics["merge/logps_difference"] < 0.1


@pytest.mark.parametrize("name", ["sft", "dpo", "grpo"])
@pytest.mark.parametrize("quantization", ROUNDED)
def test_an_adapter_on_a_base_in_few_bits_resumes_to_the_bit(
    root: Path, tmp_path: Path, name: str, quantization: str
) -> None:
    lacking = missing(quantization, on_gpu=True)  # type: ignore[arg-type]
    if lacking or (quantization, name) == ("quanto_int4", "grpo"):
        pytest.skip(lacking or "refused by quanto-int4-generating")
    adapter = replace(LORA, quantization=quantization)
    save = None if FORMATS[quantization].dequantizes else "adapter"  # type: ignore[index]
    precision = "fp32" if quantization.startswith("quanto") else "bf16"
    stage = training.method(name, num_steps=6, adapter=adapter, precision=precision, save=save)
    stop_and_go_on(stage, root, tmp_path, ON_GPU)
