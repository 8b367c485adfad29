"""What sets an interrupted training apart from the unbroken one, and how far."""

import itertools
import json
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_tensors

from flows.operate.certify import TOLERANCES, _killed, compare
from lineage.checkpoints import Checkpoints
from lineage.filesystem.digest import digest_files, digest_of
from lineage.record.certificate import Comparison
from lineage.record.environment import provenance_here
from lineage.store import Entry, Manifest
from tasks.model.weight_differences import length, movement, weight_difference

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
        provenance=replace(provenance_here(0), end=1, resources={"num_workers": workers}, resumed_at=[2]),
    )  # fmt: skip
    (entry.path / "manifest.json").write_text(manifest.to_json())
    return entry


def found(tmp_path: Path, **other: object) -> Comparison:
    whole, parts = trained(tmp_path / "whole"), trained(tmp_path / "in parts", **other)  # type: ignore[arg-type]
    return compare(whole, parts, MOVED, TOLERANCE)


def test_a_training_is_killed_once_a_checkpoint_is_published_however_long_that_takes(tmp_path, monkeypatch) -> None:
    entry, polls, seen, killed = Entry(tmp_path), itertools.count(), list[int](), threading.Event()
    entry.metrics.write_text('{"step": 3, "time": 0, "metrics": {}}\n')

    def kill() -> None:
        seen.append(next(polls))
        killed.set()

    monkeypatch.setattr(Checkpoints, "steps", lambda _self: [2] if next(polls) == 2 else [])
    with _killed(3, entry, kill):
        assert killed.wait(60)
    assert seen == [3]


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


def test_a_count_that_began_again_is_not_bit_identical(tmp_path: Path) -> None:
    apart = found(tmp_path, tokens=20.0)
    assert apart.detail == "at the end in num_tokens (30, unbroken, and 20)"
    assert apart.verdict == "differs"


START = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0001])}


def model(directory: Path, weights: Mapping[str, torch.Tensor]) -> Path:
    directory.mkdir()
    if weights:
        save_tensors(dict(weights), directory / "model.safetensors")
    return directory


@pytest.mark.parametrize(
    ("after", "moved"),
    [
        (START, 0.0),
        ({name: weights.bfloat16() for name, weights in START.items()}, 0.0),
        ({**START, "head": torch.ones(1)}, 0.0),
        ({**START, "b": torch.tensor([3.0001, 3.0001])}, 0.0),
        ({"a": torch.tensor([1.0, 5.0]), "b": torch.tensor([7.0001])}, 5.0),
        ({"a": torch.tensor([torch.nan, 5.0]), "b": torch.tensor([7.0001])}, 5.0),
        ({"q.lora_A.weight": torch.ones(2), "q.lora_B.weight": torch.tensor([3.0, 4.0])}, 5.0),
        ({"q.lora_A.weight": torch.ones(2), "q.lora_B.weight": torch.zeros(2)}, 0.0),
        ({"head": torch.ones(2)}, None),
        ({}, None),
    ],
    ids=[
        "same", "in fewer bits", "a head beside", "grown", "moved", "lost", "an adapter", "an unmoved adapter",
        "another model", "no tensors",
    ],
)  # fmt: skip
def test_a_training_moved_what_is_known_of_its_start(
    tmp_path: Path, after: Mapping[str, torch.Tensor], moved: float | None
) -> None:
    given = {**START, "q.lora_B.weight": torch.ones(2)}  # of the adapter before, which is in the base by now
    found = movement(model(tmp_path / "before", given), model(tmp_path / "after", after))
    assert found == (None if moved is None else pytest.approx(moved))


@pytest.mark.parametrize(
    ("other", "tensors", "distance"),
    [
        (START, (), 0.0),
        ({"a": torch.tensor([1.0, 5.0]), "b": torch.tensor([7.0001])}, ("a", "b"), 5.0),
        ({**START, "b": torch.tensor([torch.nan])}, ("b",), math.inf),
        ({"a": START["a"]}, ("b",), math.inf),
        ({**START, "b": START["b"].bfloat16()}, ("b",), math.inf),
    ],
    ids=["same", "apart", "lost", "lacking", "of another type"],
)
def test_two_models_are_apart_by_all_their_tensors(
    tmp_path: Path, other: Mapping[str, torch.Tensor], tensors: tuple[str, ...], distance: float
) -> None:
    found = weight_difference(model(tmp_path / "one", START), model(tmp_path / "other", other))
    assert found.tensors == tensors
    assert found.distance == pytest.approx(distance)


def test_a_model_from_nothing_moved_by_all_that_it_is(tmp_path: Path) -> None:
    assert length(model(tmp_path / "end", {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])})) == 5.0
