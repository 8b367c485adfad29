"""DPO's losses and options: those of TRL are TRL's, and those of ours do not depend on micro batch and workers."""

from pathlib import Path

import pytest
from trl import DPOTrainer

from lineage.errors import DataError
from tasks.context import Resources
from tasks.method import Adapter
from tasks.train.losses.dpo_losses import LOSSES, ReferenceSync
from tests import training
from tests.integration.test_golden import plain_losses
from tests.worker_group import Asked, WorkerGroup

pytestmark = pytest.mark.usefixtures("one_thread")

LORA = Adapter(rank=4, alpha=8)
FAST = {"learning_rate": 3e-2}  # so that the order of the pairs' rewards changes within the first steps
# Not sft, which TRL averages over the tokens of a micro batch, and not what needs other options.
OF_TRL = [name for name, row in LOSSES.items() if not row.is_ours]
OF_DIFFERENCE = [name for name, row in LOSSES.items() if row.difference and name != "hinge"]


def plain(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, micro: int, **options: object) -> list[float]:
    return plain_losses("dpo", training.method("dpo", **FAST), root, tmp_path, monkeypatch, micro, **options)


def ours(root: Path, tmp_path: Path, micro: int = 4, **fields: object) -> training.Trained:
    stage = training.method("dpo", **{**FAST, **fields})
    return training.train(stage, root, tmp_path / f"{micro}" / "output", resources=Resources(micro_batch_size=micro))


WEIGHTS = {name: 0.5 + place / 10 for place, name in enumerate(OF_TRL)}
DIFFERENCES = {name: 0.5 + place / 10 for place, name in enumerate(OF_DIFFERENCE)}
SMOOTHED = {"label_smoothing": 0.2, "discopop_tau": 0.1}
F_ALPHA = {"f_divergence": "alpha_divergence", "f_alpha": 0.3}
THEIR_F_ALPHA = {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.3}


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"losses": WEIGHTS, **SMOOTHED}, {"loss_type": OF_TRL, "loss_weights": [*WEIGHTS.values()], **SMOOTHED}),
        (
            {"losses": DIFFERENCES, **SMOOTHED, **F_ALPHA, "ld_alpha": 0.5, "weighting": "wpo"},
            {
                "loss_type": OF_DIFFERENCE, "loss_weights": [*DIFFERENCES.values()], **SMOOTHED, **THEIR_F_ALPHA,
                "ld_alpha": 0.5, "use_weighting": True,
            },
        ),
        ({"f_divergence": "forward_kl"}, {"f_divergence_type": "forward_kl"}),
        ({"f_divergence": "js_divergence", "ld_alpha": 0.0}, {"f_divergence_type": "js_divergence", "ld_alpha": 0.0}),
        (
            {"loss_type": "hinge", "reference_sync": ReferenceSync(every_steps=1, mixup_alpha=0.3)},
            {"loss_type": ["hinge"], "sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.3},
        ),
    ],
    ids=["all at once", "of differences, with every option", "forward_kl", "js_divergence", "reference_sync"],
)  # fmt: skip
def test_losses_and_options_are_those_of_a_plain_trl_script(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, object], options: dict[str, object]
) -> None:
    found = ours(root, tmp_path, **fields).losses
    assert found == pytest.approx(plain(root, tmp_path, monkeypatch, 4, **options), abs=1e-5, rel=1e-5)


@pytest.mark.parametrize("loss_type", ["aot", "aot_unpaired"])
def test_optimal_transport_is_trls_where_a_step_is_one_micro_batch(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss_type: str
) -> None:
    options = {"loss_type": [loss_type], "label_smoothing": 0.1}
    found = ours(root, tmp_path, 8, loss_type=loss_type, label_smoothing=0.1).losses
    assert found == pytest.approx(plain(root, tmp_path, monkeypatch, 8, **options), abs=1e-5)
    assert found != pytest.approx(ours(root, tmp_path, 4).losses, abs=1e-3)


def test_the_sft_loss_is_trls_where_a_micro_batch_is_one_pair(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"loss_type": ["sigmoid", "sft"], "loss_weights": [0.8, 0.2]}
    found = ours(root, tmp_path, losses={"sigmoid": 0.8, "sft": 0.2}).losses
    assert found == pytest.approx(plain(root, tmp_path, monkeypatch, 1, **options), abs=1e-5)
    # TRL averages over the tokens of a micro batch, so that its size would change the model.
    assert found != pytest.approx(plain(root, tmp_path, monkeypatch, 8, **options), abs=1e-4)


OWN = {"aot": 0.5, "aot_unpaired": 1.0, "kto_pair": 2.0, "sft": 0.1, "sigmoid": 0.3}


@pytest.mark.parametrize("adapter", [None, LORA], ids=["full", "lora"])
def test_the_micro_batch_changes_no_loss_of_ours(root: Path, tmp_path: Path, adapter: Adapter | None) -> None:
    whole, *parts = (ours(root, tmp_path, size, losses=OWN, adapter=adapter) for size in (8, 4, 2))
    for part in parts:
        assert part.losses == pytest.approx(whole.losses, abs=1e-5)
    assert whole.losses[2] != pytest.approx(whole.losses[0], abs=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [None, LORA], ids=["full", "lora"])
def test_two_workers_compare_the_pairs_of_the_whole_step(
    root: Path, tmp_path: Path, two_workers: WorkerGroup, adapter: Adapter | None
) -> None:
    one = ours(root, tmp_path, 8, losses=OWN, adapter=adapter).losses
    stage = training.method("dpo", **FAST, losses=OWN, adapter=adapter)
    for size in (4, 2):  # a step of one micro batch for each worker, and of two
        resources = Resources(micro_batch_size=size)
        done = two_workers.train(Asked(stage=stage, root=root, folder=tmp_path / f"two{size}", resources=resources))
        assert done[0].metric("loss") == pytest.approx(one, abs=1e-5)


def test_wpo_weights_pairs_on_every_forward(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The padding-free forward and TRL's own compute the sums of squares that WPO needs; so do the chunked heads."""
    from tasks.train.kernels import padding_free

    found = ours(root, tmp_path / "plain", weighting="wpo").losses
    monkeypatch.setattr(padding_free, "MAX_LOGITS", 1)
    assert ours(root, tmp_path / "chunked", weighting="wpo").losses == pytest.approx(found, abs=1e-5)
    monkeypatch.setattr(padding_free, "PADDING_FREE", frozenset())
    assert ours(root, tmp_path / "padded", weighting="wpo").losses == pytest.approx(found, abs=1e-5)
    assert found != pytest.approx(ours(root, tmp_path / "none").losses, abs=1e-3)


def test_trls_filter_never_sees_a_pair_that_is_too_long(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL drops pairs whose prompt is too long without a word; ours cuts, drops with a count, or refuses."""
    trained_on = []

    def prepared(self: DPOTrainer, *args: object) -> None:
        raise AssertionError("TRL prepares the rows, and its filter drops some")

    original = DPOTrainer._compute_loss

    def counted(self: DPOTrainer, model: object, inputs: dict[str, object], *args: object) -> object:
        assert self.args.max_length is None
        trained_on.append(len(inputs["input_ids"]) // 2)  # type: ignore[arg-type]
        return original(self, model, inputs, *args)

    monkeypatch.setattr(DPOTrainer, "_prepare_dataset", prepared)
    monkeypatch.setattr(DPOTrainer, "_compute_loss", counted)
    shorter = {"max_length": 44, "num_epochs": 1.0, "num_steps": None}
    for policy, counted_as in (("cut_answer", "rows_cut"), ("cut_prompt", "prompts_cut"), ("drop", "rows_dropped")):
        trained_on.clear()
        metrics = ours(root, tmp_path / policy, **shorter, too_long=policy).metrics
        assert metrics[counted_as] > 0
        assert sum(trained_on) >= 40 - metrics["rows_dropped"], "what was not reported as dropped is trained"
    with pytest.raises(DataError, match=r"of 40 rows are longer than max_length=44"):
        ours(root, tmp_path / "refuse", **shorter, too_long="refuse")
