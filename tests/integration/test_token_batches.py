"""Micro batches by tokens: the trajectory is that of any other division, and a step survives a lack of memory."""

import pickle
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from transformers import Trainer

from lineage.errors import NoMemoryError, PipelineError
from tasks.context import Resources
from tasks.dpo import DPO
from tasks.method import Training
from tasks.sft import SFT
from tasks.train import run as training_run
from tasks.train.loop.token_batches import _FILL, Budget, divide
from tasks.train.run import TrainingRun
from tests import training
from tests.worker_group import Asked, WorkerGroup

AUTO = Resources(micro_batch_size="auto")


@pytest.fixture(autouse=True)
def _few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_run, "tokens_at_once", lambda *args: 100)


@pytest.mark.parametrize("name", training.FEW)
def test_micro_batches_by_tokens_keep_the_trajectory(root: Path, tmp_path: Path, name: str) -> None:
    stage = training.method(name)
    whole, divided = (
        training.train(stage, root, tmp_path / str(resources.micro_batch_size), resources=resources)
        for resources in (Resources(micro_batch_size=8), AUTO)
    )
    assert divided.losses == pytest.approx(whole.losses, abs=1e-4)
    for (_, found), (_, expected) in zip(divided.reports, whole.reports, strict=True):
        shared = found.keys() & expected.keys()
        assert {each for each in shared if "reward" in each or each in ("grad_norm", "num_tokens", "loss")}
        for each in shared - {"tokens_per_second", "tokens_per_second_per_worker", "memory_gib", "mfu"}:
            assert found[each] == pytest.approx(expected[each], rel=2e-3, abs=2e-4), each


def test_the_first_step_corrects_the_budget_by_the_memory_that_it_took(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a GPU, whose memory is simulated: four times what the first step took beside the model."""
    stage, taken = training.method("sft"), 4 * 10**6
    expected = training.train(stage, root, tmp_path / "whole", resources=Resources(micro_batch_size=8))
    whole = sum(each.numel() * 4 for each in training.weights(expected.output).values())  # its gradients
    monkeypatch.setattr(training_run, "Budget", lambda **fields: Budget(**{**fields, "measured": True}))
    for name, found in {
        "memory_allocated": 0, "max_memory_allocated": whole + taken, "memory_reserved": whole,
        "mem_get_info": (round((whole + 4 * taken) / _FILL) - whole, 0),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda device, found=found: found)
    with caplog.at_level("INFO"):
        corrected = training.train(stage, root, tmp_path / "corrected", resources=AUTO)
    assert corrected.losses == pytest.approx(expected.losses, abs=1e-4)
    (logged,) = (each.getMessage() for each in caplog.records if "bytes_per_token" in each.getMessage())
    tokens, before, per_token = (float(each.partition("=")[2]) for each in logged.split())
    assert before == 100
    assert tokens == pytest.approx(4 * taken / per_token, rel=0.01)  # 4 times those of the largest micro batch
    assert 200 < tokens <= 400


@pytest.mark.parametrize("name", [pytest.param("sft", marks=pytest.mark.slow), "dpo"])
def test_workers_get_equal_rows_of_about_equal_tokens(
    root: Path, tmp_path: Path, two_workers: WorkerGroup, name: str
) -> None:
    stage = training.method(name)
    alone = training.train(stage, root, tmp_path / "alone", resources=Resources(micro_batch_size=8)).losses
    asked = Asked(stage=stage, root=root, folder=tmp_path / "two", resources=AUTO)
    ranks = [[training.trajectory(each) for _, each in done.reports] for done in two_workers.train(asked)]
    assert ranks[0] == ranks[1]
    assert ranks[0] == pytest.approx(alone, abs=1e-4)


@pytest.mark.parametrize("name", ["sft", "dpo", pytest.param("kto", marks=pytest.mark.slow)])
def test_a_step_without_memory_is_repeated_with_fewer_tokens(
    root: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stage = training.method(name)
    expected = training.train(stage, root, tmp_path / "whole", resources=Resources(micro_batch_size=8))
    monkeypatch.setattr(training_run, "tokens_at_once", lambda *args: 10_000)
    ended, original, most = list[int](), Trainer.training_step, {"dpo": 400}.get(name, 120)

    def step(trainer: Trainer, model: torch.nn.Module, inputs: dict[str, torch.Tensor], *rest: object) -> torch.Tensor:
        loss = original(trainer, model, inputs, *rest)  # gradients are there, and metrics
        torch.rand(3)  # as dropout would draw
        tokens = int(inputs["attention_mask"].sum())
        if tokens > most:
            ended.append(tokens)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a capacity of")
        return loss

    monkeypatch.setattr(Trainer, "training_step", step)
    with caplog.at_level("WARNING"):
        found = training.train(stage, root, tmp_path / "halved", resources=AUTO)
    assert ended
    assert found.losses == pytest.approx(expected.losses, abs=1e-4)
    assert [each["num_tokens"] for _, each in found.reports] == [each["num_tokens"] for _, each in expected.reports]
    reported = [each.getMessage() for each in caplog.records if "state=out_of_memory" in each.getMessage()]
    assert len(reported) == len(ended)
    assert reported[0].startswith("step=1 state=out_of_memory tokens_at_once=")
    assert reported[0].endswith("and the step is repeated (CUDA out of memory)")


def without_memory(trainer: Trainer, rank: int) -> Trainer:
    """Runs out of memory once in each of the first steps, each time on another worker, while the other continues."""
    plain, left = trainer.compute_loss, {0: 1, 1: 0}  # step -> rank

    def compute_loss(model: torch.nn.Module, *args: object, **kwargs: object) -> object:
        if model.training and left.get(trainer.state.global_step) == rank:
            del left[trainer.state.global_step]
            raise torch.OutOfMemoryError("CUDA out of memory. Tried")
        return plain(model, *args, **kwargs)

    trainer.compute_loss = compute_loss
    return trainer


@dataclass(frozen=True, kw_only=True)
class ShortSFT(SFT):
    def trainer(self, run: TrainingRun) -> Trainer:
        return without_memory(super().trainer(run), run.ctx.rank)


@dataclass(frozen=True, kw_only=True)
class ShortDPO(DPO):
    def trainer(self, run: TrainingRun) -> Trainer:
        return without_memory(super().trainer(run), run.ctx.rank)


@pytest.mark.parametrize("short", [pytest.param(ShortSFT, marks=pytest.mark.slow), ShortDPO])
def test_all_workers_repeat_a_step_that_one_has_no_memory_for(
    root: Path, tmp_path: Path, two_workers: WorkerGroup, short: type[Training]
) -> None:
    stage = short(**training.FIELDS)  # type: ignore[arg-type]
    name = "sft" if short is ShortSFT else "dpo"
    alone = training.train(training.method(name), root, tmp_path / "alone", resources=Resources(micro_batch_size=8))
    asked = Asked(stage=stage, root=root, folder=tmp_path / "two", resources=replace(AUTO, num_workers=2))
    ranks = [done.reports for done in two_workers.train(asked)]
    assert [each["loss"] for _, each in ranks[0]] == [each["loss"] for _, each in ranks[1]]
    assert [each["loss"] for _, each in ranks[0]] == pytest.approx(alone.losses, abs=1e-4)
    for metric in ("num_tokens", "grad_norm"):
        expected = [each[metric] for _, each in alone.reports]
        assert [each[metric] for _, each in ranks[0]] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("name", ["grpo", "online_dpo", "ppo", "sft"])
def test_where_no_step_can_be_repeated_a_training_resumes_with_fewer_rows(
    root: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With completions, in a loop of its own, and (SFT) with ZeRO or FSDP2."""
    stage = training.method(name)
    monkeypatch.setattr(training_run, "tokens_at_once", lambda *args: 10_000)

    by_tokens = list[bool]()

    def loop(self: Training, run: TrainingRun) -> None:
        run.policy if self.has_own_loop else self.trainer(run)
        by_tokens.append(run._divides_by_tokens)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(type(stage), "loop", loop)
    with pytest.raises(NoMemoryError) as caught:
        training.train(stage, root, tmp_path / "auto", resources=AUTO)
    assert caught.value.rows == 4
    assert str(caught.value) == "out of memory with 8 rows in a forward pass (CUDA out of memory)"
    assert pickle.loads(pickle.dumps(caught.value)).rows == 4
    with pytest.raises(NoMemoryError, match="with 4 rows in a forward pass") as caught:  # the attempt after it
        training.train(stage, root, tmp_path / "again", resources=AUTO, most_rows=4)
    assert caught.value.rows == 2
    assert by_tokens == [name == "sft", False]
    monkeypatch.setattr(training_run, "tokens_at_once", lambda *args: 1)
    with pytest.raises(PipelineError, match=r"with \d rows in a forward pass, the fewest"):
        training.train(stage, root, tmp_path / "fewest", resources=AUTO)
    with pytest.raises(torch.OutOfMemoryError):  # a number that was set stays
        training.train(stage, root, tmp_path / "set", resources=Resources(micro_batch_size=8))


def test_a_row_that_does_not_fit_fails_with_what_helps(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried")

    monkeypatch.setattr(Trainer, "training_step", fail)
    with pytest.raises(PipelineError, match=r"out of memory with one row of \d+ tokens .*gradient_checkpointing=on"):
        training.train(training.method("sft"), root, tmp_path / "output", resources=AUTO)


def test_rows_are_divided_by_their_tokens() -> None:
    tokens = [900, 10, 20, 30, 40, 400, 300, 200]
    found = divide(tokens, 1, 1000)
    sums = [sum(tokens[index] for index in group) for (group,) in found]
    assert sorted(index for (group,) in found for index in group) == list(range(8))
    assert len(found) == 2 and max(sums) <= 1000
    assert min(sums) >= 900
    assert divide([2000, 10], 1, 1000) == [[[0]], [[1]]]
    assert divide(tokens, 1, 10**6) == [[list(range(8))]]


def test_every_worker_has_as_many_rows_and_tokens_as_the_others() -> None:
    tokens = [900, 10, 20, 30, 40, 400, 300, 200]
    for group in divide(tokens, 2, 500):
        assert len({len(own) for own in group}) == 1
    whole = divide(tokens, 2, 10**6)
    first, second = (sum(tokens[index] for index in own) for own in whole[0])
    assert abs(first - second) <= 500  # 900 and 400 are a pair


def test_padded_rows_of_similar_length_are_together() -> None:
    tokens = [100, 10, 90, 12, 95, 11]
    assert divide(tokens, 1, 300, padded=True) == [[[0, 2, 4]], [[1, 3, 5]]]
