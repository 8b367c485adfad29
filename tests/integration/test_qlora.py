"""QLoRA: an adapter on a base in 4 bits trains, saves, resumes to the bit, and becomes a model that loads alone."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel

from flows.declare.config import load_pipeline
from flows.planning.plan import make_plan
from lineage.artifact import Kind
from tasks.gate import Gate
from tasks.merge import Merge
from tasks.method import Adapter, Quantization, Training
from tasks.train.models.load import whole_model
from tasks.train.models.quantized_base import Quantizer
from tests import tiny, training
from tests.integration.test_merge import STEP, merge
from tests.tiny_models import MIXTURES, write_model
from tests.trained_store import Made
from tests.training import weights

pytestmark = pytest.mark.usefixtures("one_thread")

QLORA = Adapter(rank=4, alpha=8, dropout=0.1, quantization="nf4")
NF4 = Quantizer(setting=Quantization(format="nf4"), compute_dtype=torch.float32)
ATTENTION = replace(QLORA, target_modules="q_proj,v_proj")


def test_a_base_in_4_bits_changes_the_run_and_precision_its_products(root: Path, tmp_path: Path) -> None:
    losses = {
        name: training.train(training.method("sft", **fields), root, tmp_path / name / "output").losses
        for name, fields in {
            "nf4": {"adapter": QLORA},
            "full": {"adapter": replace(QLORA, quantization=None)},
            "bf16": {"adapter": QLORA, "precision": "bf16"},
        }.items()
    }
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


@pytest.mark.parametrize(
    "architecture", [pytest.param(each, marks=pytest.mark.slow if each == "mixtral" else []) for each in MIXTURES]
)
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


# The shipped pipeline: one adapter through both stages, into 16 bits, judged against the full chain.
NAME = "pipeline=qlora-sft-dpo"


@pytest.mark.parametrize("model", ["tiny", "directory"])
def test_one_adapter_goes_through_both_stages_on_four_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if model == "directory":
        tiny.write_policy(tmp_path / "directory")
    pipeline = load_pipeline([NAME, f"model={model}"])
    make_plan(pipeline)
    sft, dpo = (pipeline.stages[name].method for name in ("qlora-sft", "qlora-dpo"))
    for method in (sft, dpo):
        assert isinstance(method, Training) and method.adapter and method.quantization
        assert (method.adapter.type, method.quantization.format, method.save) == ("lora", "nf4", "adapter")
    assert isinstance(dpo, Training) and dpo.adapter_in == "continue"
    assert pipeline.stages["qlora-dpo"].inputs["policy"] == "qlora-sft"
    merged, gate = pipeline.stages["merge"], pipeline.stages["gate"]
    assert isinstance(merged.method, Merge) and merged.method.dtype == "bf16"
    assert (gate.inputs["candidate"], gate.inputs["parent"]) == ("merge", "dpo")
    assert isinstance(gate.method, Gate)
    bounds = {name: rule.max_regression for name, rule in gate.method.rules.items()}
    tiny_bounds = {"right_answers": 0.15, "prefers_chosen": 0.15, "keeps_answers": 1.0, "keeps_language": 0.5}
    own = tiny_bounds if model == "tiny" else {}
    every = ("right_answers", "prefers_chosen", "keeps_answers", "keeps_language")
    assert bounds == {**dict.fromkeys(every, 0.1), **own}
    assert all(rule.against == "parent" for rule in gate.method.rules.values())


def test_the_adapter_of_both_stages_is_merged_into_sixteen_bits(tmp_path: Path) -> None:
    made = Made(tmp_path, training.write_inputs(tmp_path / "inputs"))
    base = made.base()
    fields = {
        "adapter": Adapter(rank=4, alpha=8), "quantization": Quantization(format="nf4"), "save": "adapter", **STEP,
    }  # fmt: skip
    sft = made.trained("sft", base, **fields)
    dpo = made.trained("dpo", sft, adapter_in="continue", **fields)
    metrics = merge(tmp_path / "merged", Merge(dtype="bf16"), policy=dpo)
    assert metrics["merge/logps_difference"] < 0.05
    found, start = weights(tmp_path / "merged"), weights(base.path)
    assert {each.dtype for each in found.values()} == {torch.bfloat16}
    moved = {name for name, each in found.items() if not torch.equal(each, start[name].bfloat16())}
    assert moved == {name for name in start if name.endswith("_proj.weight")}
