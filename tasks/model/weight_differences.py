"""The distance of two models, and the distance by which a training moved its model."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite, sqrt
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class WeightDifference:
    """The difference of two models.

    Args:
        tensors: names of the tensors that are not equal to the bit, in order.
        distance: Euclidean norm of the difference of all weights; infinite where a tensor of one of the two is missing,
            of another shape or type, or not a number.
    """

    tensors: tuple[str, ...]
    distance: float


def weight_difference(first: Path, second: Path) -> WeightDifference:
    """The difference of the safetensors in two directories."""
    left, right = dict(_places(first)), dict(_places(second))
    apart = {name: _square(name, left.get(name), right.get(name)) for name in sorted(left.keys() | right.keys())}
    differ = {name: square for name, square in apart.items() if square is not None}
    return WeightDifference(tensors=tuple(differ), distance=sqrt(sum(differ.values())))


def movement(start: Path, end: Path) -> float | None:
    """Euclidean norm of what a training added to its initial weights; 0.0: no weight has changed.

    Of an adapter B began at zero, whatever was set (Hu et al. 2021, arXiv:2106.09685, section 4.1). What began at
    random (its A, a new head) or has grown is not counted: its own norm would hide how little the rest has moved.

    Returns:
        None: they share no tensor.
    """
    left, right = dict(_places(start)), dict(_places(end))
    moved = [_moved_square(name, left.get(name), place) for name, place in right.items()]
    known = [square for square in moved if square is not None]
    return sqrt(sum(known)) if known else None


def length(directory: Path) -> float:
    """Euclidean norm of all weights of a model: how far it moved, if it began at zero."""
    return sqrt(sum(_finite_square(_tensor(name, place)) for name, place in _places(directory)))


def _places(directory: Path) -> Iterator[tuple[str, Path]]:
    """Name of a tensor -> the file that holds it."""
    from safetensors import safe_open

    for path in sorted(directory.rglob("*.safetensors")):
        prefix = "" if path.parent == directory else f"{path.parent.relative_to(directory)}/"
        with safe_open(path, framework="pt") as file:
            yield from ((prefix + name, path) for name in file.keys())  # noqa: SIM118  no mapping


def _square(name: str, first: Path | None, second: Path | None) -> float | None:
    """The squared distance of two tensors; None: they are equal to the bit."""
    import torch

    if first is None or second is None:
        return float("inf")
    one, other = _tensor(name, first), _tensor(name, second)
    if one.shape != other.shape or one.dtype != other.dtype:
        return float("inf")
    # A nan in both counts as equal.
    same = (one == other) | ((one != one) & (other != other))
    if bool(same.all()):
        return None
    square = float(torch.where(same, 0.0, one.double() - other.double()).square().sum())
    return square if isfinite(square) else float("inf")


def _moved_square(name: str, start: Path | None, end: Path) -> float | None:
    """The squared movement of one tensor; None: its initial value is unknown."""
    tensor = _tensor(name, end)
    if ".lora_B." in name:
        return _finite_square(tensor)
    if start is None or ".lora_A." in name:
        return None
    before = _tensor(name, start)
    if before.shape != tensor.shape:
        return None
    return _finite_square(tensor.double() - before.to(tensor.dtype).double())  # it may be written in fewer bits


def _finite_square(tensor: "Tensor") -> float:
    return float(tensor.double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).square().sum())


def _tensor(name: str, path: Path) -> "Tensor":
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return file.get_tensor(name.rpartition("/")[2])
