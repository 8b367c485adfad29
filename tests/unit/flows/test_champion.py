"""The champion in a plan: who it is, what is left out without one, and that promoting changes no plan."""

import pytest

from flows.config import load_pipeline
from flows.plan import make_plan
from lineage.errors import ArtifactError, ConfigError
from lineage.promotions import Event, append, locked
from tests.unit.flows.test_config import CONF
from tests.unit.flows.test_plan import finish, states


@pytest.fixture
def toy(tmp_path):
    (tmp_path / "rows.txt").write_text("rows")
    base = ["pipeline=toy-gated", "model=none", f"sources.rows.path={tmp_path}/rows.txt", f"store={tmp_path}/store"]

    def plan(*overrides: str):
        return make_plan(load_pipeline([*base, *overrides], CONF))

    return plan


def hold(plan, stage: str, alias: str = "champion") -> str:
    planned = plan.stage(stage)
    event = Event(action="promote", alias=alias, stage=stage, fingerprint=planned.fingerprint, who="me", why="")
    with locked(plan.pipeline.store):
        append(plan.pipeline.store, event)
    return planned.fingerprint


def champion_of(plan) -> str | None:
    given = plan.stage("gate").inputs.get("champion")
    return given.fingerprint if given else None


def test_without_a_holder_the_slots_are_left_out_and_the_plan_says_so(toy):
    plan = toy()
    assert champion_of(plan) is None
    assert "champion" not in plan.stage("evaluate").inputs
    assert plan.notes == [
        "source:champion: alias champion names no model yet; left out: evaluate.champion, gate.champion"
    ]
    assert plan.to_dict()["notes"] == plan.notes


def test_promoting_the_plans_own_model_changes_no_plan(toy):
    finish(toy())
    before = toy()
    hold(before, "left")
    assert set(states(toy()).values()) == {"reuse"}
    assert champion_of(toy()) is None


def test_another_plan_is_compared_with_the_latest_holder_that_is_not_its_own(toy):
    finish(toy())
    first = hold(toy(), "left")
    new = toy("stages.left.method.learning_rate=0.2")
    assert champion_of(new) == first
    assert states(new) == {
        "data": "reuse", "model": "reuse", "left": "run", "right": "reuse", "evaluate": "run", "gate": "run"
    }  # fmt: skip
    given = new.stage("gate").inputs["champion"]
    assert new.path_of(given) == new.pipeline.store / "left" / first[:16] / "output"
    assert given.pinned is not None and given.pinned.record.path == str(new.path_of(given))
    assert new.stage("evaluate").upstream == ["model", "left"]
    finish(new, "left", "evaluate", "gate")
    hold(new, "left")
    again = toy("stages.left.method.learning_rate=0.2")
    assert champion_of(again) == first
    assert set(states(again).values()) == {"reuse"}
    assert champion_of(toy()) == new.stage("left").fingerprint


def test_a_champion_that_is_gone_is_named(toy):
    finish(toy())
    hold(toy(), "left")
    plan = toy()
    (plan.entry(plan.stage("left")).path / "manifest.json").unlink()
    with pytest.raises(ArtifactError, match=r"holds that model no longer; restore it.*rollback --alias champion"):
        toy("stages.left.method.learning_rate=0.2")


def test_a_slot_that_needs_a_model_is_not_left_out(toy):
    with pytest.raises(ConfigError, match=r"stages\.left\.inputs\.policy=champion: alias:champion names no model"):
        toy("stages.left.inputs.policy=champion")


def test_training_may_start_from_the_champion(toy):
    finish(toy())
    first = hold(toy(), "left")
    plan = toy("stages.right.inputs.policy=champion", "stages.left.method.seed=1")
    assert plan.stage("right").inputs["policy"].fingerprint == first
    assert plan.stage("right").upstream == ["data"]


def test_an_alias_names_no_rows(toy):
    finish(toy())
    hold(toy(), "left")
    with pytest.raises(ConfigError, match="this slot takes"):
        toy("sources.rows.path=alias:champion", "sources.rows.kind=checkpoint")
