"""What ``posttrain compat`` says works together does train: each pair of settings in at least one training.

Pairs of a value whose package is not installed are left out; at night all packages are.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from flows.reports.compat import Choice, all_outcomes, choices, outcome
from tasks.method import Adapter
from tasks.train.models.quantization import missing
from tasks.train.optim.optimizers import OPTIMIZERS
from tests import training
from tests.training import same, weights

SETTINGS = (  # of one worker
    "method", "adapter", "quantization", "optimizer", "schedule", "precision", "attention", "weights", "checkpointing",
)  # fmt: skip
SHARES = 8  # in which the trainings are divided, so that test workers share them
# What a type needs on a tiny model, or in few steps.
FITTED: dict[object, dict[str, object]] = {
    "adalora": {"num_steps": 8},
    "fourierft": {"adapter": Adapter(type="fourierft", num_frequencies=50)},
}
Pairs = set[frozenset[Choice]]


def pairs_that_work() -> Pairs:
    found = (frozenset(each.choices) for each in all_outcomes()[1] if each.works == "yes")
    return {pair for pair in found if all(choice.setting in SETTINGS and is_installed(choice) for choice in pair)}


def is_installed(choice: Choice) -> bool:
    if choice.setting == "quantization":
        return choice.value == "none" or missing(choice.value, on_gpu=False) is None
    package = OPTIMIZERS[choice.value].package if choice.setting == "optimizer" else None
    return package is None or not package.is_missing


def covering(pairs: Pairs) -> Iterator[tuple[Choice, ...]]:
    """Values of all settings that work together, greedily few, so that each pair is in one of them."""
    left = set(pairs)
    values = {setting: [each for each in found if is_installed(each)] for setting, found in choices().items()}
    while left:
        chosen = sorted(min(left, key=lambda pair: sorted(map(str, pair))), key=str)
        for setting in SETTINGS:
            if all(each.setting != setting for each in chosen):
                fitting = [each for each in values[setting] if outcome(*chosen, each).works == "yes"]
                chosen.append(max(fitting, key=lambda new: sum(frozenset((new, old)) in left for old in chosen)))
        left -= {frozenset(pair) for pair in combinations(chosen, 2)}
        yield tuple(chosen)


@pytest.mark.nightly
def test_at_night_every_optional_package_is_installed() -> None:
    """So that each pair that the table calls working on a CPU is trained; ``make nightly`` installs them."""
    choices_with_packages = [each for name in ("optimizer", "quantization") for each in choices()[name]]
    not_free = [each.value for each in choices_with_packages if each.value in OPTIMIZERS and licence_of(each.value)]
    lacking = [
        each.value
        for each in choices_with_packages
        if outcome(each).works == "yes" and not is_installed(each) and each.value not in not_free
    ]
    assert not lacking, f"make nightly installs what {', '.join(lacking)} need"


def licence_of(optimizer: str) -> str | None:
    """The licence of its package, where it forbids commercial use: it is in no extra."""
    package = OPTIMIZERS[optimizer].package
    return package.licence if package else None


@pytest.mark.slow
def test_every_pair_that_works_is_in_one_training() -> None:
    pairs = pairs_that_work()
    trained = {frozenset(pair) for chosen in covering(pairs) for pair in combinations(chosen, 2)}
    assert pairs <= trained and len(pairs) > 50


@pytest.mark.slow  # as many trainings as pairs of an optimizer and an adapter, about
@pytest.mark.parametrize("share", range(SHARES))
def test_what_works_together_trains(root: Path, tmp_path: Path, share: int) -> None:
    start = weights(root / "policy")
    for number, chosen in enumerate(list(covering(pairs_that_work()))[share::SHARES]):
        case = outcome(*chosen).case
        assert case
        named = " ".join(map(str, chosen))
        own = training.OWN.get(str(next(each.value for each in chosen if each.setting == "method")), {})
        method = replace(case.method, **{**own, **FITTED.get(case.get("method.adapter.type"), {})})
        done = training.train(method, root, tmp_path / str(number), resources=case.resources)
        assert all(map(math.isfinite, done.losses)) and len(done.losses) == method.num_steps, named
        assert not same(weights(done.output), start), named
