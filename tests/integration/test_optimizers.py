"""Every optimizer and schedule trains, reaches the trainer, and survives an interruption to the bit."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tasks.context import Resources
from tasks.method import Optimizer, Schedule, Training
from tasks.train.best import Validation
from tasks.train.loop.saved_state import read_state
from tasks.train.optim.optimizers import OPTIMIZERS
from tests import tiny, training
from tests.stage_folder import StageFolder
from tests.training import same, weights

pytestmark = pytest.mark.usefixtures("one_thread")

RUN_HERE = [name for name, entry in OPTIMIZERS.items() if not entry.needs_gpu]
CONSTANT = Schedule(name="constant", warmup=0.0)
SLOW = pytest.mark.slow
AT_ONCE = Resources(micro_batch_size=8)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inputs with matrices that are large enough for a state in few bits."""
    folder = training.write_inputs(tmp_path_factory.mktemp("inputs"), num_held_out=10)
    shutil.rmtree(folder / "policy")
    tiny.write_policy(folder / "policy", hidden_size=64)
    return folder


def setting(name: str, **fields: object) -> Optimizer:
    package = OPTIMIZERS[name].package
    if package:
        pytest.importorskip(package.module)
    return Optimizer(name=name, **({"rank": 4} if OPTIMIZERS[name].projects else {}), **fields)


def stage(name: str, optimizer: Optimizer, **fields: object) -> Training:
    rate = 1.0 if optimizer.name == "prodigy" else 3e-3
    schedule = Schedule(name="constant" if OPTIMIZERS[optimizer.name].averages else "cosine")
    own = {"num_steps": 4, "learning_rate": rate, "optimizer": optimizer, "schedule": schedule}
    return training.method(name, **{**own, **fields})


@pytest.fixture(scope="module")
def baseline(root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Weights under AdamW."""
    return weights(training.train(stage("sft", Optimizer()), root, tmp_path_factory.mktemp("baseline")).output)


# tests/libraries/tasks/test_optimizers.py saves and loads the state of each.
QUICK = ("adamw_torch_fused", "adafactor", "lion_8bit", "muon")


@pytest.mark.parametrize("name", [pytest.param(each, marks=[] if each in QUICK else SLOW) for each in RUN_HERE])
def test_a_training_resumes_to_the_bit_and_is_that_of_its_optimizer(
    root: Path, tmp_path: Path, baseline: dict[str, torch.Tensor], name: str
) -> None:
    method = stage("sft", setting(name))
    folder = StageFolder(tmp_path / "stage", root, micro_batch_size=8, save_steps=2)
    folder(method)
    unbroken = weights(folder.output)
    assert folder.store.steps() == [2]
    shutil.rmtree(folder.output)
    folder(method, resume=2)
    assert same(weights(folder.output), unbroken)
    assert not same(unbroken, weights(root / "policy"))
    if not name.startswith("adamw_torch_fused"):
        assert name == "adamw_torch" or not same(unbroken, baseline)


@pytest.mark.parametrize(
    "name", ["sft", "dpo", *(pytest.param(each, marks=SLOW) for each in ("ppo", "reward", "grpo", "kto", "distill"))]
)
def test_weights_in_bf16_train_as_in_fp32_and_resume_to_the_bit(root: Path, tmp_path: Path, name: str) -> None:
    """The same arithmetic: what differs is the sum of the gradients of two micro batches, which is rounded to bf16."""
    fields = {"precision": "bf16", "num_steps": 4}
    plain = training.train(training.method(name, **fields), root, tmp_path / "plain", resources=AT_ONCE)
    method = training.method(name, **fields, optimizer=Optimizer(weights="bf16"))
    whole = training.train(method, root, tmp_path / "whole", resources=AT_ONCE)
    same_steps = 2 if name in training.GENERATING else 4  # then rounding has changed a token, and those after it
    assert whole.losses[:same_steps] == pytest.approx(plain.losses[:same_steps], abs=2e-3)
    folder = StageFolder(tmp_path / "stage", root, micro_batch_size=4, save_steps=2)
    folder(method)
    divided = [training.trajectory(each) for _, each in folder.reports]
    assert divided[:same_steps] == pytest.approx(plain.losses[:same_steps], abs=1e-2)
    unbroken = weights(folder.output)
    assert {each.dtype for key, each in unbroken.items() if not key.startswith("score")} == {torch.bfloat16}
    shutil.rmtree(folder.output)
    folder(method, resume=2)
    assert same(weights(folder.output), unbroken)


@pytest.mark.parametrize("name", ["schedule_free_adamw", "schedule_free_sgd"])
def test_checkpoints_and_the_output_of_a_schedule_free_optimizer_hold_its_average(
    root: Path, tmp_path: Path, name: str
) -> None:
    method = stage("sft", setting(name), schedule=CONSTANT)
    whole, short = (StageFolder(tmp_path / each, root, save_steps=2) for each in ("whole", "short"))
    whole(method)
    short(replace(method, num_steps=2))
    assert same(load_file(whole.store.path(2) / "model.safetensors"), weights(short.output))
    state = read_state(whole.store.path(2), rank=0)["optimizer"]["state"]
    assert all({"z", "trained"} <= each.keys() for each in state.values())


@pytest.mark.parametrize(
    ("schedule", "shares"),
    [
        (Schedule(name="polynomial", power=2.0, min_learning_rate=3e-4, warmup=1), [0, 1, 0.5, 0.2]),
        (Schedule(name="warmup_stable_decay", decay=2, decay_type="linear", warmup=1), [0, 1, 1, 0.5]),
        (Schedule(name="constant_with_warmup", warmup=2), [0, 0.5, 1, 1]),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_schedule_reaches_the_trainer(root: Path, tmp_path: Path, schedule: Schedule, shares: list[float]) -> None:
    run = training.train(stage("sft", Optimizer(), schedule=schedule), root, tmp_path / "output")
    assert [metrics["learning_rate"] / 3e-3 for _, metrics in run.reports] == pytest.approx(shares)


def test_the_plateau_follows_the_validation_and_resumes_to_the_bit(root: Path, tmp_path: Path) -> None:
    schedule = Schedule(name="reduce_lr_on_plateau", warmup=1, factor=0.5, patience=0, min_learning_rate=0.125)
    method = stage(
        "sft", Optimizer(name="sgd"), num_steps=8, learning_rate=0.5, schedule=schedule,
        validation=Validation(every_steps=1), max_grad_norm=1e9,
    )  # fmt: skip
    folder = StageFolder(tmp_path / "stage", root, save_steps=4)
    folder(method)
    unbroken, reports = weights(folder.output), folder.reports[:]
    losses = [metrics["val/loss"] for _, metrics in reports]
    expected, rate, best = [0.0], 0.5, losses[0]
    for loss in losses[1:]:
        expected.append(rate)
        if loss < best * (1 - 1e-4):
            best = loss
        else:
            rate = max(rate / 2, 0.125)
    assert [metrics["learning_rate"] for _, metrics in reports] == pytest.approx(expected)
    assert expected[-1] < 0.5, "the loss never rose, so nothing was tested"
    shutil.rmtree(folder.output)
    folder(method, resume=4)
    assert same(weights(folder.output), unbroken)
    assert [metrics["learning_rate"] for _, metrics in folder.reports[8:]] == pytest.approx(expected[4:])
