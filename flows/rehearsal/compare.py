"""An interrupted training beside the unbroken one: step by step, then tensor by tensor."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite, isnan
from pathlib import Path

from flows.rehearsal.reported import of_the_model, reported
from lineage.certificate import Comparison, Verdict
from lineage.manifest import Manifest
from lineage.store import Entry

# Relative, of the losses and of each tensor after a few steps: what another order of the same sums may come to.
TOLERANCES = {"fp32": 1e-4, "bf16": 2e-2}
_JUDGED = ("loss", "num_tokens")  # the rest may be the small difference of large numbers: it is told, and not judged
WEIGHTS = ".safetensors"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first of its kind, in words, and the largest, relative; None: there is none."""

    first: str | None = None
    largest: float = 0.0


def compare(unbroken: Entry, other: Entry, tolerance: float) -> Comparison:
    """What an interruption has changed of a finished training."""
    whole, parts = _manifest(unbroken), _manifest(other)
    steps = _step_difference(unbroken.metrics, other.metrics)
    end = _changed("at the end", whole.metrics, parts.metrics)
    weights = _weight_difference(unbroken.output, other.output, whole, parts)
    files = _file_difference(whole, parts)
    found = [each for each in (steps.first or end.first, weights.first, files) if each]
    numbers = max(steps.largest, end.largest)
    return Comparison(
        verdict=_verdict(found, max(numbers, weights.largest), tolerance, files),
        detail="; ".join(found),
        num_workers=(_num_workers(whole), _num_workers(parts)),
        resumed_at=tuple(parts.provenance.resumed_at),
        loss_difference=_finite(numbers),
        weight_difference=_finite(weights.largest),
    )


def _verdict(found: list[str], largest: float, tolerance: float, files: str | None) -> Verdict:
    if not found:
        return "bit-identical"
    return "within tolerance" if largest <= tolerance and not files else "differs"


def _step_difference(unbroken: Path, other: Path) -> Difference:
    """Of what was reported: the first step at which anything differs, the loss before all else of it."""
    whole, parts = (Counter(report.step for report in reported(path)) for path in (unbroken, other))
    for step in sorted(whole.keys() | parts.keys()):
        if whole[step] != parts[step]:
            return Difference(first=f"step {step} is reported {parts[step]} times", largest=float("inf"))
    pairs = zip(reported(unbroken), reported(other), strict=True)
    changed = [_changed(f"first at step {one.step}", one.metrics, two.metrics) for one, two in pairs]
    first = next((each.first for each in changed if each.first), None)
    return Difference(first=first, largest=max((each.largest for each in changed), default=0.0))


def _changed(where: str, one: Mapping[str, float], two: Mapping[str, float]) -> Difference:
    """Of the numbers of one step, or of the end: a count that began again shows there."""
    left, right = of_the_model(one), of_the_model(two)
    names = sorted(left.keys() | right.keys(), key=lambda name: (name != "loss", name))
    changed = [name for name in names if not _same(left.get(name), right.get(name))]
    if not changed:
        return Difference()
    first = f"{where} in {changed[0]} ({_shown(left.get(changed[0]))}, unbroken, and {_shown(right.get(changed[0]))})"
    judged = [_relative(left.get(name), right.get(name)) for name in changed if name in _JUDGED]
    return Difference(first=first, largest=max(judged, default=0.0))


def _weight_difference(unbroken: Path, other: Path, whole: Manifest, parts: Manifest) -> Difference:
    names = [name for name in whole.files.keys() | parts.files.keys() if name.endswith(WEIGHTS)]
    if all(whole.files.get(name) == parts.files.get(name) for name in names):
        return Difference()
    from tasks.weight_differences import weight_differences  # imports torch

    found = weight_differences(unbroken, other)
    if not found:  # other bytes around the same numbers
        return Difference(first=f"the bytes of {sorted(names)[0]}, in no number")
    first = f"{found[0].tensor} is the first of {len(found)} tensors, by {found[0].relative:.2g}"
    return Difference(first=first, largest=max(each.relative for each in found))


def _file_difference(whole: Manifest, parts: Manifest) -> str | None:
    """Of all that lies beside the weights."""
    names = sorted(name for name in whole.files.keys() | parts.files.keys() if not name.endswith(WEIGHTS))
    changed = [name for name in names if whole.files.get(name) != parts.files.get(name)]
    return f"other bytes in {', '.join(changed[:3])}" if changed else None


def _same(left: float | None, right: float | None) -> bool:
    """To the bit: of two numbers that are none, each is what the other is."""
    return left == right or (left is not None and right is not None and isnan(left) and isnan(right))


def _relative(left: float | None, right: float | None) -> float:
    """Infinite where either is lacking or no finite number: no order among such would be true."""
    if left is None or right is None or not (isfinite(left) and isfinite(right)):
        return float("inf")
    return abs(left - right) / max(abs(left), abs(right))


def _finite(number: float) -> float | None:
    return number if isfinite(number) else None


def _num_workers(manifest: Manifest) -> int:
    return int(str(manifest.provenance.resources["num_workers"]))


def _shown(value: float | None) -> str:
    return "none" if value is None else f"{value:.9g}"


def _manifest(entry: Entry) -> Manifest:
    manifest = entry.manifest()
    assert manifest is not None
    return manifest
