"""With which workers a stage may go on from its checkpoint."""

import pytest

from flows.planning.plan import Plan
from lineage.errors import ConfigError
from tests import finished

ZERO = "stages.left.resources.zero_stage=2"
TWO = ("stages.left.resources.num_workers=2", "stages.left.resources.micro_batch_size=4")


def save(plan: Plan, **fields: int) -> None:
    """A checkpoint of ``left``."""
    finished.save(plan.entry(plan.stage("left")), 7, **fields)


def test_other_workers_go_on_and_the_plan_says_what_that_means(toy):
    save(toy(), num_workers=2)
    planned = toy().stage("left")
    assert planned.state == "resume"
    assert planned.reason.endswith("; with 1 worker instead of 2: within tolerance, not to the bit")
    assert "instead of" not in toy(*TWO).stage("left").reason


def test_more_workers_are_counted(toy):
    save(toy(), num_workers=1)
    assert "with 2 workers instead of 1" in toy(*TWO).stage("left").reason


@pytest.mark.parametrize(("field", "before", "now"), [("micro_batch_size", 8, 4), ("cpus_per_worker", 1, 2)])
def test_what_adds_in_another_order_is_said_too(toy, field, before, now):
    save(toy(), num_workers=1, **{field: before})
    assert "instead of" not in toy().stage("left").reason
    reason = toy(f"stages.left.resources.{field}={now}").stage("left").reason
    assert reason.endswith(f"; with {field}={now} instead of {before}: within tolerance, not to the bit")


def test_what_the_checkpoint_does_not_say_is_not_compared(toy):
    save(toy(), num_workers=1)
    assert "instead of" not in toy("stages.left.resources.micro_batch_size=4").stage("left").reason


@pytest.mark.parametrize(
    ("num_workers", "zero_stage", "overrides"),
    [(2, 2, ()), (2, 2, TWO), (2, 0, (*TWO, ZERO)), (1, 0, (*TWO, ZERO)), (4, 2, (*TWO, ZERO))],
)
def test_who_cannot_read_it_is_refused(toy, num_workers, zero_stage, overrides):
    save(toy(), num_workers=num_workers, zero_stage=zero_stage)
    with pytest.raises(ConfigError, match="cannot resume from it") as refused:
        toy(*overrides)
    assert str(refused.value).startswith("stages.left.resources: its checkpoint of step 7 was written with ")
    remedy = f"set num_workers={num_workers} and zero_stage={zero_stage}, or begin again with restart=[left]"
    assert str(refused.value).endswith(remedy)
    assert toy(*overrides, "restart=[left]").stage("left").state == "run"


def test_the_same_workers_read_zero_s_parts(toy):
    save(toy(), num_workers=2, zero_stage=2)
    planned = toy(*TWO, ZERO).stage("left")
    assert planned.state == "resume"
    assert "instead of" not in planned.reason
