"""What all trainings share: deterministic kernels, the order of rows, the metrics of a step."""

import gc
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.data_loader import SeedableRandomSampler
from transformers import PretrainedConfig, set_seed

import tasks as methods
from lineage.errors import PipelineError
from tasks.context import Resources, TrainContext
from tasks.sft import SFT
from tasks.train import run as module
from tasks.train.kernels import machine as kernels
from tasks.train.kernels.machine import collecting_between_steps, deterministic_kernels
from tasks.train.loop.callbacks import Jumps, step_metrics
from tasks.train.run import row_order


def not_deterministic() -> torch.Tensor:
    return torch.nn.functional.max_unpool2d(torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1, 1, dtype=torch.int64), 2)


def test_an_operation_that_is_not_deterministic_is_refused_with_the_remedy():
    with (
        pytest.raises(PipelineError, match=r"max_unpooling2d.* is not deterministic.*resources.deterministic=false"),
        deterministic_kernels(True),
    ):
        not_deterministic()
    assert not torch.are_deterministic_algorithms_enabled()
    not_deterministic()


def test_it_is_allowed_where_that_is_set_and_other_errors_are_raised_as_they_are(monkeypatch):
    with deterministic_kernels(False):
        assert not_deterministic().tolist() == [[[[1.0, 0.0], [0.0, 0.0]]]]
    monkeypatch.setenv("FLASH_ATTENTION_DETERMINISTIC", "0")
    with deterministic_kernels(True):
        assert os.environ["FLASH_ATTENTION_DETERMINISTIC"] == "1"
    with pytest.raises(RuntimeError, match="out of memory"), deterministic_kernels(True):
        raise RuntimeError("out of memory")
    assert os.environ["FLASH_ATTENTION_DETERMINISTIC"] == "0"


def trainer(state, args):
    model = torch.nn.Linear(1, 1)
    model.config = PretrainedConfig()
    added = {"add_callback": lambda _callback: None}
    return SimpleNamespace(model=model, state=state, args=args, _save_checkpoint=None, **added)


def fit(context, trainer):
    run = module.TrainingRun(SFT(), {}, context)
    run.__dict__ |= {"_start": trainer, "rows": range(40)}
    run.fit(trainer)


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_training_is_deterministic_unless_resources_say_otherwise(tmp_path, monkeypatch, deterministic):
    found, products = [], []
    monkeypatch.setattr(kernels, "is_exact", lambda: True)

    def train(*_):
        found.append(torch.are_deterministic_algorithms_enabled())
        products.append(torch.get_float32_matmul_precision())
        raise InterruptedError

    monkeypatch.setattr(module.TrainingRun, "_take_steps", train)
    monkeypatch.setattr(module, "step_in_fp32", lambda model: None)
    state, args = SimpleNamespace(global_step=0), SimpleNamespace(max_steps=8, deepspeed=None)
    resources = Resources(deterministic=deterministic)
    context = TrainContext(output_dir=tmp_path, work_dir=tmp_path, resources=resources)
    with pytest.raises(InterruptedError):
        fit(context, trainer(state, args))
    assert found == [deterministic]
    assert products == ["medium"]


@pytest.mark.parametrize(
    "name",
    ["cpt", "sft", "reward_model", "orpo", "simpo", "cpo", "rloo", "online_dpo", "distill", "taid",
     "on_policy_distill"],
)  # fmt: skip
def test_the_file_of_a_method_has_15_to_60_lines(name):
    assert 15 <= len(Path(methods.__path__[0], f"{name}.py").read_text().splitlines()) <= 60


def test_the_order_of_rows_is_one_list_the_one_that_a_plain_trainer_draws():
    order = row_order(7, 17, seed=3)
    first, second, rest = order[:7], order[7:14], order[14:]
    assert sorted(first) == sorted(second) == list(range(7))
    assert first != second and len(rest) == 3
    assert order[:9] == row_order(7, 9, seed=3)
    assert row_order(20, 20, seed=0) != row_order(20, 20, seed=1)
    set_seed(5)
    sampler = SeedableRandomSampler(list(range(30)))  # as accelerate makes it of the Trainer's RandomSampler
    assert list(sampler) == row_order(30, 30, seed=5)
    assert torch.initial_seed() == 5


def entry(step, **more):
    return {"step": step, "loss": float(step), "num_tokens": 1.0, "learning_rate": 0.1, **more}


def test_the_last_steps_count_and_of_held_out_rows_the_step_itself():
    log = [entry(1), entry(2, held_out_loss=5.0), {"step": 2, "train_runtime": 9.0}, entry(3)]
    assert step_metrics(log, 2) == {"loss": 1.5, "held_out_loss": 5.0}
    assert step_metrics(log, 3) == {"loss": 2.0}
    log = [entry(step, **{"sampler/weights_step": step - 1.0}) for step in range(1, 31)]
    assert step_metrics(log, 30) == {"loss": 25.5, "sampler/weights_step": 29.0}


def test_a_metric_that_some_steps_lack_is_the_mean_of_the_others():
    log = [entry(1, kl=1.0), entry(2), entry(3, kl=2.0), entry(4)]
    assert step_metrics(log, 4) == {"loss": 2.5, "kl": 1.5}


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_worker_that_writes_checkpoints_discards_one_that_is_half_written(tmp_path, monkeypatch, rank):
    def fails(*_):
        raise OSError("the connection to another worker is gone")

    monkeypatch.setattr(module.TrainingRun, "_take_steps", fails)
    monkeypatch.setattr(module, "step_in_fp32", lambda model: None)
    draft = tmp_path / "checkpoint-4"
    draft.mkdir()
    state, args = SimpleNamespace(global_step=3), SimpleNamespace(max_steps=8, deepspeed=None)
    context = TrainContext(output_dir=tmp_path, work_dir=tmp_path, rank=rank, world_size=2)
    with pytest.raises(OSError, match="connection"):
        fit(context, trainer(state, args))
    assert draft.exists() == (rank == 1)


def test_the_rows_of_a_step_whose_loss_jumps_are_logged_and_of_no_other(caplog):
    jumps = Jumps(lambda step: f"rows of {step}")
    losses = [1.0 + 0.01 * (step % 3) for step in range(60)]
    losses[5] = 9.0  # before it is known how much steps vary
    losses[40], losses[50] = 2.0, float("nan")
    for step, loss in enumerate(losses):
        jumps.on_log(None, SimpleNamespace(global_step=step), None, {"loss": loss})
    jumps.on_log(None, SimpleNamespace(global_step=60), None, {"train_runtime": 1.0})
    assert [record.getMessage() for record in caplog.records] == [
        "step=40 loss=2 state=jumped rows=rows of 40", "step=50 loss=nan state=jumped rows=rows of 50",
    ]  # fmt: skip


def test_garbage_is_collected_between_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    collected: list[int] = []
    monkeypatch.setattr(kernels, "_COLLECT_SECONDS", 0.0)
    monkeypatch.setattr(gc, "collect", lambda: collected.append(1))
    with collecting_between_steps(enabled=False) as collect:
        collect()
        assert gc.isenabled() and not collected
    with collecting_between_steps(enabled=True) as collect:
        assert not gc.isenabled() and gc.get_freeze_count()
        before = len(collected)
        collect()
        assert len(collected) == before + 1
    assert gc.isenabled() and not gc.get_freeze_count()
