from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import tasks as methods
from tasks.context import Resources, TrainContext
from tasks.sft import SFT
from tasks.train import fit as module
from tasks.train import kernels


def trainer(state, args):
    return SimpleNamespace(model=None, state=state, args=args, _save_checkpoint=None)


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_worker_that_writes_checkpoints_discards_one_that_is_half_written(tmp_path, monkeypatch, rank):
    def fails(*_):
        raise OSError("the connection to another worker is gone")

    monkeypatch.setattr(module, "_train", fails)
    monkeypatch.setattr(module, "step_in_fp32", lambda model: None)
    draft = tmp_path / "checkpoint-4"
    draft.mkdir()
    state, args = SimpleNamespace(global_step=3), SimpleNamespace(max_steps=8, deepspeed=None)
    context = TrainContext(output_dir=tmp_path, work_dir=tmp_path, rank=rank, world_size=2)
    with pytest.raises(OSError, match="connection"):
        module.fit(SFT(), trainer(state, args), {}, context, 40)
    assert draft.exists() == (rank == 1)


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_training_is_deterministic_unless_resources_say_otherwise(tmp_path, monkeypatch, deterministic):
    found, products = [], []
    monkeypatch.setattr(kernels, "is_exact", lambda: True)

    def train(*_):
        found.append(torch.are_deterministic_algorithms_enabled())
        products.append(torch.get_float32_matmul_precision())
        raise InterruptedError

    monkeypatch.setattr(module, "_train", train)
    monkeypatch.setattr(module, "step_in_fp32", lambda model: None)
    state, args = SimpleNamespace(global_step=0), SimpleNamespace(max_steps=8, deepspeed=None)
    resources = Resources(deterministic=deterministic)
    context = TrainContext(output_dir=tmp_path, work_dir=tmp_path, resources=resources)
    with pytest.raises(InterruptedError):
        module.fit(SFT(), trainer(state, args), {}, context, 40)
    assert found == [deterministic]
    assert products == ["medium"]


@pytest.mark.parametrize(
    "name",
    ["cpt", "sft", "dpo", "reward_model", "orpo", "simpo", "cpo", "rloo", "online_dpo", "distill", "taid",
     "on_policy_distill"],
)  # fmt: skip
def test_the_file_of_a_method_has_15_to_60_lines(name):
    assert 15 <= len(Path(methods.__path__[0], f"{name}.py").read_text().splitlines()) <= 60
