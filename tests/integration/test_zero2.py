"""ZeRO on two workers: the model of plain data parallelism, saved and resumed in parts."""

import json
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from math import log
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from lineage.checkpoints import Checkpoints
from lineage.errors import ConfigError
from tasks.context import Resources
from tasks.judgement.estimate import architecture, memory
from tasks.method import Adapter, Quantization
from tasks.reward_functions import RewardFunction
from tasks.train.best import Best
from tasks.train.evaluation import Evaluation
from tasks.train.models.freeze import Freeze
from tests import tiny, training
from tests.chaos.record import digests
from tests.command import Command, wait_until
from tests.integration.test_fsdp import BIASES, digests_of_weights, require_same_trajectory, require_sent, scores_beside
from tests.miniature import MODEL, write_own_rows
from tests.trained_store import Made
from tests.training import same, weights
from tests.worker_group import Asked, WorkerGroup, rows_of_steps, train, zero_group

pytestmark = pytest.mark.slow  # DeepSpeed in two groups of workers
PLAIN = Resources(micro_batch_size=2, cpus_per_worker=1, save_steps=2, save_minutes=None)
ZERO = replace(PLAIN, zero_stage=2, num_workers=2)
LORA = Adapter(rank=4, alpha=8)
LAST_LAYER = {"freeze": Freeze(except_last_layers=1)}  # a full training, with the memory of its weights alone


@pytest.mark.parametrize(
    ("name", "fields", "tolerance", "sharding"),
    [
        ("sft", {}, 1e-5, "zero1"),
        ("dpo", {"adapter": LORA}, 1e-5, "zero1"),
        ("sft", {}, 1e-5, "zero2_offload"),
        ("cpt", {}, 1e-5, "zero2"),
        ("sft", {}, 1e-5, "zero2"),
        ("reward", {}, 1e-5, "zero2"),
        ("dpo", {}, 1e-5, "zero2"),
        ("distill", {}, 1e-5, "zero2"),
        ("sft", {"precision": "bf16"}, 1e-3, "zero2"),
        ("dpo", {"precision": "bf16", "adapter": LORA}, 1e-3, "zero2"),
        ("dpo", {"adapter": LORA, "quantization": Quantization(format="nf4")}, 1e-5, "zero2"),
        ("sft", {}, 1e-5, "zero3"),
        ("sft", {"adapter": LORA}, 1e-5, "zero3"),
        ("sft", {}, 1e-5, "zero3_offload"),
        ("sft", {"precision": "bf16"}, 1e-3, "zero3"),
        ("cpt", {}, 1e-5, "zero3"),
        ("reward", {}, 1e-5, "zero3"),
        ("reward", {"adapter": LORA}, 1e-5, "zero3"),
        ("dpo", {}, 1e-5, "zero3"),
        ("dpo", {"adapter": LORA}, 1e-5, "zero3"),
        ("dpo", {"precision": "bf16", "adapter": LORA}, 1e-3, "zero3"),
        ("kto", {}, 1e-5, "zero3"),
        ("orpo", {}, 1e-5, "zero3"),
        ("distill", {}, 1e-5, "zero3"),
        ("taid", {}, 1e-5, "zero3"),
    ],
)
def test_losses_are_those_of_plain_data_parallelism(
    root: Path, tmp_path: Path, two_workers: WorkerGroup, zero_workers: WorkerGroup, name, fields, tolerance,
    sharding,
) -> None:  # fmt: skip
    stage = training.method(name, num_steps=4, max_grad_norm=0.1, **fields)  # clips at every step
    plain = Asked(stage=stage, root=root, folder=tmp_path / "plain", resources=PLAIN)
    zero = replace(plain, folder=tmp_path / "zero", resources=ZERO.sharded(sharding))
    expected, found = two_workers.train(plain), zero_workers.train(zero)
    for metric in ("loss", "grad_norm", "learning_rate", "num_tokens"):
        assert found[0].metric(metric) == pytest.approx(expected[0].metric(metric), rel=tolerance)
    assert rows_of_steps(found) == rows_of_steps(expected)
    assert "weights_unchanged" not in found[0].metrics
    if sharding.startswith("zero3"):  # teacher and reference too
        beside = name in ("distill", "taid") or (name in ("dpo", "kto") and "adapter" not in fields)
        assert found[0].held["divided_before_read"] == 1 + beside
    if name == "dpo":  # policy and reference are one, to the bit
        assert found[0].metric("loss")[0] == pytest.approx(log(2), abs=1e-7)
    auto = AutoModelForSequenceClassification if name == "reward" else AutoModelForCausalLM
    model = auto.from_pretrained(zero.folder / "output")
    assert {value.dtype for value in model.state_dict().values()} == {torch.float32}
    assert (zero.folder / "output" / "adapter").exists() == ("adapter" in fields)


@pytest.fixture(scope="module")
def four_workers() -> Iterator[WorkerGroup]:
    with zero_group(4) as group:
        yield group


@pytest.mark.parametrize("sharding", ["zero1", "zero2", "zero2_offload", "zero3", "zero3_offload", "none"])
def test_four_workers_hold_and_send_what_the_plan_predicts(
    root: Path, tmp_path: Path, four_workers: WorkerGroup, sharding
) -> None:
    stage = training.method("sft", num_steps=2)
    resources = replace(PLAIN, sharding=sharding, num_workers=4, micro_batch_size=1)
    asked = Asked(stage=stage, root=root, folder=tmp_path / "two", resources=resources, counts_sent=True)
    found = four_workers.train(asked)[0]
    policy = weights(root / "policy")
    shapes = {name: tuple(each.shape) for name, each in policy.items()}
    config = architecture(json.loads((root / "policy" / "config.json").read_text()))
    assert config
    expected = memory(stage, resources, config, shapes, stage.max_length)
    for name in ("weights", "gradients", "optimizer"):
        assert getattr(expected, name) == pytest.approx(found.held[name], rel=0.1), name
    require_sent(asked, found, four_workers)


@pytest.fixture(scope="module")
def large(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The inputs with a policy of 295 MB, of which no layer is large."""
    folder = tmp_path_factory.mktemp("large") / "inputs"
    shutil.copytree(root, folder, ignore=shutil.ignore_patterns("policy"))
    tiny.write_policy(folder / "policy", hidden_size=640, num_layers=20)
    return folder


@pytest.mark.parametrize(
    ("sharding", "num_workers", "fields"),
    [
        ("fsdp", 2, {"adapter": LORA}), ("fsdp", 4, {"adapter": LORA}), ("fsdp", 4, LAST_LAYER),
        ("zero3", 2, {"adapter": LORA}), ("zero3", 4, {"adapter": LORA}), ("zero3", 4, LAST_LAYER),
    ],
)  # fmt: skip
def test_no_worker_ever_holds_the_whole_model(
    root: Path, large: Path, tmp_path: Path, sharding, num_workers, fields
) -> None:
    stage = training.method("sft", num_steps=2, global_batch_size=num_workers, **fields)
    resources = replace(
        PLAIN, sharding=sharding, num_workers=num_workers, micro_batch_size=1, save_steps=1, gradient_checkpointing="on"
    )
    asked = Asked(stage=stage, root=root, folder=tmp_path / "imports", resources=resources)
    with zero_group(num_workers) as group:
        group.train(asked)
        found = group.train(replace(asked, root=large, folder=tmp_path / "large", weighs=True))
    whole = sum(each.nbytes for each in weights(large / "policy").values())
    assert max(each.held["own_memory"] for each in found) < whole


@pytest.mark.parametrize("sharding", ["zero1", "zero2", "zero2_offload", "zero3", "zero3_offload"])
@pytest.mark.parametrize(
    ("name", "fields"), [("sft", {}), ("sft", {"precision": "bf16"}), ("dpo", {}), ("sft", {"adapter": LORA})]
)
def test_the_output_of_weights_that_did_not_move_has_the_bytes_that_one_worker_writes_and_it_is_reported(
    root: Path, tmp_path: Path, zero_workers: WorkerGroup, name, fields, sharding
) -> None:
    stage = training.method(name, num_steps=1, learning_rate=1e-60, **fields)
    one = Asked(stage=stage, root=root, folder=tmp_path / "one", resources=PLAIN)
    train(one)
    asked = replace(one, folder=tmp_path / sharding, resources=ZERO.sharded(sharding))
    found = zero_workers.train(asked)
    assert found[0].metrics["weights_unchanged"] == 1
    assert digests_of_weights(asked.folder / "output") == digests_of_weights(one.folder / "output")
    assert same(weights(asked.folder / "output"), weights(root / "policy"))


@pytest.mark.parametrize("sharding", ["zero1", "zero2", "zero2_offload", "zero3", "zero3_offload"])
@pytest.mark.parametrize(("name", "fields"), [("sft", {}), ("sft", {"precision": "bf16"}), ("dpo", {"adapter": LORA})])
def test_the_output_has_the_bytes_that_one_worker_writes_from_the_same_state(
    root: Path, tmp_path: Path, zero_workers: WorkerGroup, name, fields, sharding
) -> None:
    stage = training.method(name, num_steps=4, learning_rate=1e-2, **fields)
    zero = Asked(stage=stage, root=root, folder=tmp_path / sharding, resources=ZERO.sharded(sharding))
    zero_workers.train(replace(zero, stop_after=3))
    left = zero_workers.train(replace(zero, stage=replace(stage, num_steps=3), resume_step=3))  # no step
    assert not left[0].reports
    # One worker writes the weights of the checkpoint, which it does not move.
    state, made = zero.folder / "checkpoints" / "step-3", Made(tmp_path, root)
    policy = made.base() if stage.adapter is None else made.trained(name, made.base(), save="adapter")
    for file in state.glob("*.safetensors"):
        shutil.copy(file, policy.path)
    inputs = policy.path.parents[2] / "inputs" / "of"  # so that an adapter finds its base
    shutil.copytree(root, inputs, ignore=shutil.ignore_patterns("policy"))
    (inputs / "policy").symlink_to(policy.path)
    still = replace(stage, num_steps=1, learning_rate=1e-60, adapter_in="continue" if stage.adapter else None)
    one = Asked(stage=still, root=inputs, folder=tmp_path / "one", resources=PLAIN)
    assert train(one).metrics["weights_unchanged"] == 1
    written, expected = (digests_of_weights(each.folder / "output") for each in (zero, one))
    assert len(expected) == 1 + (stage.adapter is not None)
    assert written == expected
    assert not same(weights(zero.folder / "output"), weights(root / "policy"))


@pytest.mark.parametrize(
    ("architecture", "adapter", "sharding"),
    [
        ("mixtral", None, "zero3"), ("qwen3_moe", None, "zero3"), ("gpt2", BIASES, "zero3"),
        ("gpt2", replace(BIASES, quantization="nf4"), "zero2"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_mixtures_of_experts_and_biases_train_under_zero_as_in_one_process(
    root: Path, tmp_path: Path, zero_workers: WorkerGroup, architecture, adapter, name, sharding
) -> None:
    own = training.with_policy(root, tmp_path / "root", architecture)
    stage = training.method(name, num_steps=4, max_grad_norm=0.1, adapter=adapter)
    asked = Asked(stage=stage, root=own, folder=tmp_path, resources=PLAIN)
    require_same_trajectory(asked, zero_workers, ZERO.sharded(sharding))


def test_steps_without_a_signal_change_no_weight(
    root: Path, tmp_path: Path, two_workers: WorkerGroup, zero_workers: WorkerGroup
) -> None:
    """DeepSpeed's engine takes each step, at a learning rate of 0; plain workers run no backward pass."""
    rewards = {"constant": RewardFunction(function="python:tests.completion_scores.constant")}
    stage = training.method(
        "grpo", rewards=rewards, num_steps=3, weight_decay=0.1, learning_rate=1e-2, lr_schedule="linear",
        warmup_ratio=0.0,
    )  # fmt: skip
    rates = []
    for group, resources in ((two_workers, replace(PLAIN, num_workers=2)), (zero_workers, ZERO)):
        asked = Asked(stage=stage, root=root, folder=tmp_path / str(resources.zero_stage), resources=resources)
        done = group.train(asked)
        rates.append(done[0].metric("learning_rate"))
        assert same(weights(asked.folder / "output"), weights(root / "policy"))
    assert rates[0] == pytest.approx(rates[1]) and rates[0][0] > rates[0][2] > 0  # the schedule goes on


@pytest.mark.parametrize(
    ("name", "adapter", "sharding"),
    [
        ("sft", None, "zero2"), ("dpo", None, "zero2"), ("dpo", replace(LORA, dropout=0.1), "zero2"),
        ("sft", None, "zero3"), ("sft", replace(LORA, dropout=0.1), "zero3"), ("sft", BIASES, "zero3"),
    ],
    ids=["sft", "dpo", "lora", "sft-zero3", "lora-zero3", "biases-zero3"],
)  # fmt: skip
def test_stopped_and_resumed_is_unbroken_to_the_bit(
    root: Path, tmp_path: Path, zero_workers: WorkerGroup, name: str, adapter: Adapter | None, sharding
) -> None:
    stage = training.method(name, num_steps=5, adapter=adapter, lr_schedule="cosine")
    own = training.with_policy(root, tmp_path / "root", "gpt2") if adapter == BIASES else root
    whole = Asked(stage=stage, root=own, folder=tmp_path / "whole", resources=ZERO.sharded(sharding))
    broken = replace(whole, folder=tmp_path / "broken")
    unbroken = zero_workers.train(whole)
    first = zero_workers.train(replace(broken, stop_after=3))
    rest = zero_workers.train(replace(broken, resume_step=3))
    assert first[0].metric("loss") + rest[0].metric("loss") == unbroken[0].metric("loss")
    assert same(weights(broken.folder / "output"), weights(whole.folder / "output"))

    found = Checkpoints(broken.folder / "checkpoints").read(4)
    assert (found.num_workers, found.sharding) == (2, sharding)
    parts = {f"global_step4/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)}
    assert parts | {"rng_state_0.pth", "rng_state_1.pth"} <= found.files.keys()
    assert not any(name.endswith((".py", ".bin")) for name in found.files)
    if adapter is None:  # whole weights in fp32 beside the parts
        assert weights(broken.folder / "checkpoints" / "step-4")["model.norm.weight"].dtype == torch.float32


@pytest.mark.parametrize("sharding", ["zero2", "zero3"])
def test_the_best_model_is_measured_and_loaded_as_without_zero(
    root: Path, tmp_path: Path, two_workers: WorkerGroup, zero_workers: WorkerGroup, sharding
) -> None:
    best = Best(mode="max", every_steps=1)  # the loss falls: the first is the best
    # The first step has a learning rate of 0: the same weights are measured.
    stage = training.method("sft", num_steps=4, warmup_ratio=0.5, precision="bf16", best=best, output="best")
    plain = Asked(stage=stage, root=root, folder=tmp_path / "plain", resources=PLAIN)
    zero = replace(plain, folder=tmp_path / "zero", resources=ZERO.sharded(sharding))
    exact = replace(plain, folder=tmp_path / "exact", stage=replace(stage, precision="fp32"))
    groups = [(two_workers, plain), (zero_workers, zero), (two_workers, exact)]
    bf16, found, fp32 = (group.train(asked)[0].reports[0][1]["held_out_loss"] for group, asked in groups)
    assert abs(found - bf16) < 0.1 * abs(fp32 - bf16)
    best_weights = load_file(zero.folder / "checkpoints" / "step-1" / "model.safetensors")
    if "lm_head.weight" in best_weights:  # tied: saved under one of the names
        best_weights["model.embed_tokens.weight"] = best_weights.pop("lm_head.weight")
    assert same(weights(zero.folder / "output"), best_weights)


@pytest.mark.parametrize(
    ("sharding", "fields"), [("zero1", {}), ("zero2", {}), ("zero3", {}), ("zero2", {"adapter": LORA})]
)
def test_checkpoints_are_scored_beside_the_training(
    root: Path, tmp_path: Path, two_workers: WorkerGroup, zero_workers: WorkerGroup, sharding, fields
) -> None:
    evaluation = Evaluation(every_steps=2, rows=4, max_new_tokens=4, patience=1, metric="unfinished_share")
    stage = training.method("sft", num_steps=6, evaluation=evaluation, **fields)
    plain = Asked(stage=stage, root=root, folder=tmp_path / "plain", resources=PLAIN)
    zero = replace(plain, folder=tmp_path / "zero", resources=replace(PLAIN, sharding=sharding, num_workers=2))
    two_workers.train(plain)
    zero_workers.train(zero)
    whole, parts = map(scores_beside, (plain.folder, zero.folder))
    assert {0, 2, 4} <= whole.keys() & parts.keys()
    assert all(parts[step] == pytest.approx(whole[step], rel=1e-3) for step in (0, 2, 4))
    expected, written = (weights(each.folder / "output") for each in (plain, zero))  # the score of step 4 ended both
    assert all(torch.allclose(each, expected[name], atol=1e-4) for name, each in written.items())


def test_a_checkpoint_in_parts_is_not_gone_on_with_by_others(
    root: Path, tmp_path: Path, two_workers: WorkerGroup, zero_workers: WorkerGroup
) -> None:
    stage = training.method("sft", num_steps=4)
    asked = Asked(stage=stage, root=root, folder=tmp_path, resources=ZERO)
    zero_workers.train(replace(asked, stop_after=2))
    with pytest.raises(ConfigError, match="written with num_workers=2 and sharding=zero2, and num_workers=2 with shar"):
        two_workers.train(replace(asked, resources=PLAIN, resume_step=2))


def test_the_command_stops_refuses_other_workers_and_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    graph = ("~stages.preferences", "~stages.reward", "~stages.dpo", "~stages.evaluate", "~stages.cpt")
    saving = ("resources=cluster", "resources.sharding=zero2", "resources.cpus_per_worker=1", "resources.save_steps=10")
    command = Command(
        tmp_path, *MODEL, *graph, "stages.sft.inputs.policy=base", "stages.sft.method.num_steps=120",
        "stages.sft.method.max_length=64", *write_own_rows(tmp_path)[:2],
    )  # fmt: skip
    process = command.start("run", *saving)
    saved = "artifacts/sft/*/checkpoints/step-10"
    wait_until(lambda: process.poll() is not None or list(tmp_path.glob(saved)), "it saves")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors

    refused = command("plan", "resources.cpus_per_worker=1")
    assert refused.returncode == 2
    assert "stages.sft.resources: its checkpoint of step" in refused.stderr
    assert "set num_workers=2 and sharding=zero2, or start again with restart=[sft]" in refused.stderr
    assert command.states("restart=[sft]")["sft"] == "run"
    assert command.states(*saving)["sft"] == "resume"

    sft = command.run(*saving)["sft"]
    reports = (Path(sft["output"]).parent / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in reports] == list(range(1, 121))
    assert AutoModelForCausalLM.from_pretrained(sft["output"])
    command.run(*saving, f"store={tmp_path}/unbroken")
    assert digests(tmp_path / "artifacts")["sft"] == digests(tmp_path / "unbroken")["sft"]
