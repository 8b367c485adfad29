"""A learning rate that follows the loss: what it does to a training, where it is recorded, and how it is resumed."""

import logging
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lineage.errors import StoppedError
from tasks.judgement import canary
from tasks.method import Adapter, Adaptive, Schedule
from tasks.train.best import Best
from tasks.train.loop import checkpointing, evaluation
from tests import training
from tests.stage_folder import StageFolder
from tests.training import same, weights

RATE = 3e-3
LORA = Adapter(rank=2, alpha=4, dropout=0.5)


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """Step -> the loss that the watch is shown in place of 2.0, or of 2.1 at every other step."""
    shown: dict[int, float] = {}
    observe = evaluation.LossWatch.observe

    def scripted(self: evaluation.LossWatch, step: int, loss: float, *, can_return: bool) -> object:
        return observe(self, step, shown.get(step, 2.0 + step % 2 / 10), can_return=can_return)

    monkeypatch.setattr(evaluation.LossWatch, "observe", scripted)
    return shown


def stage(name: str = "sft", *, num_steps: int = 8, best: Best | None = None, adapter: Adapter | None = None, **fields):
    adaptive = Adaptive(**{"start_steps": 2, "plateau_steps": None, "recovery_steps": 2, **fields})
    schedule = Schedule(name="constant", warmup=0.0, adaptive=adaptive)
    return training.method(name, learning_rate=RATE, num_steps=num_steps, schedule=schedule, best=best, adapter=adapter)


def rates(ran: StageFolder) -> dict[int, float]:
    return {step: metrics["learning_rate"] / RATE for step, metrics in ran.reports if "learning_rate" in metrics}


def test_a_spike_changes_the_steps_after_it_and_is_recorded(
    root: Path, tmp_path: Path, losses: dict[int, float], caplog: pytest.LogCaptureFixture
) -> None:
    calm = StageFolder(tmp_path / "calm", root)
    calm(stage(num_steps=6))
    losses[4] = 9.0
    ran = StageFolder(tmp_path / "ran", root)
    with caplog.at_level(logging.WARNING):
        metrics = ran(stage(num_steps=6))
    assert rates(ran) == pytest.approx({1: 1, 2: 1, 3: 1, 4: 1, 5: 0.5, 6: 0.75})
    assert [m["loss"] for _, m in ran.reports[:5]] == [m["loss"] for _, m in calm.reports[:5]]
    assert not same(weights(ran.output), weights(calm.output))
    (line,) = [message for message in caplog.messages if message.startswith("[adaptive]")]
    assert line.startswith("[adaptive] step 4 | spike | loss ") and line.endswith("learning rate x 0.5")
    assert [step for step, each in ran.reports if "adaptive/spike" in each] == [4]
    assert metrics["adaptive/interventions"] == 1 and metrics["adaptive/spike/step_4"] == 0.5
    assert not [name for name in calm.reports[-1][1] if name.startswith("adaptive/") and name != "adaptive/factor"]


@pytest.mark.parametrize(
    "name", ["grpo", *(pytest.param(each, marks=pytest.mark.slow) for each in ("rloo", "online_dpo"))]
)
def test_where_there_are_rewards_it_watches_them_and_not_the_loss(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The loss is 0 by construction, or one of the policy's own pairs: a plateau of it would cut the rate for good."""
    steps = 6

    def trained(reward: Callable[[int], float], folder: str) -> StageFolder:
        calls: list[None] = []

        def spread(completions: list[str]) -> list[float]:
            calls.append(None)
            return [reward(len(calls)) + row % 2 / 100 for row in range(len(completions))]

        monkeypatch.setattr(canary, "spread", spread)
        ran = StageFolder(tmp_path / folder, root)
        adaptive = Adaptive(start_steps=1, plateau_steps=2, smoothing=0.1, spike_z=None)
        ran(training.method(
            name, learning_rate=RATE, num_steps=steps, schedule=Schedule(name="constant", warmup=0.0, adaptive=adaptive)
        ))  # fmt: skip
        return ran

    rising, still = trained(float, "rising"), trained(lambda _step: 1.0, "still")
    assert rates(rising) == pytest.approx(dict.fromkeys(range(1, steps + 1), 1))
    assert rates(still)[steps] < 1 and [step for step, each in still.reports if "adaptive/plateau" in each]


def test_calm_it_changes_no_bit(root: Path, tmp_path: Path) -> None:
    ran, plain = StageFolder(tmp_path / "ran", root), StageFolder(tmp_path / "plain", root)
    metrics = ran(stage(num_steps=3))
    plain(training.method("sft", learning_rate=RATE, num_steps=3, schedule=Schedule(name="constant", warmup=0.0)))
    assert metrics["adaptive/interventions"] == 0
    assert same(weights(ran.output), weights(plain.output))


@pytest.mark.parametrize("adapter", [None, LORA], ids=["full", "lora"])
def test_weights_that_became_non_finite_are_those_of_the_best_checkpoint_again(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adapter: Adapter | None
) -> None:
    begin, reads, during = evaluation.AdaptiveRate.on_step_begin, checkpointing.read_tensors, []
    monkeypatch.setattr(checkpointing, "read_tensors", lambda *args: (during.append(args), reads(*args))[1])

    def diverging(self: evaluation.AdaptiveRate, args, state, control, **kwargs) -> None:
        begin(self, args, state, control, **kwargs)
        if state.global_step == 5:
            next(each for each in self.trainer.model.parameters() if each.requires_grad).data.fill_(math.nan)

    monkeypatch.setattr(evaluation.AdaptiveRate, "on_step_begin", diverging)
    ran, whole = StageFolder(tmp_path / "ran", root), StageFolder(tmp_path / "whole", root)
    method = stage(num_steps=12, adapter=adapter, best=Best(every_steps=2), divergence_z=1e6, spike_z=None)
    metrics = whole(method)
    assert metrics["adaptive/interventions"] == 1 and metrics["adaptive/divergence/step_6"] == 0.5
    assert metrics["steps"] == 12 and all(torch.isfinite(each).all() for each in weights(whole.output).values())
    with pytest.raises(StoppedError):
        ran(method, should_stop=lambda: len(ran.reports) == 7)
    ran(method, resume=8)
    assert same(weights(ran.output), weights(whole.output))
    during.clear()  # from memory, without a look at the disk
    kept = StageFolder(tmp_path / "kept", root, rollback="host" if adapter else "device")
    assert kept(method)["adaptive/divergence/step_6"] == 0.5 and not during
    assert same(weights(kept.output), weights(whole.output))


@pytest.mark.parametrize("resume", [5, 7, *(pytest.param(each, marks=pytest.mark.slow) for each in (3, 6))])
def test_stopped_anywhere_it_ends_with_the_same_weights(
    root: Path, tmp_path: Path, losses: dict[int, float], resume: int
) -> None:
    losses |= {4: 9.0, 6: 1e9}
    whole, broken = StageFolder(tmp_path / "whole", root, save_steps=1), StageFolder(tmp_path / "broken", root)
    method = stage(adapter=LORA, best=Best(every_steps=2), divergence_z=1e6, recovery_steps=5)
    unbroken = whole(method)
    assert unbroken["adaptive/interventions"] == 2
    with pytest.raises(StoppedError):
        broken(method, should_stop=lambda: len(broken.reports) == resume - 1)
    resumed = broken(method, resume=resume)
    assert same(weights(whole.output), weights(broken.output))
    assert rates(broken) == rates(whole)
    events = {name: value for name, value in unbroken.items() if name.startswith("adaptive/")}
    assert {name: resumed[name] for name in events} == events
