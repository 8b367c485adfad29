"""What sets an interrupted training apart from the unbroken one, and how far."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from flows.certify import TOLERANCES, compare
from lineage.certificate import Comparison
from lineage.digest import digest_files, digest_of
from lineage.manifest import Manifest, provenance
from lineage.store import Entry

STEPS = ((1, 4.0), (2, 3.0), (3, 2.0))
WEIGHTS = {"a": np.array([1.0, 2.0]), "b": np.array([3.0])}
MOVED = 1e-3  # of weights of norm 3.7
TOLERANCE = TOLERANCES["bf16"]


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
            start=0, end=1, code_digest="c", seed=0, resources={"num_workers": workers}, hardware={}, resumed_at=[2]
        ),
    )  # fmt: skip
    (entry.path / "manifest.json").write_text(manifest.to_json())
    return entry


def found(tmp_path: Path, **other: object) -> Comparison:
    whole, parts = trained(tmp_path / "whole"), trained(tmp_path / "in parts", **other)  # type: ignore[arg-type]
    return compare(whole, parts, MOVED, TOLERANCE)


def test_what_tells_of_the_machine_alone_differs_in_nothing(tmp_path: Path) -> None:
    same = found(tmp_path, workers=2)
    assert (same.verdict, same.detail, same.loss_difference, same.weight_difference) == ("bit-identical", "", 0.0, 0.0)
    assert (same.num_workers, same.resumed_at) == ((1, 2), (2,))


@pytest.mark.parametrize(
    ("loss", "weight", "verdict"),
    [(1e-6, 0.05, "within tolerance"), (0.05, 0.05, "differs"), (1e-6, 0.4, "differs")],
    ids=["neither", "losses", "weights"],
)
def test_losses_and_weights_are_held_against_their_tolerances(
    tmp_path: Path, loss: float, weight: float, verdict: str
) -> None:
    """A resume that lost every step is apart by all that they moved, though that is little beside the weights."""
    weights = {"a": WEIGHTS["a"], "b": WEIGHTS["b"] + weight * MOVED}
    apart = found(tmp_path, steps=((1, 4.0), (2, 3.0), (3, 2.0 * (1 - loss))), weights=weights)
    assert apart.verdict == verdict
    assert apart.detail.startswith("first at step 3 in loss (2, unbroken, and 1.9")
    assert "b is the first of 1 tensors" in apart.detail
    assert apart.loss_difference == pytest.approx(loss, rel=0.02)
    assert apart.weight_difference == pytest.approx(weight, rel=0.02)


def test_without_a_tolerance_every_bit_counts(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole")
    assert compare(whole, trained(tmp_path / "same"), MOVED, None).verdict == "bit-identical"
    nearly = trained(tmp_path / "nearly", steps=((1, 4.0), (2, 3.0), (3, 2.0 + 1e-15)))
    assert compare(whole, nearly, MOVED, None).verdict == "differs"


@pytest.mark.parametrize(("step", "early"), [(1, True), (2, True), (3, False)])
def test_a_difference_before_the_interruption_is_of_the_machine(tmp_path: Path, step: int, early: bool) -> None:
    apart = found(tmp_path, steps=tuple((number, loss + 1e-9 * (number >= step)) for number, loss in STEPS))
    assert apart.resumed_at == (2,)
    assert ("no interruption had come by then (the checkpoint is of step 2)" in apart.detail) is early


@pytest.mark.parametrize(
    ("other", "detail"),
    [
        ({"steps": ((1, 4.0), (2, 3.0), (2, 3.0), (3, 2.0))}, "step 2 is reported 2 times"),
        ({"steps": ((1, 4.0), (3, 2.0))}, "step 2 is reported 0 times"),
        ({"steps": ((1, 4.0), (2, math.nan), (3, 2.0))}, "first at step 2 in loss (3, unbroken, and nan)"),
        ({"steps": ((1, 4.0), (2, math.inf), (3, 2.0))}, "first at step 2 in loss (3, unbroken, and inf)"),
        ({"config": "{ }"}, "other bytes in config.json"),
        ({"weights": {"a": WEIGHTS["a"]}}, "b is the first of 1 tensors"),
        ({"weights": {**WEIGHTS, "b": np.array([np.nan])}}, "b is the first of 1 tensors"),
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
    same = trained(tmp_path / "same", steps=steps, weights=lost)
    assert compare(whole, same, MOVED, TOLERANCE).verdict == "bit-identical"
    parts = trained(tmp_path / "apart", steps=steps, weights={**lost, "b": WEIGHTS["b"] + 1e-6})
    apart = compare(whole, parts, MOVED, TOLERANCE)
    assert apart.verdict == "within tolerance"
    assert "b is the first of 1 tensors" in apart.detail  # not a, whose bytes are the same


def test_a_count_that_began_again_is_not_bit_identical(tmp_path: Path) -> None:
    apart = found(tmp_path, tokens=20.0)
    assert apart.detail == "at the end in num_tokens (30, unbroken, and 20)"
    assert apart.verdict == "differs"
