"""KTO trains on single answers as TRL's trainer does, and is the same whatever the micro batch and the workers are."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from lineage.errors import ConfigError
from tasks.context import Resources, TrainContext
from tasks.kto import KTO
from tasks.method import Adapter, Validation
from tasks.train.losses.pair_loss import kto_loss, label_weights
from tasks.train.losses.pair_trainer import Rows
from tasks.train.run import TrainingRun
from tests import tiny, training
from tests.tiny_models import write_model

if TYPE_CHECKING:
    from transformers import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")

LORA = Adapter(rank=4, alpha=8)
WHOLE = Resources(micro_batch_size=8)  # the global batch
LOGGED = ("loss", "kl", "rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "grad_norm")


@dataclass(frozen=True, kw_only=True)
class TrlKTO(KTO):
    """The same recipe in TRL's trainer."""

    def trainer(self, run: "TrainingRun") -> "Trainer":
        from trl import KTOConfig, KTOTrainer

        weights = {"desirable_weight": self.desirable_weight, "undesirable_weight": self.undesirable_weight}
        return run.trl(KTOTrainer, KTOConfig, beta=self.beta, loss_type=self.loss_type, **weights)


def stage(cls: type[KTO] = KTO, **fields: object) -> KTO:
    return cls(**{**training.FIELDS, **fields})  # type: ignore[arg-type]


def rows(divergence: float | None) -> Rows:
    return Rows(
        sums_R=torch.tensor([-3.0, -6.0]),
        counts_R=torch.tensor([3, 2]),
        reference_R=torch.tensor([-5.0, -5.0]),  # log-ratios 2 and -1
        desirable_R=torch.tensor([True, False]),
        divergence=None if divergence is None else torch.tensor(divergence),
    )


def test_the_loss_is_that_of_the_paper() -> None:
    # Desirable 1 - sigmoid(0.5 (2 - 0.4)) = 0.3100255, undesirable 1 - sigmoid(0.5 (0.4 + 1)) = 0.3318122.
    loss, metrics = kto_loss(0.5, 1.2, 0.8, rows(0.4))
    assert float(loss) == pytest.approx((1.2 * 0.3100255 + 0.8 * 0.3318122) / 2, abs=1e-6)
    assert metrics["rewards/chosen"].tolist()[0] == 1.0 and metrics["rewards/rejected"].tolist()[1] == -0.5
    assert metrics["rewards/accuracies"].tolist() == [1.0, 1.0]
    # With zero for the divergence: 1 - sigmoid(1) = 0.2689414 and sigmoid(-0.5) = 0.3775407.
    assert float(kto_loss(0.5, 1.2, 0.8, rows(None))[0]) == pytest.approx(
        (1.2 * 0.2689414 + 0.8 * 0.3775407) / 2, abs=1e-6
    )


@pytest.mark.parametrize(
    ("counts", "fields", "weights"),
    [
        ((8, 8), {}, (1.0, 1.0)),
        ((8, 4), {}, (1.0, 2.0)),
        ((3, 12), {}, (4.0, 1.0)),
        ((5, 0), {}, (1.0, 1.0)),
        ((8, 4), {"desirable_weight": 0.5}, (0.5, 1.0)),
        ((8, 4), {"undesirable_weight": 3.0}, (1.5, 3.0)),
    ],
)
def test_weights_make_up_for_the_counts(
    counts: tuple[int, int], fields: dict[str, float], weights: tuple[float, float], caplog: pytest.LogCaptureFixture
) -> None:
    found = label_weights(fields.get("desirable_weight"), fields.get("undesirable_weight"), *counts)
    assert found == pytest.approx(weights)
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.mark.parametrize(("counts", "name"), [((8, 0), "undesirable"), ((0, 8), "desirable")])
def test_a_weight_of_answers_that_no_row_has_is_refused(counts: tuple[int, int], name: str) -> None:
    weights = {"desirable": None, "undesirable": None, name: 3.0}
    with pytest.raises(ConfigError, match=rf"^{name}_weight=3: none of the 8 training rows is {name}; set {name}_wei"):
        label_weights(weights["desirable"], weights["undesirable"], *counts)


@pytest.mark.parametrize(("undesirable", "warns"), [(1.0, True), (1.5, False), (2.0, False), (2.01, True)])
def test_weights_outside_the_advised_range_are_warned_of(
    undesirable: float, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    assert label_weights(1.0, undesirable, 8, 4) == (1.0, undesirable)
    assert ("the paper advises 1 to 4/3 (eq. 8)" in caplog.text) == warns


@pytest.mark.parametrize("adapter", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_on_a_whole_batch_it_is_trls(root: Path, tmp_path: Path, loss_type: str, adapter: Adapter | None) -> None:
    fields = {"loss_type": loss_type, "adapter": adapter, "desirable_weight": 1.0, "undesirable_weight": 1.9}
    theirs, ours = (
        training.train(stage(cls, **fields), root, tmp_path / cls.__name__, resources=WHOLE) for cls in (TrlKTO, KTO)
    )
    for (_, expected), (_, found) in zip(theirs.reports, ours.reports, strict=True):
        for name in LOGGED:
            if not (name == "kl" and loss_type == "apo_zero_unpaired"):  # TRL logs 0
                assert found[name] == pytest.approx(expected[name], abs=1e-5, rel=1e-5), name
    for name, expected_weights in training.weights(theirs.output).items():
        torch.testing.assert_close(training.weights(ours.output)[name], expected_weights, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_the_micro_batch_changes_trls_losses_and_not_ours(root: Path, tmp_path: Path) -> None:
    fields = {"desirable_weight": 1.0, "undesirable_weight": 1.0, "num_steps": 4, "learning_rate": 1e-2}

    def losses(cls: type[KTO], size: int) -> list[float]:
        output = tmp_path / f"{cls.__name__}{size}"
        return training.train(
            stage(cls, **fields), root, output, resources=Resources(micro_batch_size=size)
        ).losses  # fmt: skip

    assert losses(TrlKTO, 2) != pytest.approx(losses(TrlKTO, 8), abs=1e-4)
    ours = losses(KTO, 8)
    assert ours[0] == 0.5, "policy and reference agree at step 0"
    for size in (1, 2, 4):
        assert losses(KTO, size) == pytest.approx(ours, abs=2e-6)


def test_a_step_of_desirable_answers_alone_trains(root: Path, tmp_path: Path) -> None:
    (tmp_path / "policy").symlink_to(root / "policy")
    rows = [{**row, "label": True} for row in tiny.unpaired_rows(12)]
    tiny.write_rows(tmp_path / "unpaired", rows)
    run = training.train(stage(), tmp_path, tmp_path / "output")
    assert run.losses[0] == 0.5 and "rewards/rejected" not in run.reports[0][1]
    assert run.metrics["undesirable_weight"] == 1


def test_the_held_out_loss_is_the_same_for_every_micro_batch(root: Path, tmp_path: Path) -> None:
    (tmp_path / "policy").symlink_to(root / "policy")
    rows = tiny.unpaired_rows(47)
    tiny.write_rows(tmp_path / "unpaired", rows[:40], rows[40:])  # 7: no micro batch divides them
    recipe = stage(validation=Validation(every_steps=1), learning_rate=1e-2)
    found = []
    for size in (1, 4, 8):
        run = training.train(recipe, tmp_path, tmp_path / f"{size}", resources=Resources(micro_batch_size=size))
        found.append([metrics["val/loss"] for _, metrics in run.reports])
    assert found[0] == pytest.approx(found[1], abs=2e-6) and found[0] == pytest.approx(found[2], abs=2e-6)
    assert len(set(found[0])) == 3


def test_mismatched_answers_are_cut_to_the_positions_of_the_model(tmp_path: Path) -> None:
    """The answer of another row is longer than the row's own: in TRL's trainer it has no position."""
    write_model(tmp_path / "policy", "gpt2", n_positions=32)
    short = [{"role": "assistant", "content": "a"}]
    rows = [{**row, "completion": short} if index % 2 else row for index, row in enumerate(tiny.unpaired_rows(16))]
    tiny.write_rows(tmp_path / "unpaired", rows)
    fields = {"max_length": 32, "num_steps": 2, "desirable_weight": 1.0, "undesirable_weight": 1.0}
    context = TrainContext(output_dir=tmp_path / "out", work_dir=tmp_path, resources=WHOLE, report=lambda *_: None)
    rows_run = TrainingRun(stage(**fields), training.inputs(tmp_path, stage(**fields)), context)
    examples = list(rows_run.rows.dataset(range(len(rows_run.rows))))
    assert max(len(each["prompt_ids"]) + len(each["KL_completion_ids"]) for each in examples) > 32
    with pytest.raises(IndexError):
        training.train(stage(TrlKTO, **fields), tmp_path, tmp_path / "theirs")
    assert len(training.train(stage(**fields), tmp_path, tmp_path / "ours").losses) == 2
