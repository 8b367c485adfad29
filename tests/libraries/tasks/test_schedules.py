"""The learning rates of each schedule, against formulas written out; every field of a schedule changes them."""

import math
from pathlib import Path

import pytest
import torch
from transformers import TrainingArguments, get_scheduler

from lineage.errors import ConfigError
from tasks.method import Schedule
from tasks.train.schedules import PLATEAU, SCHEDULES, schedule_args

RATE, STEPS, WARMUP = 1e-2, 12, 2
REST = STEPS - WARMUP


def rates(setting: Schedule, folder: Path, updates: int = 1) -> list[float]:
    """Shares of the learning rate, by step, as the trainer sets them."""
    args = TrainingArguments(str(folder), use_cpu=True, **schedule_args(setting, RATE, STEPS, updates))
    total = STEPS * updates
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
    schedule = get_scheduler(
        args.lr_scheduler_type, optimizer, args.get_warmup_steps(total), total, args.lr_scheduler_kwargs
    )
    found = []
    for _ in range(total):
        found.append(schedule.get_last_lr()[0] / RATE)
        optimizer.step()
        schedule.step()
    return found


def cosine(step: int, minimum: float = 0.0) -> float:
    return minimum + (1 - minimum) * 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / REST))


FORMULAS = {
    "constant": (Schedule(name="constant", warmup=2), lambda step: 1.0),
    "constant_with_warmup": (Schedule(name="constant_with_warmup", warmup=2), lambda step: 1.0),
    "linear": (Schedule(name="linear", warmup=2), lambda step: (STEPS - step) / REST),
    "linear, minimum": (
        Schedule(name="linear", warmup=2, min_learning_rate=1e-3), lambda step: 0.1 + 0.9 * (STEPS - step) / REST
    ),
    "cosine": (Schedule(warmup=2), cosine),
    "cosine, share": (Schedule(warmup=2 / 12), cosine),
    "cosine, minimum": (Schedule(warmup=2, min_learning_rate=2e-3), lambda step: cosine(step, 0.2)),
    "cosine_with_min_lr": (Schedule(name="cosine_with_min_lr", warmup=2), lambda step: cosine(step, 0.1)),
    "cosine_with_restarts": (
        Schedule(name="cosine_with_restarts", warmup=2), lambda step: cosine(WARMUP + 2 * (step - WARMUP) % REST)
    ),
    "cosine_with_restarts, cycles": (
        Schedule(name="cosine_with_restarts", warmup=2, num_cycles=5),
        lambda step: cosine(WARMUP + 5 * (step - WARMUP) % REST),
    ),
    "polynomial": (
        Schedule(name="polynomial", warmup=2, power=2.0), lambda step: ((STEPS - step) / REST) ** 2
    ),
    "polynomial, minimum": (
        Schedule(name="polynomial", warmup=2, power=3.0, min_learning_rate=1e-3),
        lambda step: 0.1 + 0.9 * ((STEPS - step) / REST) ** 3,
    ),
    "inverse_sqrt": (Schedule(name="inverse_sqrt", warmup=2), lambda step: (2 / step) ** 0.5),
    "inverse_sqrt, timescale": (
        Schedule(name="inverse_sqrt", warmup=2, timescale=6), lambda step: (6 / (step + 4)) ** 0.5
    ),
    "warmup_stable_decay": (
        Schedule(name="warmup_stable_decay", warmup=2, decay=0.5),
        lambda step: 1.0 if step < 6 else 0.5 * (1 + math.cos(math.pi * (step - 6) / 6)),
    ),
    "warmup_stable_decay, linear": (
        Schedule(name="warmup_stable_decay", warmup=2, decay=4, decay_type="linear", min_learning_rate=1e-3),
        lambda step: 1.0 if step < 8 else 0.1 + 0.9 * (1 - (step - 8) / 4),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMULAS)
def test_the_learning_rate_is_that_of_the_formula(name: str, tmp_path: Path) -> None:
    setting, share = FORMULAS[name]
    found = rates(setting, tmp_path)
    # From its minimum, where transformers' stable schedule has one; else from 0.
    start = found[0]
    assert found[:WARMUP] == pytest.approx([start, (1 + start) / 2])
    assert start == (0.1 if name == "warmup_stable_decay, linear" else 0.0)
    assert found[WARMUP:] == pytest.approx([share(step) for step in range(WARMUP, STEPS)])


def test_every_schedule_has_a_formula_and_no_two_are_one() -> None:
    named = {setting.name for setting, _ in FORMULAS.values()}
    assert named == SCHEDULES.keys() - {PLATEAU}  # test_optimizers.py has that


def test_a_rate_below_1e_7_can_end_in_a_polynomial(tmp_path: Path) -> None:
    args = schedule_args(Schedule(name="polynomial"), 1e-8, STEPS)
    assert args["lr_scheduler_kwargs"] == {"lr_end": 0.0, "power": 1.0}


@pytest.mark.parametrize("setting", [
    Schedule(name="warmup_stable_decay", warmup=2, decay=4),
    Schedule(name="warmup_stable_decay", warmup=0.25, decay=0.5),
    Schedule(name="inverse_sqrt", warmup=2, timescale=6),
])  # fmt: skip
def test_a_loop_of_its_own_counts_in_steps_of_several_updates(tmp_path: Path, setting: Schedule) -> None:
    once, thrice = rates(setting, tmp_path), rates(setting, tmp_path, updates=3)
    assert thrice[::3] == pytest.approx(once)


@pytest.mark.parametrize("sizes", [{"warmup": 4.0, "decay": 4.0}, {"warmup": 0.5, "decay": 6.0}])
def test_warm_up_and_decay_that_the_rows_have_too_few_steps_for_are_refused(sizes: dict[str, float]) -> None:
    setting = Schedule(name="warmup_stable_decay", **sizes)
    schedule_args(setting, RATE, 12)
    with pytest.raises(ConfigError, match="more than the 7 steps of this training"):
        schedule_args(setting, RATE, 7)
