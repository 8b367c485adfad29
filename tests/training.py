"""Runs a method on tiny rows and a tiny policy, and collects what it reported."""

import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lineage.artifact import Kind
from tasks.context import Metrics, Resources, TrainContext
from tasks.judgement import canary
from tasks.judgement.canary import FIELDS, GENERATED, METHODS, OWN
from tasks.method import Input, Inputs, Training
from tests import tiny, tiny_models

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from transformers import Trainer

    from tasks.train.run import TrainingRun

__all__ = ["FIELDS", "GENERATED", "METHODS", "OWN"]

# Methods that train as another does: what all methods share is a quick test of that one, and a slow one of these.
TRAINED_LIKE = {"kto": "orpo", "simpo": "orpo", "cpo": "orpo", "taid": "distill", "rloo": "grpo", "online_dpo": "grpo"}
NAMES = [pytest.param(name, marks=[pytest.mark.slow] if name in TRAINED_LIKE else []) for name in METHODS]
# One of each trainer, for quick tests of what all methods share.
FEW = [
    pytest.param(name, marks=[] if name in ("sft", "dpo", "grpo", "ppo") else [pytest.mark.slow]) for name in METHODS
]
REINFORCED = ("grpo", "rloo", "online_dpo")
GENERATING = ("on_policy_distill", "ppo", *REINFORCED)


def at_once(stage: Training) -> Resources:
    """All rows of a step in one micro batch, or 8: half the time of two."""
    return Resources(micro_batch_size=math.gcd(stage.global_batch_size, 8))


def method(name: str, **fields: object) -> Training:
    """The named method with fields for tiny models; PPO passes over its completions twice, and not four times."""
    return canary.method(name, **({"num_ppo_epochs": 2, **fields} if name == "ppo" else fields))


ROWS = {
    "text": tiny.text_rows, "conversations": tiny.conversation_rows, "preferences": tiny.preference_rows,
    "unpaired": tiny.unpaired_rows, "prompts": tiny.prompt_rows,
}  # fmt: skip


def write_models(root: Path) -> None:
    """A policy and a teacher, whose distribution is far from the policy's."""
    tiny.write_policy(root / "policy")
    tiny.write_policy(root / "teacher", hidden_size=48, seed=1, initializer_range=0.2)


def write_inputs(root: Path, *, num_rows: int = 40, num_held_out: int = 0) -> Path:
    """A policy, a teacher and rows of every kind under ``root``."""
    write_models(root)
    for name, rows in ROWS.items():
        found = rows(num_rows + num_held_out)
        tiny.write_rows(root / name, found[:num_rows], found[num_rows:])
    return root


def with_policy(root: Path, folder: Path, architecture: str) -> Path:
    """The inputs of ``write_inputs`` with a random policy of another architecture, without dropout."""
    shutil.copytree(root, folder)
    shutil.rmtree(folder / "policy")
    no_dropout = {f"{each}_pdrop": 0.0 for each in ("attn", "embd", "resid")} if architecture == "gpt2" else {}
    tiny_models.write_model(folder / "policy", architecture, **no_dropout)
    return folder


def inputs(root: Path, stage: Training, *, policy: Path | None = None) -> Inputs:
    """Every slot of a method, filled from ``write_inputs``; an optional one where the test wrote its artifact."""
    found = {}
    for slot, kind in stage.consumes.items():
        path = root / ("teacher" if slot == "teacher" else kind.value)
        if kind == Kind.CHECKPOINT and slot != "teacher":
            path = policy or root / "policy"
        if slot in stage.optional and not path.exists():
            continue
        found[slot] = Input(name=path.name, kind=kind, fingerprint=f"{path.name:f<64}", path=path)
    return found


def trajectory(metrics: Metrics) -> float:
    """The loss of a step; on a policy's own completions, whose loss is 0 by construction, the norm of its gradient."""
    is_zero = "reward" in metrics and "loss/value" not in metrics  # PPO has a loss of values
    return metrics["grad_norm" if is_zero else "loss"]


@dataclass
class Trained:
    """What a run left behind."""

    output: Path
    metrics: Metrics
    reports: list[tuple[int, Metrics]] = field(default_factory=list)

    @property
    def losses(self) -> list[float]:
        return [trajectory(metrics) for _, metrics in self.reports]


@contextmanager
def one_thread() -> Iterator[None]:
    """Tiny matrices: more threads only wait for each other."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def train(
    stage: Training, root: Path, output: Path, *, policy: Path | None = None, resources: Resources | None = None,
    most_rows: int | None = None,
) -> Trained:  # fmt: skip
    """Runs a method in this process."""
    reports: list[tuple[int, Metrics]] = []
    ctx = TrainContext(
        output_dir=output,
        work_dir=output.parent / "work",
        resources=resources or at_once(stage),
        report=lambda step, metrics: reports.append((step, dict(metrics))),
        most_rows=most_rows,
    )
    with one_thread():
        metrics = stage.run(inputs(root, stage, policy=policy), ctx)
    return Trained(output=output, metrics=metrics, reports=reports)


def fitted(stage: Training, given: Inputs, output: Path, **fields: Any) -> "tuple[TrainingRun, Trainer, list[float]]":
    """Trains and saves nothing: the run, its trainer with the model as it is in training, and the losses."""
    from tasks.train.run import TrainingRun

    ctx = TrainContext(
        output_dir=output, work_dir=output.parent / "work", report=lambda _step, _metrics: None,
        **{"resources": at_once(stage), **fields},
    )  # fmt: skip
    run = TrainingRun(stage, given, ctx)
    trainer = stage.trainer(run)
    run.fit(trainer)
    return run, trainer, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def answers(model: "Module") -> "Tensor":
    """The last hidden states: a trainer replaces the forward of the head."""
    import torch

    with torch.no_grad():
        return model.eval().base_model(input_ids=torch.arange(3, 60)[None]).last_hidden_state


def weights(output: Path) -> "dict[str, Tensor]":
    from safetensors.torch import load_file

    return load_file(output / "model.safetensors")


def same(left: "dict[str, Tensor]", right: "dict[str, Tensor]") -> bool:
    """Whether two models are equal to the bit."""
    assert left, "no weight is compared"
    return left.keys() == right.keys() and all(bool((left[name] == right[name]).all()) for name in left)
