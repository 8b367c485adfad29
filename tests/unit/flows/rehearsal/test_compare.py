"""What sets an interrupted training apart from the unbroken one, and how far."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from flows.rehearsal.compare import compare
from flows.rehearsal.row import step_seconds
from lineage.certificate import Comparison
from lineage.digest import digest_files, digest_of
from lineage.manifest import Manifest, provenance
from lineage.store import Entry

STEPS = ((1, 4.0), (2, 3.0), (3, 2.0))
WEIGHTS = {"a": np.array([1.0, 2.0]), "b": np.array([3.0])}


def trained(
    folder: Path, steps: Sequence[tuple[int, float]] = STEPS, weights: Mapping[str, np.ndarray] = WEIGHTS,
    config: str = "{}", tokens: float = 30.0, workers: int = 1,
) -> Entry:  # fmt: skip
    entry = Entry(folder)
    entry.begin()
    save_file(dict(weights), entry.output / "model.safetensors")
    (entry.output / "config.json").write_text(config)
    lines = [
        {"step": step, "time": number, "metrics": {"loss": loss, "tokens_per_second": float(number)}}
        for number, (step, loss) in enumerate(steps)
    ]
    entry.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = digest_files(entry.output)
    manifest = Manifest(
        pipeline="p", stage="s", method="m", recipe={}, fingerprint="f", inputs={}, files=files,
        output_digest=digest_of(files), metrics={"num_tokens": tokens, "train_seconds": float(len(folder.name))},
        provenance=provenance(
            start=0, end=1, code_digest="c", seed=0, resources={"num_workers": workers}, resumed_at=[2]
        ),
    )  # fmt: skip
    (entry.path / "manifest.json").write_text(manifest.to_json())
    return entry


def found(tmp_path: Path, **other: object) -> Comparison:
    return compare(trained(tmp_path / "whole"), trained(tmp_path / "in parts", **other), 1e-4)  # type: ignore[arg-type]


def test_what_tells_of_the_machine_alone_differs_in_nothing(tmp_path: Path) -> None:
    same = found(tmp_path, workers=2)
    assert (same.verdict, same.detail, same.loss_difference, same.weight_difference) == ("bit-identical", "", 0.0, 0.0)
    assert (same.num_workers, same.resumed_at) == ((1, 2), (2,))


@pytest.mark.parametrize(("by", "verdict"), [(1e-6, "within tolerance"), (1e-2, "differs")])
def test_losses_and_weights_are_held_against_the_tolerance(tmp_path: Path, by: float, verdict: str) -> None:
    weights = {"a": WEIGHTS["a"], "b": WEIGHTS["b"] * (1 + by)}
    apart = found(tmp_path, steps=((1, 4.0), (2, 3.0), (3, 2.0 * (1 + by))), weights=weights)
    assert apart.verdict == verdict
    assert apart.detail.startswith("first at step 3 in loss (2, unbroken, and 2.0")
    assert "b is the first of 1 tensors" in apart.detail
    assert apart.loss_difference == pytest.approx(by, rel=0.02)
    assert apart.weight_difference == pytest.approx(by, rel=0.02)


@pytest.mark.parametrize(
    ("other", "detail"),
    [
        ({"steps": ((1, 4.0), (2, 3.0), (2, 3.0), (3, 2.0))}, "step 2 is reported 2 times"),
        ({"steps": ((1, 4.0), (3, 2.0))}, "step 2 is reported 0 times"),
        ({"steps": ((1, 4.0), (2, math.nan), (3, 2.0))}, "first at step 2 in loss (3, unbroken, and nan)"),
        ({"steps": ((1, 4.0), (2, math.inf), (3, 2.0))}, "first at step 2 in loss (3, unbroken, and inf)"),
        ({"config": "{ }"}, "other bytes in config.json"),
        ({"weights": {"a": WEIGHTS["a"]}}, "b is the first of 1 tensors, by inf"),
        ({"weights": {**WEIGHTS, "b": np.array([np.nan])}}, "b is the first of 1 tensors, by inf"),
    ],
)
def test_what_no_tolerance_excuses(tmp_path: Path, other: dict[str, object], detail: str) -> None:
    apart = found(tmp_path, **other)
    assert apart.verdict == "differs"
    assert detail in apart.detail


def test_what_is_no_number_in_both_is_the_same(tmp_path: Path) -> None:
    lost = {"a": np.array([1.0, np.nan]), "b": WEIGHTS["b"]}
    steps = ((1, 4.0), (2, math.nan))
    whole = trained(tmp_path / "whole", steps=steps, weights=lost)
    assert compare(whole, trained(tmp_path / "same", steps=steps, weights=lost), 1e-4).verdict == "bit-identical"
    apart = compare(whole, trained(tmp_path / "apart", steps=steps, weights={**lost, "b": WEIGHTS["b"] + 1e-6}), 1e-4)
    assert apart.verdict == "within tolerance"
    assert "b is the first of 1 tensors" in apart.detail  # not a, whose bytes are the same


def test_a_count_that_began_again_is_not_bit_identical(tmp_path: Path) -> None:
    apart = found(tmp_path, tokens=20.0)
    assert apart.detail == "at the end in num_tokens (30, unbroken, and 20)"
    assert apart.verdict == "differs"


def test_the_pace_of_a_step_is_that_of_its_own_tokens() -> None:
    steps = [{"num_tokens": 100.0, "tokens_per_second": 1.0}, {"num_tokens": 150.0, "tokens_per_second": 25.0}]
    assert step_seconds(steps) == 2.0
    assert step_seconds([{"loss": 1.0}]) is None
    assert step_seconds([]) is None
