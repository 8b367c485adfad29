"""The trajectories of the methods are those recorded, and those of plain TRL scripts."""

import json
import sys
from pathlib import Path

import pytest
from datasets import load_dataset

from bench import plain_trl
from tasks.method import Training
from tests import golden_losses, tiny_models, training

# Other CPUs add in another order: the trajectories differ in the seventh digit, and a defect in the third.
TOLERANCE = 1e-4


@pytest.mark.parametrize(
    "case",
    [  # with an adapter, the methods that train as another does are slow
        pytest.param(case, marks=pytest.mark.slow if name in training.TRAINED_LIKE and case != name else [])
        for case, name in golden_losses.CASES.items()
    ],
)
def test_losses_are_the_recorded_ones(root: Path, tmp_path: Path, case: str) -> None:
    golden = json.loads((golden_losses.GOLDEN / f"{case}.json").read_text())
    found = golden_losses.losses(case, root, tmp_path / "output")
    assert found == pytest.approx(golden["losses"], abs=TOLERANCE), (
        f"recorded with {golden['versions']}, now {golden_losses.versions()}; if the change is meant: "
        "python -m tests.golden_losses"
    )


def plain_losses(
    name: str,
    stage: Training,
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    micro: int = 4,
    **own: object,
) -> list[float]:
    """The losses of a plain TRL script with the fields of a stage, and options of TRL's own."""
    kind = next(kind for slot, kind in stage.consumes.items() if slot != "policy")
    argv = f"plain {name} --policy {root}/policy --rows {root}/{kind.value}/train.parquet --output {tmp_path}/plain"
    argv += f" --steps {stage.num_steps} --batch-size {stage.global_batch_size} --micro-batch-size {micro}"
    argv += f" --max-length {stage.max_length} --learning-rate {stage.learning_rate} --no-gradient-checkpointing"
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", argv.split())
        args = plain_trl.arguments()
        common = {**plain_trl.common(args), "logging_steps": 1, **own}
        patch.setattr(plain_trl, "common", lambda args: common)
        rows = load_dataset("parquet", data_files=args.rows, split="train", cache_dir=str(tmp_path / "cache"))
        trainer = plain_trl.trainer_for(args, rows)
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("name", plain_trl.METHODS)
def test_losses_are_those_of_a_plain_trl_script(
    root: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = training.method(name)
    expected = plain_losses(name, stage, root, tmp_path, monkeypatch)
    assert training.train(stage, root, tmp_path / "output").losses == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 5e-3)])
@pytest.mark.parametrize("architecture", [*tiny_models.ARCHITECTURES, "deepseek_v3"])
def test_sft_of_every_architecture_is_that_of_a_plain_trl_script(
    root: Path, tmp_path: Path, architecture: str, precision: str, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = training.with_policy(root, tmp_path / "inputs", architecture)
    stage = training.method("sft", precision=precision)
    expected = plain_losses("sft", stage, inputs, tmp_path, monkeypatch, bf16=precision == "bf16")
    found = training.train(stage, inputs, tmp_path / "output")
    assert found.losses == pytest.approx(expected, abs=tolerance)
    assert expected[0] - expected[-1] > 20 * tolerance, "it learns"
