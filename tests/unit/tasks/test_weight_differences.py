"""What a training has moved of the model that it was given."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tasks.weight_differences import is_unmoved

GIVEN = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0001])}


def model(directory: Path, weights: Mapping[str, torch.Tensor]) -> Path:
    directory.mkdir()
    if weights:
        save_file(dict(weights), directory / "model.safetensors")
    return directory


@pytest.mark.parametrize(
    ("after", "unmoved"),
    [
        (GIVEN, True),
        ({name: weights.bfloat16() for name, weights in GIVEN.items()}, True),
        ({**GIVEN, "head": torch.ones(1)}, True),  # which was not there to be moved
        ({**GIVEN, "b": torch.tensor([3.0002])}, False),
        ({**GIVEN, "b": torch.tensor([3.0001, 3.0001])}, False),
        ({"lora_A": torch.ones(2)}, False),
        ({}, False),
    ],
    ids=["same", "in fewer bits", "a head beside", "moved", "grown", "an adapter beside", "no tensors"],
)
def test_a_model_is_unmoved_if_all_that_it_shares_is(
    tmp_path: Path, after: Mapping[str, torch.Tensor], unmoved: bool
) -> None:
    assert is_unmoved(model(tmp_path / "before", GIVEN), model(tmp_path / "after", after)) is unmoved
