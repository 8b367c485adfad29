"""FSDP2 on gloo workers: the trajectory of one process, whole files, and a resume with any number of workers."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from lineage.checkpoints import Checkpoints
from lineage.errors import ConfigError
from lineage.filesystem.digest import digest_files
from tasks.context import Resources, Sharding
from tasks.judgement.estimate import architecture, memory, traffic
from tasks.method import Adapter, Quantization
from tasks.reward_functions import RewardFunction
from tasks.train.best import Best
from tasks.train.compatibility import refusals
from tasks.train.evaluation import Evaluation
from tasks.train.optim.optimizers import OPTIMIZERS, Optimizer
from tasks.train.rule import Case
from tasks.train.sharding import divided_over
from tests import training
from tests.command import Command
from tests.integration.test_adapter_types import ALL
from tests.integration.test_ppo import with_reward_model
from tests.miniature import MODEL, write_own_rows
from tests.trained_store import Made
from tests.training import METHODS, same, trajectory, weights
from tests.worker_group import Asked, Done, WorkerGroup, rows_of_steps, train

PLAIN = Resources(micro_batch_size=2, cpus_per_worker=1, save_minutes=None)
LORA = Adapter(rank=4, alpha=8)
NF4 = replace(LORA, quantization="nf4")
BIASES = replace(LORA, bias="all")  # of GPT-2: Llama has none
# Adam's first steps are about sign(gradient): one of 1e-9 that rounds to another sign moves a weight by the rate.
TOLERANCE = 1e-4


def divided(num_workers: int, sharding: Sharding = "fsdp", **fields: object) -> Resources:
    return replace(PLAIN, sharding=sharding, num_workers=num_workers, **fields)  # type: ignore[arg-type]


def require_same_trajectory(asked: Asked, group: WorkerGroup, resources: Resources) -> Asked:
    """Trains in one process and in the group; every loss, norm of gradients and row is the same."""
    tolerance = 1e-3 if asked.stage.precision == "bf16" else TOLERANCE
    one = train(replace(asked, folder=asked.folder / "one", resources=replace(asked.resources, num_workers=1)))
    other = replace(asked, folder=asked.folder / resources.sharding, resources=resources)
    found = group.train(other)
    assert len(one.reports) == len(found[0].reports) == asked.stage.num_steps
    for metric in (trajectory, lambda each: each["grad_norm"], lambda each: each["num_tokens"]):
        expected = [metric(each) for _, each in one.reports]
        assert [metric(each) for _, each in found[0].reports] == pytest.approx(expected, rel=tolerance, abs=1e-6)
    expected, written = weights(asked.folder / "one" / "output"), weights(other.folder / "output")
    assert {name: each.dtype for name, each in written.items()} == {name: each.dtype for name, each in expected.items()}
    for name, each in written.items():
        assert torch.allclose(each, expected[name], atol=tolerance)
    return other


@pytest.mark.parametrize("adapter", [None, pytest.param(LORA, marks=pytest.mark.slow)], ids=["full", "lora"])
def test_two_steps_of_two_workers_are_those_of_one(
    root: Path, tmp_path: Path, two_workers: WorkerGroup, adapter
) -> None:
    stage = training.method("sft", num_steps=2, max_grad_norm=0.1, adapter=adapter)  # clips at every step
    asked = Asked(stage=stage, root=root, folder=tmp_path, resources=PLAIN)
    written = require_same_trajectory(asked, two_workers, divided(2))
    config = AutoConfig.from_pretrained(written.folder / "output")
    assert not hasattr(config, "distributed_config")


def require_predicted(asked: Asked, found: Done) -> None:
    """The plan's estimate is within a tenth of the counted bytes, and what was gathered is its traffic."""
    policy = load_file(asked.root / "policy" / "model.safetensors")
    shapes = {name: tuple(each.shape) for name, each in policy.items()}
    config = architecture(json.loads((asked.root / "policy" / "config.json").read_text()))
    assert config
    expected = memory(asked.stage, asked.resources, config, shapes, asked.stage.max_length)
    held = found.held
    assert expected.weights == pytest.approx(held["weights"] + held["gathered"], rel=0.1)
    assert expected.optimizer == pytest.approx(held["optimizer"], rel=0.1)
    if asked.stage.adapter is None:
        assert expected.gradients == pytest.approx(held["gradients"], rel=0.1)
        over = divided_over(asked.resources)
        passes = asked.resources.accumulation_steps(asked.stage.global_batch_size)
        reduced = traffic(asked.stage, replace(asked.resources, reduce_dtype="fp32"), shapes, passes)
        gathered = held["gathered_in_all"] / asked.stage.num_steps * (over - 1) / over
        weights = sum(each.numel() for each in policy.values())
        exchanged = passes * 4 * weights * (over - 1) / over
        if asked.resources.sharding == "fsdp_hybrid":
            exchanged += passes * 4 * weights / over
        assert reduced == pytest.approx(gathered + exchanged, rel=0.1)


@pytest.mark.parametrize(
    "adapter",
    [None, *(pytest.param(each, marks=pytest.mark.slow) for each in (LORA, NF4))],
    ids=["full", "lora", "qlora"],
)
def test_a_worker_holds_what_the_plan_predicts_and_reads_its_rows_alone(
    root: Path, tmp_path: Path, two_workers: WorkerGroup, adapter
) -> None:
    stage = training.method("sft", num_steps=2, adapter=adapter)
    asked = Asked(stage=stage, root=root, folder=tmp_path, resources=divided(2))
    found = two_workers.train(asked)[0]
    assert found.held.get("divided_before_read", 0) == (adapter != NF4)
    require_predicted(asked, found)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["fsdp", "fsdp_grad", "fsdp_hybrid"])
@pytest.mark.parametrize(("name", "adapter"), [("sft", None), ("sft", LORA), ("cpt", None)])
def test_four_workers_hold_what_the_plan_predicts(
    root: Path, tmp_path: Path, four_workers: WorkerGroup, sharding, name, adapter
) -> None:
    stage = training.method(name, num_steps=2, adapter=adapter)
    resources = divided(4, sharding, num_nodes=2 if sharding == "fsdp_hybrid" else 1)
    asked = Asked(stage=stage, root=root, folder=tmp_path / "two", resources=resources, counts_sent=True)
    found = four_workers.train(asked)[0]
    require_predicted(asked, found)
    require_sent(asked, found, four_workers)


def require_sent(asked: Asked, found: Done, group: WorkerGroup) -> None:
    """A worker sends in two more steps what the plan predicts, within a tenth."""
    longer = replace(asked.stage, num_steps=asked.stage.num_steps + 2)
    more = group.train(replace(asked, stage=longer, folder=asked.folder.with_name("longer")))[0]
    policy = load_file(asked.root / "policy" / "model.safetensors")
    shapes = {name: tuple(each.shape) for name, each in policy.items()}
    passes = asked.resources.accumulation_steps(asked.stage.global_batch_size)
    expected = traffic(asked.stage, asked.resources, shapes, passes)
    assert expected == pytest.approx((more.held["sent"] - found.held["sent"]) / 2, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fields", "sharding", "more"),
    [
        *((name, {}, "fsdp", {}) for name in METHODS),
        *((name, {"adapter": LORA}, "fsdp", {})
          for name in ("dpo", "distill", "on_policy_distill", "grpo", "ppo", "reward")),
        ("sft", {}, "fsdp_grad", {}),
        ("dpo", {"adapter": LORA}, "fsdp_grad", {}),
        ("dpo", {"loss_type": "kto_pair"}, "fsdp", {}),
        ("sft", {}, "fsdp", {"micro_batch_size": "auto"}),
        ("dpo", {}, "fsdp", {"micro_batch_size": "auto"}),
        ("sft", {}, "fsdp", {"gradient_checkpointing": "on"}),
        ("sft", {}, "fsdp", {"wrap": 2000, "prefetch": 1}),
        ("sft", {}, "fsdp", {"offload": True}),
        ("sft", {"precision": "bf16"}, "fsdp", {}),
        ("sft", {"packing": "best_fit"}, "fsdp", {}),
    ],
)  # fmt: skip
def test_the_trajectory_of_twenty_steps_is_that_of_one_process(
    root: Path, tmp_path: Path, two_workers: WorkerGroup, name: str, fields, sharding, more
) -> None:
    stage = training.method(name, num_steps=20, max_grad_norm=0.1, **fields)
    micro = more.get("micro_batch_size", PLAIN.micro_batch_size)
    asked = Asked(stage=stage, root=root, folder=tmp_path, resources=replace(PLAIN, micro_batch_size=micro))
    require_same_trajectory(asked, two_workers, divided(2, sharding, **more))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "adapter"), [("grpo", None), ("grpo", LORA), ("rloo", None), ("online_dpo", None), ("ppo", None)]
)
def test_a_divided_reward_model_scores_as_in_one_process(
    root: Path, tmp_path: Path, two_workers: WorkerGroup, name: str, adapter
) -> None:
    judged = with_reward_model(root, tmp_path / "inputs")
    stage = training.method(name, num_steps=20, max_grad_norm=0.1, rewards=None, adapter=adapter)
    asked = Asked(stage=stage, root=judged, folder=tmp_path, resources=PLAIN)
    require_same_trajectory(asked, two_workers, divided(2))
    one, found = (
        {
            (each["step"], each["prompt"], each["completion"]): each["rewards/reward_model"]
            for each in pq.read_table(tmp_path / folder / "output" / "samples.parquet").to_pylist()
        }
        for folder in ("one", "fsdp")
    )
    assert len(found) >= stage.num_steps  # of the first worker's rows
    assert all(found[each] == pytest.approx(one[each], abs=TOLERANCE) for each in found)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ALL if not ("dropout" in name or name == "adalora")])
def test_any_adapter_takes_the_steps_of_one_process(
    root: Path, tmp_path: Path, two_workers: WorkerGroup, name: str
) -> None:
    stage = training.method("sft", num_steps=8, max_grad_norm=0.1, adapter=ALL[name])
    require_same_trajectory(Asked(stage=stage, root=root, folder=tmp_path, resources=PLAIN), two_workers, divided(2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "bias", "precision"),
    [
        *((name, bias, "fp32") for name in ("sft", "dpo", "reward", "ppo") for bias in ("all", "lora_only")),
        ("sft", "all", "bf16"),
    ],
)
def test_biases_of_the_divided_base_take_the_steps_of_one_process(
    root: Path, tmp_path: Path, two_workers: WorkerGroup, name: str, bias, precision
) -> None:
    own = training.with_policy(root, tmp_path / "root", "gpt2")
    adapter = replace(LORA, bias=bias)
    stage = training.method(name, num_steps=4, max_grad_norm=0.1, adapter=adapter, precision=precision)
    require_same_trajectory(Asked(stage=stage, root=own, folder=tmp_path, resources=PLAIN), two_workers, divided(2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "adapter", "bits"),
    [
        ("sft", LORA, "nf4"), ("sft", LORA, "fp4"), ("sft", Adapter(type="dora", rank=4), "nf4"),
        ("sft", Adapter(type="oft", block_size=8), "nf4"),
        *((name, LORA, "nf4") for name in ("cpt", "dpo", "reward", "kto", "orpo", "distill", "grpo", "ppo")),
        ("dpo", Adapter(rank=4, init="pissa"), None), ("dpo", Adapter(type="dora", rank=4), None),
        ("reward", Adapter(type="dora", rank=4), None), ("ppo", Adapter(type="dora", rank=4), None),
        ("grpo", Adapter(rank=4, init="eva"), None),
    ],
)  # fmt: skip
def test_a_base_in_few_bits_and_adapters_of_other_methods_take_the_steps_of_one_process(
    root: Path, tmp_path: Path, two_workers: WorkerGroup, name: str, adapter: Adapter, bits
) -> None:
    quantization = Quantization(format=bits) if bits else None
    stage = training.method(name, num_steps=4, max_grad_norm=0.1, adapter=adapter, quantization=quantization)
    require_same_trajectory(Asked(stage=stage, root=root, folder=tmp_path, resources=PLAIN), two_workers, divided(2))


WHOLE = [name for name, row in OPTIMIZERS.items() if not (row.needs_gpu or row.in_backward or row.projects)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "adapter"), [*((name, None) for name in ("sgd", "adagrad", "rmsprop")), *((name, LORA) for name in WHOLE)]
)
def test_any_optimizer_takes_the_steps_of_one_process(
    root: Path, tmp_path: Path, two_workers: WorkerGroup, name: str, adapter: Adapter | None
) -> None:
    package = OPTIMIZERS[name].package
    if package and package.is_missing:
        pytest.skip(package.install)
    rate = {"learning_rate": 1.0} if name == "prodigy" else {}
    schedule = {"lr_schedule": "constant"} if OPTIMIZERS[name].averages else {}
    stage = training.method(
        "sft", num_steps=6, max_grad_norm=0.1, optimizer=Optimizer(name=name), adapter=adapter, **rate, **schedule
    )
    require_same_trajectory(Asked(stage=stage, root=root, folder=tmp_path, resources=PLAIN), two_workers, divided(2))


def require_refused(asked: Asked) -> None:
    [refusal] = refusals(Case(method=asked.stage, resources=asked.resources))
    assert refusal.rule in ("sharding-optimizer", "sharding-quantization")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "seen"),
    [
        ({"optimizer": Optimizer(name="adafactor")}, "aten.add_.Tensor got mixed torch.Tensor and DTensor"),
        *(({"optimizer": Optimizer(name=name)}, "update_32bit.default does not have a sharding strategy registered")
          for name in ("adamw_8bit", "lion", "lion_8bit")),
        *(({"optimizer": Optimizer(name=name)}, "update_32bit.default got mixed torch.Tensor and DTensor")
          for name in ("ademamix", "ademamix_8bit")),
        ({"adapter": LORA, "quantization": Quantization(format="int8")}, "'Parameter' object has no attribute 'CB'"),
    ],
)  # fmt: skip
def test_what_the_plan_refuses_fails_in_its_library(root: Path, tmp_path: Path, fields, seen: str) -> None:
    """Where a newer library no longer fails, try it as the others and delete its refusal."""
    asked = Asked(stage=training.method("sft", num_steps=1, **fields), root=root, folder=tmp_path, resources=divided(2))
    require_refused(asked)
    group = WorkerGroup(2)  # ends with the failure
    try:
        with pytest.raises(RuntimeError, match=re.escape(seen)):
            group.train(asked)
    finally:
        group.close()


@pytest.mark.slow
def test_muon_is_refused_since_it_rounds_in_another_order(root: Path, tmp_path: Path, two_workers: WorkerGroup) -> None:
    stage = training.method("sft", num_steps=4, max_grad_norm=0.1, optimizer=Optimizer(name="muon"))
    one = Asked(stage=stage, root=root, folder=tmp_path / "one", resources=PLAIN)
    two = replace(one, folder=tmp_path / "two", resources=divided(2))
    require_refused(two)
    train(one)
    two_workers.train(two)
    expected, found = (weights(each.folder / "output") for each in (one, two))
    assert TOLERANCE < max((each - expected[name]).abs().max().item() for name, each in found.items()) < 1e-2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sharding", "adapter"),
    [
        *((name, "fsdp", None) for name in METHODS),
        *(("sft", sharding, None) for sharding in ("fsdp_grad", "fsdp_hybrid")),
        *(("sft", sharding, LORA) for sharding in ("fsdp", "fsdp_grad", "fsdp_hybrid")),
    ],
)
def test_four_workers_take_the_steps_of_one(
    root: Path, tmp_path: Path, four_workers: WorkerGroup, name: str, sharding, adapter
) -> None:
    stage = training.method(name, num_steps=20, max_grad_norm=0.1, adapter=adapter)
    asked = Asked(stage=stage, root=root, folder=tmp_path, resources=PLAIN)
    require_same_trajectory(asked, four_workers, divided(4, sharding, num_nodes=2 if sharding == "fsdp_hybrid" else 1))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "adapter_in"), [("dpo", "continue"), ("sft", None)])
def test_an_input_with_an_adapter_is_divided_once_that_is_merged_or_continued(
    root: Path, tmp_path: Path, two_workers: WorkerGroup, name: str, adapter_in: str | None
) -> None:
    made = Made(tmp_path, root)
    policy = made.trained("sft", made.base(), save="adapter", learning_rate=1e-2)
    inputs = policy.path.parents[2] / "inputs" / "of"  # so that the policy finds its base
    shutil.copytree(root, inputs, ignore=shutil.ignore_patterns("policy"))
    (inputs / "policy").symlink_to(policy.path)
    stage = training.method(name, num_steps=3, adapter=LORA, adapter_in=adapter_in, max_grad_norm=0.1)
    asked = Asked(stage=stage, root=inputs, folder=tmp_path / "asked", resources=PLAIN)
    require_same_trajectory(asked, two_workers, divided(2))


@pytest.mark.slow
def test_gradients_are_added_in_bf16_where_that_is_set(root: Path, tmp_path: Path, two_workers: WorkerGroup) -> None:
    stage = training.method("sft", num_steps=3)
    asked = Asked(stage=stage, root=root, folder=tmp_path / "fp32", resources=divided(2))
    rounded = replace(asked, folder=tmp_path / "bf16", resources=divided(2, reduce_dtype="bf16"))
    exact, found = (two_workers.train(each)[0].metric("grad_norm") for each in (asked, rounded))
    assert found != exact and found == pytest.approx(exact, rel=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("sft", {}), ("sft", {"adapter": LORA}), ("sft", {"adapter": NF4}), ("sft", {"adapter": BIASES}),
        ("reward", {}), ("reward", {"adapter": LORA}), ("grpo", {}), ("ppo", {}), ("ppo", {"adapter": LORA}),
    ],
)  # fmt: skip
def test_a_checkpoint_resumes_to_the_same_bits_and_with_other_workers(
    root: Path, tmp_path: Path, two_workers: WorkerGroup, four_workers: WorkerGroup, name: str, fields
) -> None:
    stage = training.method(name, num_steps=5, lr_schedule="cosine", **fields)
    own = training.with_policy(root, tmp_path / "root", "gpt2") if stage.adapter == BIASES else root
    whole = Asked(stage=stage, root=own, folder=tmp_path / "whole", resources=divided(2, save_steps=1))
    unbroken = two_workers.train(whole)
    broken = replace(whole, folder=tmp_path / "broken")
    # A loop of its own is asked after its report.
    first = two_workers.train(replace(broken, stop_after=3 + stage.has_own_loop))
    checkpoint = tmp_path / "broken" / "checkpoints" / "step-3"
    assert Checkpoints.at(checkpoint).sharding == "fsdp"
    rest = two_workers.train(replace(broken, resume_step=3))
    assert first[0].metric("loss") + rest[0].metric("loss") == unbroken[0].metric("loss")
    assert same(weights(broken.folder / "output"), weights(whole.folder / "output"))
    assert rows_of_steps(first) + rows_of_steps(rest) == rows_of_steps(unbroken)
    expected = [trajectory(each) for _, each in rest[0].reports]
    for group, resources in ((four_workers, divided(4)), (None, PLAIN)):
        other = replace(broken, resources=resources, resume_step=3)
        if stage.has_own_loop and not group:
            with pytest.raises(ConfigError, match="has other groups of divided weights than of whole ones; set shard"):
                train(other)
            continue
        found = group.train(other)[0] if group else train(other)
        assert [trajectory(each) for _, each in found.reports] == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sft", "reward"])  # the head of scores is whole on each worker
def test_fsdp_goes_on_with_the_checkpoint_of_one_process(
    root: Path, tmp_path: Path, two_workers: WorkerGroup, name: str
) -> None:
    stage = training.method(name, num_steps=5, lr_schedule="cosine")
    asked = Asked(stage=stage, root=root, folder=tmp_path / "one", resources=replace(PLAIN, save_steps=1))
    unbroken = train(asked)
    broken = replace(asked, folder=tmp_path / "two")
    train(replace(broken, stop_after=3))
    rest = two_workers.train(replace(broken, resources=divided(2), resume_step=3))
    assert rest[0].metric("loss") == pytest.approx(unbroken.metric("loss")[3:], rel=TOLERANCE)


@pytest.mark.slow
def test_the_best_model_is_measured_and_written(root: Path, tmp_path: Path, two_workers: WorkerGroup) -> None:
    best = Best(mode="max", every_steps=1)  # the loss falls: the first is the best
    stage = training.method("sft", num_steps=4, warmup_ratio=0.5, best=best, output="best")
    asked = Asked(stage=stage, root=root, folder=tmp_path, resources=replace(PLAIN, save_steps=1))
    written = require_same_trajectory(asked, two_workers, divided(2, save_steps=1))
    assert same(weights(written.folder / "output"), weights(root / "policy"))  # the first step has a rate of 0


@pytest.mark.slow
def test_checkpoints_in_parts_are_scored_beside_the_training(
    root: Path, tmp_path: Path, two_workers: WorkerGroup
) -> None:
    evaluation = Evaluation(every_steps=2, rows=4, max_new_tokens=4, pick="best", metric="answer_perplexity")
    stage = training.method("sft", num_steps=5, evaluation=evaluation)
    one = Asked(stage=stage, root=root, folder=tmp_path / "one", resources=PLAIN)
    two = replace(one, folder=tmp_path / "two", resources=divided(2))
    train(one)
    two_workers.train(two)
    whole, parts = map(scores_beside, (one.folder, two.folder))
    assert whole.keys() == parts.keys() == {0, 2, 4, 5}
    assert list(parts.values()) == pytest.approx(list(whole.values()), rel=TOLERANCE)
    assert not list((two.folder / "work" / "scored").glob("*/*.safetensors"))


def scores_beside(folder: Path) -> dict[int, float]:
    lines = map(json.loads, (folder / "evaluation.jsonl").read_text().splitlines())
    return {each["step"]: each["scores"]["answer_perplexity"] for each in lines if not each["error"]}


@pytest.mark.slow
def test_steps_without_a_signal_change_no_weight(root: Path, tmp_path: Path, two_workers: WorkerGroup) -> None:
    rewards = {"constant": RewardFunction(function="python:tests.completion_scores.constant")}
    stage = training.method("grpo", rewards=rewards, num_steps=3, weight_decay=0.1, learning_rate=1e-2)
    two_workers.train(Asked(stage=stage, root=root, folder=tmp_path, resources=divided(2)))
    assert same(weights(tmp_path / "output"), weights(root / "policy"))


@pytest.mark.slow
def test_a_layer_that_the_model_lacks_is_refused(root: Path, tmp_path: Path, two_workers: WorkerGroup) -> None:
    stage = training.method("sft", num_steps=1)
    asked = Asked(stage=stage, root=root, folder=tmp_path, resources=divided(2, wrap="GPT2Block"))
    with pytest.raises(
        ConfigError, match=r"wrap=GPT2Block: the model \(llama\) has no layer of class GPT2Block; it has"
    ):
        two_workers.train(asked)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("sft", {}), ("sft", {"precision": "bf16"}), ("dpo", {"adapter": LORA}), ("sft", {"adapter": NF4}),
        ("reward", {}),
    ],
)  # fmt: skip
def test_the_output_has_the_bytes_that_one_worker_writes_from_the_same_state(
    root: Path, tmp_path: Path, two_workers: WorkerGroup, four_workers: WorkerGroup, name: str, fields
) -> None:
    stage = training.method(name, num_steps=4, learning_rate=1e-2, **fields)
    trained = Asked(stage=stage, root=root, folder=tmp_path, resources=divided(2, save_steps=1))
    two_workers.train(replace(trained, stop_after=3))
    left = replace(trained, stage=replace(stage, num_steps=3), resume_step=3)  # no step
    written = {}
    for group, resources in (
        (None, PLAIN), (two_workers, divided(2)), (two_workers, divided(2, "fsdp_grad", offload=True)),
        (four_workers, divided(4)), (four_workers, divided(4, "fsdp_hybrid", num_nodes=2)),
    ):  # fmt: skip
        asked = replace(left, resources=resources)
        reports = (group.train(asked)[0] if group else train(asked)).reports
        assert not reports
        written[resources] = digests_of_weights(tmp_path / "output")
        shutil.rmtree(tmp_path / "output")
    assert len(written[PLAIN]) == 1 + (stage.adapter is not None)
    assert all(each == written[PLAIN] for each in written.values()), written


def digests_of_weights(output: Path) -> dict[str, str]:
    return {name: each for name, each in digest_files(output).items() if name.endswith(".safetensors")}


@pytest.mark.slow
def test_the_output_loads_as_any_model(root: Path, tmp_path: Path, two_workers: WorkerGroup) -> None:
    stage = training.method("dpo", num_steps=2, adapter=LORA)
    two_workers.train(Asked(stage=stage, root=root, folder=tmp_path, resources=divided(2)))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "output").dtype == torch.float32
    assert (tmp_path / "output" / "adapter" / "adapter_model.safetensors").exists()


@pytest.mark.slow
def test_the_command_divides_over_ray_workers_and_the_output_is_that_of_one(tmp_path: Path) -> None:
    graph = ("~stages.preferences", "~stages.reward", "~stages.dpo", "~stages.evaluate", "~stages.cpt")
    command = Command(
        tmp_path, *MODEL, *graph, "stages.sft.inputs.policy=base", "stages.sft.method.num_steps=4",
        "stages.sft.method.max_length=64", *write_own_rows(tmp_path)[:2],
    )  # fmt: skip
    divided = ("resources=cluster", "resources.sharding=fsdp", "resources.cpus_per_worker=1")
    sft = command.run(*divided, "resources.timeout_minutes=5")["sft"]
    assert command.states()["sft"] == "reuse"  # sharding is no identity
    one = command.run(f"store={tmp_path}/one")["sft"]
    found, expected = (weights(Path(each["output"])) for each in (sft, one))
    assert all(torch.allclose(each, expected[name], atol=TOLERANCE) for name, each in found.items())
    assert sft["fingerprint"] == one["fingerprint"]
