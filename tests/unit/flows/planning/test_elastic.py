"""With which workers a stage may go on from its checkpoint."""

from pathlib import Path

import pytest

from flows.planning.plan import Plan
from lineage.checkpoints import Checkpoint
from lineage.errors import ConfigError

ZERO = "stages.left.resources.zero_stage=2"
TWO = ("stages.left.resources.num_workers=2", "stages.left.resources.micro_batch_size=4")


def save(plan: Plan, *, num_workers: int, zero_stage: int = 0) -> None:
    """A checkpoint of ``left``."""
    draft = Path(plan.pipeline.store) / "draft"
    draft.mkdir(parents=True)
    checkpoint = Checkpoint(
        step=7, time=1.0, train_seconds=1.0, num_workers=num_workers, zero_stage=zero_stage, metrics={}
    )  # fmt: skip
    plan.entry(plan.stage("left")).checkpoints.commit(draft, checkpoint)


def test_other_workers_go_on_and_the_plan_says_what_that_means(toy):
    save(toy(), num_workers=2)
    planned = toy().stage("left")
    assert planned.state == "resume"
    assert planned.reason.endswith("; with 1 worker instead of 2: within tolerance, not to the bit")
    assert "instead of" not in toy(*TWO).stage("left").reason


def test_more_workers_are_counted(toy):
    save(toy(), num_workers=1)
    assert "with 2 workers instead of 1" in toy(*TWO).stage("left").reason


@pytest.mark.parametrize(
    ("num_workers", "zero_stage", "overrides"),
    [(2, 2, ()), (2, 2, TWO), (2, 0, (*TWO, ZERO)), (1, 0, (*TWO, ZERO)), (4, 2, (*TWO, ZERO))],
)
def test_who_cannot_read_it_is_refused(toy, num_workers, zero_stage, overrides):
    save(toy(), num_workers=num_workers, zero_stage=zero_stage)
    with pytest.raises(ConfigError, match="cannot go on from it") as refused:
        toy(*overrides)
    assert str(refused.value).startswith("stages.left.resources: its checkpoint of step 7 was written with ")
    remedy = f"state num_workers={num_workers} and zero_stage={zero_stage}, or begin again with restart=[left]"
    assert str(refused.value).endswith(remedy)
    assert toy(*overrides, "restart=[left]").stage("left").state == "run"


def test_the_same_workers_read_zero_s_parts(toy):
    save(toy(), num_workers=2, zero_stage=2)
    planned = toy(*TWO, ZERO).stage("left")
    assert planned.state == "resume"
    assert "instead of" not in planned.reason
