"""An interrupted training beside the unbroken one: step by step, then by its weights."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite, isnan
from pathlib import Path

from flows.rehearsal.reported import of_the_model, reported
from lineage.certificates.certificate import Comparison, Tolerance
from lineage.manifest import Manifest
from lineage.store import Entry

# What another order of the same sums may come to, with room for larger models than bench/resume_differences.py has, and
# far from what lost steps, other rows or lost moments of Adam come to there.
TOLERANCES = {
    "fp32": Tolerance(losses=1e-4, weights=1e-2),
    "bf16": Tolerance(losses=2e-2, weights=0.1),
    "fp16": Tolerance(losses=2e-2, weights=0.1),
    "fp8": Tolerance(losses=2e-2, weights=0.1),
}
_JUDGED = ("loss", "num_tokens")  # the rest may be the small difference of large numbers: it is told, and not judged
WEIGHTS = ".safetensors"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first of its kind, in words, and its step; the largest, relative; None: there is none."""

    first: str | None = None
    step: int | None = None
    largest: float = 0.0


def compare(unbroken: Entry, other: Entry, moved: float, tolerance: Tolerance | None) -> Comparison:
    """What an interruption has changed of a finished training.

    Args:
        moved: norm of what the unbroken one had added to its weights: of a few steps with a small learning rate so
            little that beside the norm of the weights themselves even the loss of all of it would not show.
        tolerance: None: every bit counts.
    """
    whole, parts = _manifest(unbroken), _manifest(other)
    steps = _step_difference(unbroken.metrics, other.metrics)
    end = _changed("at the end", whole.metrics, parts.metrics)
    weights = _weight_difference(unbroken.output, other.output, whole, parts, moved)
    files = _file_difference(whole, parts)
    found = [each for each in (steps.first or end.first, weights.first, files, _too_early(steps, parts)) if each]
    numbers = max(steps.largest, end.largest)
    within = tolerance and numbers <= tolerance.losses and weights.largest <= tolerance.weights and not files
    return Comparison(
        verdict="bit-identical" if not found else "within tolerance" if within else "differs",
        detail="; ".join(found),
        num_workers=(_num_workers(whole), _num_workers(parts)),
        resumed_at=tuple(parts.provenance.resumed_at),
        loss_difference=_finite(numbers),
        weight_difference=_finite(weights.largest),
    )


def _too_early(steps: Difference, parts: Manifest) -> str | None:
    """Of a difference that no interruption made, since none had come."""
    resumed = parts.provenance.resumed_at
    if steps.step is None or not resumed or steps.step > resumed[0]:
        return None
    return (
        f"no interruption had come by then (the checkpoint is of step {resumed[0]}): on this machine two equal "
        "trainings differ, as where a kernel is not deterministic, and nothing is known of the resume"
    )


def _step_difference(unbroken: Path, other: Path) -> Difference:
    """Of what was reported: the first step at which anything differs, the loss before all else of it."""
    whole, parts = (Counter(report.step for report in reported(path)) for path in (unbroken, other))
    for step in sorted(whole.keys() | parts.keys()):
        if whole[step] != parts[step]:
            return Difference(first=f"step {step} is reported {parts[step]} times", largest=float("inf"))
    pairs = list(zip(reported(unbroken), reported(other), strict=True))
    changed = [_changed(f"first at step {one.step}", one.metrics, two.metrics) for one, two in pairs]
    largest = max((each.largest for each in changed), default=0.0)
    first = next(((one.step, each.first) for (one, _), each in zip(pairs, changed, strict=True) if each.first), None)
    return Difference(step=first[0], first=first[1], largest=largest) if first else Difference()


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


def _weight_difference(unbroken: Path, other: Path, whole: Manifest, parts: Manifest, moved: float) -> Difference:
    names = [name for name in whole.files.keys() | parts.files.keys() if name.endswith(WEIGHTS)]
    if all(whole.files.get(name) == parts.files.get(name) for name in names):
        return Difference()
    from tasks.weight_differences import weight_difference  # imports torch

    found = weight_difference(unbroken, other)
    if not found.tensors:  # other bytes around the same numbers
        return Difference(first=f"the bytes of {sorted(names)[0]}, in no number")
    largest = found.distance / moved if moved > 0 else float("inf")
    return Difference(first=f"{found.tensors[0]} is the first of {len(found.tensors)} tensors", largest=largest)


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
