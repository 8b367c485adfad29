"""How far two models of the same shape are apart, tensor by tensor."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


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


def _places(directory: Path) -> Iterator[tuple[str, Path]]:
    """Name of a tensor -> the file that holds it."""
    from safetensors import safe_open

    for path in sorted(directory.rglob("*.safetensors")):
        prefix = "" if path.parent == directory else f"{path.parent.relative_to(directory)}/"
        with safe_open(path, framework="pt") as file:
            yield from ((prefix + name, path) for name in file.keys())  # noqa: SIM118  no mapping


def _difference(name: str, first: Path | None, second: Path | None) -> WeightDifference | None:
    from safetensors import safe_open

    if first is None or second is None:
        return WeightDifference(tensor=name, relative=float("inf"))
    own = name.rpartition("/")[2]
    with safe_open(first, framework="pt") as left, safe_open(second, framework="pt") as right:
        one, other = left.get_tensor(own), right.get_tensor(own)
    if one.shape != other.shape or one.dtype != other.dtype:
        return WeightDifference(tensor=name, relative=float("inf"))
    if bool((one == other).all()):
        return None
    one, other = one.double(), other.double()
    norm, distance = float(one.norm()), float((one - other).norm())
    relative = distance / norm if norm > 0 else float("inf")
    return WeightDifference(tensor=name, relative=relative if relative == relative else float("inf"))
