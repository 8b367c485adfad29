"""Tokens in many processes, and shared between stages."""

from pathlib import Path

import pytest

from lineage.artifact import Kind
from tasks.context import Resources, TrainContext
from tasks.data import kinds as ordered_pool
from tasks.data.tokens import tokenize_rows as module
from tasks.data.tokens import tokenize_rows as write_tokens
from tasks.data.tokens.tokenization import Tokenization
from tasks.data.tokens.tokenize_rows import load_or_make
from tests import training
from tests.tiny_models import write_model


def test_processes_give_the_tokens_that_one_gives(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_tokens, "_ROWS_PER_PART", 5)
    monkeypatch.setattr(ordered_pool, "INLINE_SECONDS", 0.0)
    rows = training.inputs(root, training.method("sft"))["rows"]
    options = Tokenization(kind=Kind.CONVERSATIONS, max_length=64)
    one, two = (load_or_make(options, rows, root / "policy", None, count) for count in (1, 2))
    assert one.columns == two.columns and one.stats == two.stats


def test_a_stage_with_another_learning_rate_tokenizes_nothing(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, make = [], module._make
    monkeypatch.setattr(module, "_make", lambda *args: made.append(args) or make(*args))
    losses = []
    for name, learning_rate in (("sft", 3e-3), ("sft", 6e-3), ("dpo", 3e-3), ("reward", 3e-3)):
        stage = training.method(name, learning_rate=learning_rate)
        ctx = TrainContext(
            output_dir=tmp_path / f"{name}-{learning_rate}", work_dir=tmp_path / "work", cache_dir=tmp_path / "cache",
            resources=Resources(micro_batch_size=8), report=lambda step, metrics: losses.append(metrics["loss"]),
        )  # fmt: skip
        stage.run(training.inputs(root, stage), ctx)
    assert len(made) == 2  # one for conversations, one for pairs: a reward model and DPO read the same
    assert losses[0] == losses[3] and losses[1:3] != losses[4:6]


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "mixtral"])
def test_packed_rows_have_the_loss_that_they_have_alone(root: Path, tmp_path: Path, architecture: str) -> None:
    """Without padding either way; padded where not packed, with windows; a mixture of experts."""
    policy = write_model(tmp_path / "policy", architecture, sliding_window=8)
    options = Tokenization(kind=Kind.CONVERSATIONS, max_length=128, packing="best_fit")
    stage = training.method("sft")
    packs = load_or_make(options, training.inputs(root, stage)["rows"], root / "policy", None, 1)
    assert 1 < len(packs) < packs.stats.num_rows == 40
    alone, packed = (
        training.train(
            training.method("sft", num_steps=1, global_batch_size=count, packing=packing), root,
            tmp_path / str(count) / "output", policy=policy, resources=Resources(micro_batch_size=1),
        )
        for count, packing in ((40, None), (len(packs), "best_fit"))
    )  # fmt: skip
    assert packed.losses == pytest.approx(alone.losses, abs=1e-4)
    assert packed.metrics["packs"] == len(packs)
    for name in ("num_tokens", "trained_tokens_percent", "rows"):
        assert packed.metrics[name] == alone.metrics[name]
