"""A stage that ends with its best model, whatever interrupts it, and one that goes back to it when it diverges."""

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lineage.checkpoints import Checkpoints
from lineage.errors import ArtifactError, ConfigError, DataError, PipelineError, StoppedError
from tasks.checkpoints.best import Best, KeepBest
from tasks.context import Metrics, Resources, TrainContext
from tasks.held_out_rows import answer_tokens, draw_rows
from tasks.method import LoRA, Training
from tasks.models import load_tokenizer
from tasks.scoring import logps
from tests import tiny, training
from tests.training import same, weights

LORA = LoRA(rank=4, alpha=8, dropout=0.1)
SAVING = Resources(micro_batch_size=4, cpus_per_worker=1, save_steps=None, save_minutes=None, keep_last=9)
# The loss falls: its largest value is that of the first model that competes.
WORST = Best(metric="held_out_loss", mode="max", every_steps=2)
ROWS = {
    "text": tiny.text_rows, "conversations": tiny.conversation_rows, "preferences": tiny.preference_rows,
}  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("inputs")
    tiny.write_policy(root / "policy")
    for name, rows in ROWS.items():
        tiny.write_rows(root / name, rows(50)[:40], rows(50)[40:])
    return root


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Ran:
    """One stage's folder, in which it can run again."""

    def __init__(self, folder: Path, root: Path, **resources: object) -> None:
        self.folder, self.root = folder, root
        self.resources = replace(SAVING, **resources)
        self.reports: list[tuple[int, Metrics]] = []
        self.store = Checkpoints(folder / "checkpoints")

    def __call__(
        self, stage: Training, *, resume: int | None = None, should_stop: Callable[[], bool] = lambda: False
    ) -> Metrics:
        ctx = TrainContext(
            output_dir=self.folder / "output", work_dir=self.folder / "work", checkpoint_dir=self.store.directory,
            resources=self.resources, report=lambda step, metrics: self.reports.append((step, dict(metrics))),
            resume_from=self.store.path(resume) if resume else None, should_stop=should_stop,
        )  # fmt: skip
        return stage.run(training.inputs(self.root, stage), ctx)

    @property
    def output(self) -> Path:
        return self.folder / "output"

    def held_out(self) -> dict[int, float]:
        return {step: metrics["held_out_loss"] for step, metrics in self.reports if "held_out_loss" in metrics}


@pytest.mark.parametrize(("name", "adapter"), [("reward", LORA), ("dpo", None)])
def test_the_best_model_wins_also_after_an_interruption(root: Path, tmp_path: Path, name: str, adapter) -> None:
    stage = training.method(name, num_steps=7, adapter=adapter, best=WORST, output="best")
    whole = Ran(tmp_path / "whole", root)
    unbroken = whole(stage)
    assert unbroken["best_step"] == 2
    assert list(whole.held_out()) == [2, 4, 6, 7]
    assert unbroken["held_out_loss"] == max(whole.held_out().values()) == whole.held_out()[2]
    assert unbroken["loss"] == pytest.approx(sum(metrics["loss"] for _, metrics in whole.reports[:2]) / 2)
    assert unbroken["steps"] == 7
    assert whole.store.steps() == [2]  # 4, 6 and 7 were no better
    if adapter:
        saved = load_file(whole.store.path(2) / "adapter_model.safetensors")
        assert same(saved, load_file(whole.output / "adapter" / "adapter_model.safetensors"))
    else:
        assert same(load_file(whole.store.path(2) / "model.safetensors"), weights(whole.output))

    last = Ran(tmp_path / "last", root)
    last(replace(stage, best=None, output=None))
    assert not same(weights(last.output), weights(whole.output))

    broken = Ran(tmp_path / "broken", root, keep_last=1)
    with pytest.raises(StoppedError):
        broken(stage, should_stop=lambda: len(broken.reports) == 4)
    assert broken.store.steps() == [2, 5]  # the best one stays beside the newest
    resumed = broken(stage, resume=5)
    assert resumed["best_step"] == 2
    assert resumed["held_out_loss"] == unbroken["held_out_loss"]
    assert broken.held_out() == whole.held_out()
    assert same(weights(broken.output), weights(whole.output))


def test_measuring_changes_no_bit_and_measures_the_model_that_is_there(root: Path, tmp_path: Path) -> None:
    stage = training.method("sft", num_steps=3, adapter=LORA)
    measured, plain = Ran(tmp_path / "measured", root), Ran(tmp_path / "plain", root)
    metrics = measured(replace(stage, best=Best(every_steps=1), output="best"))
    without = plain(stage)
    assert metrics["best_step"] == 3  # the loss falls to the end, so that both end with the same model
    assert same(weights(measured.output), weights(plain.output))
    assert {name: without[name] for name in ("loss", "num_tokens", "mean_token_accuracy", "grad_norm")} == {
        name: metrics[name] for name in ("loss", "num_tokens", "mean_token_accuracy", "grad_norm")
    }

    trained = replace(training.inputs(root, stage)["policy"], path=measured.output)
    rows = draw_rows(training.inputs(root, stage)["rows"], 10, 0)
    scored = answer_tokens(rows, load_tokenizer(trained), stage.max_length)
    model = AutoModelForCausalLM.from_pretrained(measured.output, dtype=torch.float32).eval()
    loss = -sum(logps(model, scored, 4)) / sum(row.num_tokens for row in scored)
    assert metrics["held_out_loss"] == pytest.approx(loss, abs=1e-5)


@pytest.mark.parametrize(
    ("keep_best", "kept"),
    [
        (KeepBest(metric="loss", n=2), [4, 5]),
        (KeepBest(metric="loss", mode="max", n=2), [1, 2, 5]),
        (None, [5]),
    ],
)
def test_the_best_checkpoints_are_kept_beside_the_newest(root: Path, tmp_path: Path, keep_best, kept) -> None:
    ran = Ran(tmp_path, root, save_steps=1, keep_last=1, keep_best=keep_best)
    ran(training.method("sft", num_steps=6))
    assert ran.store.steps() == kept
    losses = [metrics["loss"] for _, metrics in ran.reports]
    assert ran.store.read(5).metrics["loss"] == pytest.approx(sum(losses[:5]) / 5)


def test_a_metric_that_is_not_there_is_refused_at_the_first_step(root: Path, tmp_path: Path) -> None:
    ran = Ran(tmp_path, root, save_steps=2, keep_best=KeepBest(metric="rewards/margins"))
    with pytest.raises(ConfigError, match=r"keep_best.metric=rewards/margins: is not measured; there are: grad"):
        ran(training.method("sft"))
    assert len(ran.reports) == 1
    best = Best(metric="held_out_accuracy", every_steps=2)
    with pytest.raises(ConfigError, match=r"method.best.metric=held_out_accuracy: is not measured"):
        Ran(tmp_path, root)(training.method("sft", best=best, output="best"))


def test_without_held_out_rows_nothing_is_trained(root: Path, tmp_path: Path) -> None:
    bare = training.write_inputs(tmp_path / "bare", num_rows=40)
    ran = Ran(tmp_path, bare)
    with pytest.raises(DataError, match=r"'conversations' has no held-out row .*stages.conversations.method.held_out"):
        ran(training.method("sft", best=Best(every_steps=2), output="best"))
    assert not ran.reports


# The first step has a learning rate of 0, the second one that no weight survives.
EXPLODING = {"num_steps": 8, "learning_rate": 1e38, "warmup_ratio": 0.5, "lr_schedule": "constant"}


def test_a_training_that_diverges_ends_with_its_best_model(root: Path, tmp_path: Path, caplog) -> None:
    stage = training.method("sft", **EXPLODING, best=Best(every_steps=1), on_divergence="best")
    ran = Ran(tmp_path, root)
    with caplog.at_level(logging.ERROR):
        metrics = ran(stage)
    best = min(ran.held_out(), key=lambda step: ran.held_out()[step])
    assert metrics["best_step"] == best
    assert metrics["held_out_loss"] == ran.held_out()[best]
    assert metrics["diverged_at_step"] == metrics["steps"] == len(ran.reports) + 1 < 8
    assert same(weights(ran.output), load_file(ran.store.path(best) / "model.safetensors"))
    assert "training diverged: at step" in caplog.text
    assert f"it ends with its model of step {best}" in caplog.text


def test_a_training_that_diverges_fails_and_names_its_last_good_checkpoint(root: Path, tmp_path: Path) -> None:
    ran = Ran(tmp_path / "saving", root, save_steps=1)
    with pytest.raises(PipelineError, match=r"diverged: .* last good checkpoint is that of step \d .* lower learning_"):
        ran(training.method("sft", **EXPLODING))
    assert all(math.isfinite(ran.store.read(step).metrics["loss"]) for step in ran.store.steps())
    stage = training.method("sft", **EXPLODING, best=Best(every_steps=7), on_divergence="best")
    with pytest.raises(PipelineError, match=r"nothing was saved; no model had competed yet"):
        Ran(tmp_path / "late", root)(stage)


def test_a_best_model_that_was_damaged_is_not_handed_out(root: Path, tmp_path: Path) -> None:
    ran = Ran(tmp_path, root)

    def flip() -> bool:
        if len(ran.reports) == 3:
            with (ran.store.path(2) / "model.safetensors").open("r+b") as file:
                file.seek(-1, 2)
                file.write(b"\x7f")
        return False

    with pytest.raises(ArtifactError, match=r"the best model is that of step 2, and its checkpoint is not what was"):
        ran(training.method("sft", num_steps=5, best=WORST, output="best"), should_stop=flip)
