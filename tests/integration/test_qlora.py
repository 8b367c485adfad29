"""QLoRA: an adapter on a base in 4 bits trains, saves, resumes to the bit, and becomes a model that loads alone."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from lineage.artifact import Kind
from lineage.checkpoints import Checkpoints
from lineage.errors import StoppedError
from tasks.context import Metrics, Resources, TrainContext
from tasks.method import Adapter, Quantization, Training
from tasks.train.models import whole_model
from tasks.train.quantized_base import Quantizer
from tests import training
from tests.tiny_models import MIXTURES, write_model
from tests.training import same, weights

pytestmark = pytest.mark.usefixtures("one_thread")

QLORA = Adapter(rank=4, alpha=8, dropout=0.1, quantization="nf4")
NF4 = Quantizer(setting=Quantization(format="nf4"), compute_dtype=torch.float32)
ATTENTION = replace(QLORA, target_modules="q_proj,v_proj")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return training.write_inputs(tmp_path_factory.mktemp("inputs"))


def run(stage: Training, root: Path, folder: Path, reports: list[float], **fields: object) -> Path:
    """Trains in a folder; the losses go to ``reports``, and the checkpoints beside the output."""
    ctx = TrainContext(
        output_dir=folder / "output", work_dir=folder / "work", checkpoint_dir=folder / "checkpoints",
        resources=Resources(micro_batch_size=4, cpus_per_worker=1, save_steps=2, save_minutes=None),
        report=lambda step, metrics: reports.append(_plain(metrics)),
    )  # fmt: skip
    stage.run(training.inputs(root, stage), replace(ctx, **fields))
    return ctx.output_dir


def _plain(metrics: Metrics) -> float:
    return training.trajectory(metrics)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, cls in training.METHODS.items() if not cls.has_own_loop])
def test_it_resumes_to_the_bit_from_its_adapter_and_loads_alone(root: Path, tmp_path: Path, name: str) -> None:
    stage = training.method(name, num_steps=5, adapter=QLORA)
    whole: list[float] = []
    parts: list[float] = []
    unbroken = run(stage, root, tmp_path / "whole", whole)
    with pytest.raises(StoppedError, match="stopped at step 3 of 5"):
        run(stage, root, tmp_path / "broken", parts, should_stop=lambda: len(parts) == 2)
    shutil.rmtree(tmp_path / "broken" / "work")
    saved = Checkpoints(tmp_path / "broken" / "checkpoints")
    resumed = run(stage, root, tmp_path / "broken", parts, resume_from=saved.path(3))
    assert parts == whole
    assert same(weights(resumed), weights(unbroken))
    assert (resumed / "adapter/adapter_model.safetensors").read_bytes() == (
        unbroken / "adapter/adapter_model.safetensors"
    ).read_bytes()

    found = saved.read(3).files.keys()
    assert {"adapter_model.safetensors", "optimizer.pt"} <= found
    assert "model.safetensors" not in found  # the base is not in it
    with safe_open(saved.path(3) / "adapter_model.safetensors", "pt") as file:
        dtypes = {file.get_tensor(key).dtype for key in file.keys()}  # noqa: SIM118  # no mapping
    assert dtypes == {torch.float32}

    auto = AutoModelForSequenceClassification if name == "reward" else AutoModelForCausalLM
    model = auto.from_pretrained(unbroken)
    assert model.dtype == torch.float32
    assert "quantization_config" not in model.config


def test_a_base_in_4_bits_changes_the_run_and_precision_its_products(root: Path, tmp_path: Path) -> None:
    losses: dict[str, list[float]] = {}
    for name, fields in {
        "nf4": {"adapter": QLORA},
        "full": {"adapter": replace(QLORA, quantization=None)},
        "bf16": {"adapter": QLORA, "precision": "bf16"},
    }.items():
        run(training.method("sft", **fields), root, tmp_path / name, losses.setdefault(name, []))
    assert losses["nf4"] != losses["full"]
    assert losses["nf4"] != losses["bf16"]
    assert losses["nf4"] == pytest.approx(losses["full"], abs=0.05)
    assert losses["nf4"] == pytest.approx(losses["bf16"], abs=0.05)


def test_measuring_between_steps_leaves_the_base_as_it_is(root: Path) -> None:
    model = whole_model(Kind.CHECKPOINT, root / "policy", quantizer=NF4)
    weight = model.model.layers[0].self_attn.q_proj.weight
    before = weight.data.clone()
    with torch.no_grad():
        asked = model.eval()(torch.arange(3, 20)[None]).logits
        assert torch.equal(weight.data, before)
        assert torch.equal(model.train()(torch.arange(3, 20)[None]).logits, asked)


@pytest.mark.parametrize("architecture", MIXTURES)
def test_the_experts_of_a_mixture_are_in_4_bits_too(root: Path, tmp_path: Path, architecture: str) -> None:
    # bitsandbytes' kernel for CPUs needs rows of whole blocks of 64.
    policy = write_model(tmp_path / "policy", architecture, hidden_size=64, moe_intermediate_size=64)
    model = whole_model(Kind.CHECKPOINT, policy, quantizer=NF4)
    full = whole_model(Kind.CHECKPOINT, policy)
    experts = [name for name, parameter in full.named_parameters() if parameter.ndim == 3]
    assert experts
    kept = dict(model.named_parameters())
    assert not [name for name in experts if name in kept and kept[name].is_floating_point()]
    layer, given = model.model.layers[0].mlp.experts, full.model.layers[0].mlp.experts
    off = (layer.gate_up_proj - given.gate_up_proj).norm() / given.gate_up_proj.norm()
    assert 0.05 < off < 0.12, "rounded, and still the same weights"

    losses = {
        quantization: training.train(
            training.method("sft", adapter=replace(ATTENTION, quantization=quantization)), root,
            tmp_path / str(quantization), policy=policy,
        )
        for quantization in ("nf4", None)
    }  # fmt: skip
    assert losses["nf4"].losses == pytest.approx(losses[None].losses, abs=0.05)
    assert losses["nf4"].losses != losses[None].losses
    saved = whole_model(Kind.CHECKPOINT, losses["nf4"].output)
    for name in experts:  # frozen: the output has them as they were given
        assert torch.equal(saved.get_parameter(name), full.get_parameter(name)), name


def test_an_adapter_on_experts_reloads_as_it_was_trained(root: Path, tmp_path: Path) -> None:
    policy = write_model(tmp_path / "policy", "mixtral")
    adapter = replace(QLORA, dropout=0.0, quantization=None)
    output = training.train(training.method("sft", adapter=adapter), root, tmp_path / "o", policy=policy).output
    base = whole_model(Kind.CHECKPOINT, policy)
    again = PeftModel.from_pretrained(base, output / "adapter").merge_and_unload()
    saved = whole_model(Kind.CHECKPOINT, output)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    torch.testing.assert_close(again.get_parameter(name), saved.get_parameter(name))
    assert not torch.equal(saved.get_parameter(name), whole_model(Kind.CHECKPOINT, policy).get_parameter(name))
