"""A stage that ends with its best model, whatever interrupts it, also where its loss became no number."""

import logging
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lineage.errors import ArtifactError, ConfigError, DataError, PipelineError, StoppedError
from tasks.data.tokens.tokenize_rows import RowTokenizer
from tasks.evaluate.rows import answer_tokens, draw_rows
from tasks.evaluate.scoring import logps
from tasks.method import Adapter
from tasks.model.tokenizers import tokenizer_of
from tasks.train.best import Best, KeepBest
from tasks.train.loop.checkpointing import Saver
from tasks.train.loop.heartbeat import Phase
from tasks.train.loop.saved_state import Staging
from tests import training
from tests.command import wait_until
from tests.stage_folder import StageFolder
from tests.training import same, weights

LORA = Adapter(rank=4, alpha=8, dropout=0.1)
# The loss falls: its largest value is that of the first model that competes.
WORST = Best(metric="held_out_loss", mode="max", every_steps=2)


@pytest.mark.parametrize(("name", "adapter"), [("reward", LORA), pytest.param("dpo", None, marks=pytest.mark.slow)])
def test_the_best_model_wins_also_after_an_interruption(root: Path, tmp_path: Path, name: str, adapter) -> None:
    stage = training.method(name, num_steps=7, adapter=adapter, best=WORST, output="best")
    whole = StageFolder(tmp_path / "whole", root)
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

    last = StageFolder(tmp_path / "last", root)
    last(replace(stage, best=None, output=None))
    assert not same(weights(last.output), weights(whole.output))

    broken = StageFolder(tmp_path / "broken", root, keep_last=1)
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
    measured, plain = StageFolder(tmp_path / "measured", root), StageFolder(tmp_path / "plain", root)
    metrics = measured(replace(stage, best=Best(every_steps=1), output="best"))
    without = plain(stage)
    assert metrics["best_step"] == 3  # the loss falls to the end, so that both end with the same model
    assert same(weights(measured.output), weights(plain.output))
    assert {name: without[name] for name in ("loss", "num_tokens", "mean_token_accuracy", "grad_norm")} == {
        name: metrics[name] for name in ("loss", "num_tokens", "mean_token_accuracy", "grad_norm")
    }

    trained = replace(training.inputs(root, stage)["policy"], path=measured.output)
    rows = draw_rows(training.inputs(root, stage)["rows"], 10, 0)
    tokens = RowTokenizer.of(stage.tokenization(), tokenizer_of(trained.path))(rows)
    scored = answer_tokens(list(zip(rows, tokens, strict=True)))
    model = AutoModelForCausalLM.from_pretrained(measured.output, dtype=torch.float32).eval()
    loss = -sum(logps(model, scored, 4)) / sum(row.num_tokens for row in scored)
    assert metrics["held_out_loss"] == pytest.approx(loss, abs=1e-5)


def test_every_batch_that_is_measured_shows_that_it_resumes_and_a_save_that_it_will_take_time(
    root: Path, tmp_path: Path, monkeypatch
) -> None:
    ran, during = StageFolder(tmp_path, root), []

    def reported(cls: type, name: str) -> None:
        does = getattr(cls, name)
        monkeypatch.setattr(cls, name, lambda *args, **kw: (during.append(ran.marks[-1]), does(*args, **kw))[1])

    reported(Saver, "save")
    reported(Staging, "copy")
    ran(training.method("sft", num_steps=3, best=Best(every_steps=2)))  # 10 rows are held out, 4 of them a batch
    assert set(during) == {(2, Phase.SAVING)}
    assert [doing for step, doing in ran.marks if step == 2] == [
        *[Phase.BETWEEN] * (1 + 3), Phase.SAVING, Phase.BETWEEN, *[Phase.STEPPING] * 2
    ]  # fmt: skip
    assert ran.marks[-1] == (3, Phase.DONE)


def test_a_best_by_a_metric_that_is_not_there_is_refused_at_the_first_step(root: Path, tmp_path: Path) -> None:
    best, ran = Best(metric="held_out_accuracy", every_steps=2), StageFolder(tmp_path, root)
    with pytest.raises(ConfigError, match=r"method.best.metric=held_out_accuracy: is not measured; measured are: grad"):
        ran(training.method("sft", best=best, output="best"))
    assert len(ran.reports) == 1


def test_what_execution_keeps_by_a_metric_that_is_not_there_fails_nothing(root: Path, tmp_path: Path, caplog) -> None:
    ran = StageFolder(tmp_path, root, save_steps=1, keep_last=1, keep_best=KeepBest(metric="rewards/margins"))
    with caplog.at_level(logging.WARNING):
        ran(training.method("sft"))
    assert "resources.keep_best.metric=rewards/margins: is not measured; measured are: grad" in caplog.text
    assert ran.store.steps() == [2]


def test_without_held_out_rows_nothing_is_trained(root: Path, tmp_path: Path) -> None:
    bare = training.write_inputs(tmp_path / "bare", num_rows=40)
    ran = StageFolder(tmp_path, bare)
    with pytest.raises(DataError, match=r"'conversations' has no held-out row .*stages.conversations.method.held_out"):
        ran(training.method("sft", best=Best(every_steps=2), output="best"))
    assert not ran.reports


def test_a_best_model_that_was_damaged_is_not_handed_out(root: Path, tmp_path: Path) -> None:
    ran = StageFolder(tmp_path / "sft" / "f00d", root)
    stage = training.method("sft", num_steps=5, best=WORST, output="best")

    def flip() -> bool:
        if len(ran.reports) == 3:
            wait_until(ran.store.path(2).exists, "the checkpoint is written")
            with (ran.store.path(2) / "model.safetensors").open("r+b") as file:
                file.seek(-1, 2)
                file.write(b"\x7f")
        return False

    message = r"the best model is that of step 2, and its checkpoint is not what was .*restart=\[sft\]"
    with pytest.raises(ArtifactError, match=message):
        ran(stage, should_stop=flip)
    assert len(ran.reports) == 5


# The first step has a learning rate of 0, the second one that no weight survives.
EXPLODING = {"num_steps": 8, "learning_rate": 1e38, "warmup_ratio": 0.5, "lr_schedule": "constant"}


def test_a_training_that_diverges_ends_with_its_best_model(root: Path, tmp_path: Path, caplog) -> None:
    stage = training.method("sft", **EXPLODING, best=Best(every_steps=1), on_divergence="best")
    ran = StageFolder(tmp_path, root)
    with caplog.at_level(logging.ERROR):
        metrics = ran(stage)
    best = min(ran.held_out(), key=lambda step: ran.held_out()[step])
    assert metrics["best_step"] == best
    assert metrics["held_out_loss"] == ran.held_out()[best]
    assert metrics["diverged_at_step"] == metrics["steps"] == len(ran.reports) + 1 < 8
    assert same(weights(ran.output), load_file(ran.store.path(best) / "model.safetensors"))
    assert "training diverged: at step" in caplog.text
    assert f"the output is the model of step {best}" in caplog.text


def test_a_training_that_diverges_fails_and_names_its_last_good_checkpoint(root: Path, tmp_path: Path) -> None:
    ran = StageFolder(tmp_path / "saving", root, save_steps=1)
    with pytest.raises(PipelineError, match=r"diverged: .* last good checkpoint is that of step \d .* lower learning_"):
        ran(training.method("sft", **EXPLODING))
    assert all(math.isfinite(ran.store.read(step).metrics["loss"]) for step in ran.store.steps())
    stage = training.method("sft", **EXPLODING, best=Best(every_steps=7), on_divergence="best")
    with pytest.raises(PipelineError, match=r"nothing was saved; on_divergence=best: no model has competed yet"):
        StageFolder(tmp_path / "late", root)(stage)
