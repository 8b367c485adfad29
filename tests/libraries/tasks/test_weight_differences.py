"""What a training has moved of the model that it was given, and how far two are apart."""

import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tasks.weight_differences import length, movement, weight_difference

GIVEN = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0001])}


def model(directory: Path, weights: Mapping[str, torch.Tensor]) -> Path:
    directory.mkdir()
    if weights:
        save_file(dict(weights), directory / "model.safetensors")
    return directory


@pytest.mark.parametrize(
    ("after", "moved"),
    [
        (GIVEN, 0.0),
        ({name: weights.bfloat16() for name, weights in GIVEN.items()}, 0.0),
        ({**GIVEN, "head": torch.ones(1)}, 0.0),
        ({**GIVEN, "b": torch.tensor([3.0001, 3.0001])}, 0.0),
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
    given = {**GIVEN, "q.lora_B.weight": torch.ones(2)}  # of the adapter before, which is in the base by now
    found = movement(model(tmp_path / "before", given), model(tmp_path / "after", after))
    assert found == (None if moved is None else pytest.approx(moved))


@pytest.mark.parametrize(
    ("other", "tensors", "distance"),
    [
        (GIVEN, (), 0.0),
        ({"a": torch.tensor([1.0, 5.0]), "b": torch.tensor([7.0001])}, ("a", "b"), 5.0),
        ({**GIVEN, "b": torch.tensor([torch.nan])}, ("b",), math.inf),
        ({"a": GIVEN["a"]}, ("b",), math.inf),
        ({**GIVEN, "b": GIVEN["b"].bfloat16()}, ("b",), math.inf),
    ],
    ids=["same", "apart", "lost", "lacking", "of another type"],
)
def test_two_models_are_apart_by_all_their_tensors(
    tmp_path: Path, other: Mapping[str, torch.Tensor], tensors: tuple[str, ...], distance: float
) -> None:
    found = weight_difference(model(tmp_path / "one", GIVEN), model(tmp_path / "other", other))
    assert found.tensors == tensors
    assert found.distance == pytest.approx(distance)


def test_a_model_from_nothing_moved_by_all_that_it_is(tmp_path: Path) -> None:
    assert length(model(tmp_path / "end", {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])})) == 5.0
