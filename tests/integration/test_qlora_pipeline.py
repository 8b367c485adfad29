"""The shipped pipeline on 4 bits: one adapter through both stages, into 16 bits, judged against the full chain."""

from pathlib import Path

import pytest
import torch

from flows.declare.config import load_pipeline
from flows.planning.plan import make_plan
from tasks.gate import Gate
from tasks.merge import Merge
from tasks.method import Adapter, Quantization, Training
from tests import tiny, training
from tests.integration.test_merge import STEP, merge
from tests.trained_store import Made
from tests.training import weights

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


@pytest.mark.usefixtures("one_thread")
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
