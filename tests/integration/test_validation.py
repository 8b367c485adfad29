"""The loss on held-out rows while a stage trains: what is logged, and when it ends the training."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from lineage.errors import DataError, StoppedError
from tasks.method import Adapter, Validation
from tasks.train.loop import evaluation as training_loop
from tests import training
from tests.stage_folder import StageFolder
from tests.training import same, weights

STEADY = {"num_steps": 9, "lr_schedule": "constant", "warmup_ratio": 0.0}


@pytest.fixture
def rising(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss on held-out rows rises by 10 a step, whatever is trained."""
    measure = training_loop.held_out_loss
    monkeypatch.setattr(
        training_loop,
        "held_out_loss",
        lambda trainer, *given: measure(trainer, *given) + 10 * trainer.state.global_step,
    )


def measured(ran: StageFolder) -> dict[int, float]:
    return {step: metrics["val/loss"] for step, metrics in ran.reports if "val/loss" in metrics}


@pytest.mark.parametrize(
    "name", [*(pytest.param(each, marks=pytest.mark.slow) for each in ("cpt", "reward")), "sft", "dpo"]
)
def test_every_method_logs_and_reports_the_loss_and_trains_as_without(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    stage = training.method(name, num_steps=3, adapter=Adapter(rank=2, alpha=4, dropout=0.5))
    plain, ran = StageFolder(tmp_path / "plain", root), StageFolder(tmp_path / "ran", root)
    plain(stage)
    with caplog.at_level(logging.INFO):
        metrics = ran(replace(stage, validation=Validation(every_steps=2)))
    losses = measured(ran)
    assert list(losses) == [2, 3]
    assert [message for message in caplog.messages if message.startswith("[val]")] == [
        f"[val] step {step} | epoch 0 | loss {loss:.4f}" for step, loss in losses.items()
    ]
    assert metrics["val/loss"] == losses[3]
    assert same(weights(ran.output), weights(plain.output))


def test_by_epochs_and_on_fewer_rows(root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stage = training.method("sft", num_steps=None, num_epochs=1.4)  # of 40 rows
    whole, some = StageFolder(tmp_path / "whole", root), StageFolder(tmp_path / "some", root)
    with caplog.at_level(logging.INFO):
        whole(replace(stage, validation=Validation(every_epochs=0.5)))
    some(replace(stage, validation=Validation(every_epochs=0.5, max_rows=3)))
    assert list(measured(whole)) == list(measured(some)) == [3, 5, 7]
    assert set(measured(whole).values()).isdisjoint(measured(some).values())
    assert [message.split(" | ")[1] for message in caplog.messages if "[val]" in message] == [
        "epoch 0", "epoch 0", "epoch 1",
    ]  # fmt: skip


@pytest.mark.usefixtures("rising")
def test_patience_ends_a_training_that_no_longer_improves_whatever_interrupts_it(root: Path, tmp_path: Path) -> None:
    stage = training.method("sft", **STEADY, validation=Validation(every_steps=2, patience=2))
    whole = StageFolder(tmp_path / "whole", root)
    metrics = whole(stage)
    assert metrics["ended_early_at_step"] == metrics["steps"] == 6.0  # two after that of step 2
    assert list(measured(whole)) == [2, 4, 6]
    assert not whole.store.steps()

    broken = StageFolder(tmp_path / "broken", root, save_steps=1)
    with pytest.raises(StoppedError):
        broken(stage, should_stop=lambda: len(broken.reports) == 4)
    resumed = broken(stage, resume=5)
    assert resumed["ended_early_at_step"] == 6.0
    assert broken.store.steps() == [1, 2, 3, 4, 5]
    assert measured(broken) == measured(whole)
    assert same(weights(broken.output), weights(whole.output))


@pytest.mark.usefixtures("rising")
def test_a_stop_at_the_step_that_patience_ends_finishes_the_stage(root: Path, tmp_path: Path) -> None:
    ran = StageFolder(tmp_path, root)
    stage = training.method("sft", **STEADY, validation=Validation(every_steps=2, patience=1))
    metrics = ran(stage, should_stop=lambda: len(ran.reports) == 3)
    assert metrics["ended_early_at_step"] == 4.0
    assert not ran.store.steps() and (ran.output / "model.safetensors").exists()


@pytest.mark.usefixtures("rising")
def test_the_best_of_the_measured_models_is_the_output_of_one_that_ended_early(root: Path, tmp_path: Path) -> None:
    ran = StageFolder(tmp_path, root)
    stage = training.method("sft", **STEADY, validation=Validation(every_steps=2, patience=2), output="best")
    metrics = ran(stage)
    assert (metrics["best_step"], metrics["ended_early_at_step"]) == (2.0, 6.0)
    assert metrics["val/loss"] == metrics["held_out_loss"] == measured(ran)[2]
    assert ran.store.steps() == [2]
    assert same(load_file(ran.store.path(2) / "model.safetensors"), weights(ran.output))


def test_without_held_out_rows_it_is_refused_before_the_first_step(root: Path, tmp_path: Path) -> None:
    ran = StageFolder(tmp_path, training.write_inputs(tmp_path / "bare"))
    with pytest.raises(DataError, match=r"^validation: 'conversations' has no held-out row .*set validation=null"):
        ran(training.method("sft", validation=Validation(every_steps=2)))
    assert not ran.reports
