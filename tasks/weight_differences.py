"""How far two models of the same shape are apart, tensor by tensor."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class WeightDifference:
    """One tensor that differs.

    Args:
        relative: norm of the difference by the norm of the first; infinite where one is lacking, of another shape, or
            no number.
    """

    tensor: str
    relative: float


def weight_differences(first: Path, second: Path) -> list[WeightDifference]:
    """The tensors in the safetensors of two directories that are not equal to the bit, in the order of their names."""
    left, right = dict(_places(first)), dict(_places(second))
    differences = (_difference(name, left.get(name), right.get(name)) for name in sorted(left.keys() | right.keys()))
    return [each for each in differences if each]


def is_unmoved(before: Path, after: Path) -> bool:
    """Whether a model is, in every tensor that it shares with the one it was made from, what that was: no step shows.

    A tensor that was written in fewer bits is compared in those; models without a common tensor tell nothing.
    """
    left, right = dict(_places(before)), dict(_places(after))
    shared = left.keys() & right.keys()
    pairs = (_tensors(name, left[name], right[name]) for name in sorted(shared))
    return bool(shared) and all(one.shape == other.shape and _equal(one.to(other.dtype), other) for one, other in pairs)


def _places(directory: Path) -> Iterator[tuple[str, Path]]:
    """Name of a tensor -> the file that holds it."""
    from safetensors import safe_open

    for path in sorted(directory.rglob("*.safetensors")):
        prefix = "" if path.parent == directory else f"{path.parent.relative_to(directory)}/"
        with safe_open(path, framework="pt") as file:
            yield from ((prefix + name, path) for name in file.keys())  # noqa: SIM118  no mapping


def _difference(name: str, first: Path | None, second: Path | None) -> WeightDifference | None:
    if first is None or second is None:
        return WeightDifference(tensor=name, relative=float("inf"))
    one, other = _tensors(name, first, second)
    if one.shape != other.shape or one.dtype != other.dtype:
        return WeightDifference(tensor=name, relative=float("inf"))
    if _equal(one, other):
        return None
    one, other = one.double(), other.double()
    norm, distance = float(one.norm()), float((one - other).norm())
    relative = distance / norm if norm > 0 else float("inf")
    return WeightDifference(tensor=name, relative=relative if relative == relative else float("inf"))


def _tensors(name: str, first: Path, second: Path) -> "tuple[Tensor, Tensor]":
    from safetensors import safe_open

    own = name.rpartition("/")[2]
    with safe_open(first, framework="pt") as left, safe_open(second, framework="pt") as right:
        return left.get_tensor(own), right.get_tensor(own)


def _equal(one: "Tensor", other: "Tensor") -> bool:
    """What is no number in both is the same in both."""
    return bool(((one == other) | ((one != one) & (other != other))).all())
