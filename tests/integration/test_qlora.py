"""QLoRA: an adapter on a base in 4 bits trains, saves, resumes to the bit, and becomes a model that loads alone."""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from lineage.artifact import Kind
from lineage.checkpoints import Checkpoints
from lineage.errors import ConfigError, StoppedError
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


def test_the_output_is_the_adapter_on_the_base_as_it_was_given(root: Path, tmp_path: Path) -> None:
    output = run(training.method("sft", num_steps=5, learning_rate=3e-2, adapter=QLORA), root, tmp_path, [])
    ids = AutoTokenizer.from_pretrained(output)("sum adds the list", return_tensors="pt")

    def logits(model: torch.nn.Module) -> torch.Tensor:
        with torch.no_grad():
            return model.eval()(**ids).logits

    merged = logits(AutoModelForCausalLM.from_pretrained(output))
    base = AutoModelForCausalLM.from_pretrained(root / "policy")
    untrained = logits(base)
    on_base = logits(PeftModel.from_pretrained(base, output / "adapter"))
    torch.testing.assert_close(merged, on_base)

    four_bit = whole_model(Kind.CHECKPOINT, root / "policy", quantizer=NF4)
    rounded = logits(four_bit)
    trained = logits(PeftModel.from_pretrained(four_bit, output / "adapter"))
    off, rounding, learned = ((left - right).norm() for left, right in (
        (merged, trained), (untrained, rounded), (merged, untrained)
    ))  # fmt: skip
    assert 0 < off < 1.5 * rounding  # no more than what the base lost
    assert off < learned


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


def test_a_layer_that_the_model_has_not_is_refused_before_a_step(root: Path, tmp_path: Path) -> None:
    stage = training.method("sft", adapter=replace(QLORA, target_modules="q_proj, w_pack"))
    with pytest.raises(ConfigError, match=r"no linear layer w_pack; it has .*q_proj.*; name some of these"):
        run(stage, root, tmp_path, [])


UNUSED = """
import sys
from importlib import import_module
from pathlib import Path
from tasks.method import Adapter, Method

for module in Method.preload:
    import_module(module)
from tests import training
from tests.tiny_models import MIXTURES, write_model

root = Path(sys.argv[1])
training.train(training.method("sft", num_steps=1, adapter=Adapter(rank=4)), root, Path(sys.argv[2]) / "output")
assert "bitsandbytes" not in sys.modules
qlora = Adapter(rank=4, quantization="nf4")
training.train(training.method("sft", num_steps=1, adapter=qlora), root, Path(sys.argv[3]))
assert "bitsandbytes" in sys.modules
"""


@pytest.mark.slow
def test_bitsandbytes_is_imported_where_it_is_used_and_not_before(root: Path, tmp_path: Path) -> None:
    words = [str(root), str(tmp_path / "lora"), str(tmp_path / "qlora")]
    subprocess.run([sys.executable, "-c", UNUSED, *words], cwd=Path(training.__file__).parents[1], check=True)


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


def test_dropout_of_an_adapter_on_experts_is_refused_with_what_to_set(root: Path, tmp_path: Path) -> None:
    policy = write_model(tmp_path / "policy", "mixtral")
    stage = training.method("sft", adapter=replace(QLORA, quantization=None))
    with pytest.raises(ConfigError, match=r"adapter.dropout=0.1: .*set adapter.dropout=0"):
        training.train(stage, root, tmp_path / "output", policy=policy)
