"""The champion in a plan: who it is, what is left out without one, and that promoting changes no plan."""

import pytest

from flows.declare.config import load_pipeline
from flows.planning.plan import make_plan
from flows.promotion.retrain import has_work, pending
from lineage.errors import ArtifactError, ConfigError
from lineage.graph.places import node_key
from lineage.promotions import Event, append, locked
from lineage.record.verdict import Judged, RuleResult, Verdict
from tests.command import CONF
from tests.unit.flows.planning.test_plan import finish, states

PIPELINE = "toy-gated"


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


def test_options_that_an_alias_does_not_take_are_refused_before_it_names_a_model(toy):
    for option in ("revision=abc", "sample_count=3", "chat_template=chatml"):
        with pytest.raises(ConfigError, match=rf"sources\.champion\.{option.partition('=')[0]}"):
            toy(f"sources.champion.{option}")


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


def test_an_output_of_the_plan_that_no_gate_judges_is_a_champion_like_any_other(toy):
    finish(toy())
    held = hold(toy(), "model")
    new = toy()
    assert champion_of(new) == held
    assert {name for name, state in states(new).items() if state == "run"} == {"evaluate", "gate"}
    finish(new, "evaluate", "gate")
    hold(new, "left")
    assert champion_of(toy()) == held and set(states(toy()).values()) == {"reuse"}


def test_a_champion_that_is_gone_is_named(toy):
    finish(toy())
    hold(toy(), "left")
    plan = toy()
    (plan.entry(plan.stage("left")).path / "manifest.json").unlink()
    with pytest.raises(ArtifactError, match=r"holds that checkpoint no longer; restore it.*rollback --alias champion"):
        toy("stages.left.method.learning_rate=0.2")


def test_training_may_start_from_the_champion_whose_slot_is_not_left_out(toy):
    with pytest.raises(ConfigError, match=r"stages\.left\.inputs\.policy=champion: alias:champion names nothing that"):
        toy("stages.left.inputs.policy=champion")
    finish(toy())
    first = hold(toy(), "left")
    plan = toy("stages.right.inputs.policy=champion", "stages.left.method.seed=1")
    assert plan.stage("right").inputs["policy"].fingerprint == first
    assert plan.stage("right").upstream == ["data"]
    with pytest.raises(ConfigError, match="this slot takes"):  # an alias names no rows
        toy("sources.rows.path=alias:champion", "sources.rows.kind=checkpoint")


@pytest.fixture
def renewed(tmp_path):
    """Plans of a pipeline that renews a model, over rows of one word."""
    base = ["pipeline=toy-retrain", "model=none", f"sources.rows.path={tmp_path}/rows.txt", f"store={tmp_path}/store"]

    def plan(rows: str, *overrides: str):
        (tmp_path / "rows.txt").write_text(rows)
        return make_plan(load_pipeline([*base, *overrides], CONF))

    return plan


def made(plan):
    """Finishes a plan and gives its model the alias."""
    finish(plan)
    hold(plan, "learner")
    return {planned.name: planned.fingerprint for planned in plan.stages}


def inputs_of(plan, stage: str) -> dict[str, str]:
    return {slot: given.fingerprint for slot, given in plan.stage(stage).inputs.items()}


def test_the_next_generation_starts_from_the_champion_and_its_data_the_first_from_the_fallback(renewed):
    plan = renewed("a")
    assert inputs_of(plan, "learner")["policy"] == plan.stage("blank").fingerprint
    assert "replay" not in inputs_of(plan, "data")
    left_out = "source:start: alias champion names no model yet; blank in its place: learner.policy, exam.start, gate.p"
    assert any(note.startswith(left_out) for note in plan.notes)
    first = made(plan)
    second = renewed("b")
    assert inputs_of(second, "learner")["policy"] == first["learner"]
    assert inputs_of(second, "data")["replay"] == first["data"]
    assert "blank" not in {planned.name for planned in second.stages}
    assert "left out, since alias champion names a model: blank" in second.notes
    elsewhere = renewed("b", "sources.old-data.path=alias:champion/elsewhere")
    assert "replay" not in inputs_of(elsewhere, "data")
    assert any("which was made without that stage; left out: data.replay" in note for note in elsewhere.notes)
    made(second)
    judged = renewed("b", "stages.gate.method.seed=1")  # a change of the gate alone trains nothing again
    assert [planned.name for planned in judged.stale] == ["gate"]


def test_a_promoted_generation_is_the_one_that_was_planned(renewed):
    generations = [made(renewed(rows)) for rows in "abcd"]
    assert len({generation["learner"] for generation in generations}) == 4
    again = renewed("d")
    assert set(states(again).values()) == {"reuse"}
    assert again.stage("learner").fingerprint == generations[-1]["learner"]
    assert inputs_of(again, "learner")["policy"] == generations[-2]["learner"]
    # Earlier data is other data: it goes on from the champion too.
    assert inputs_of(renewed("b"), "learner")["policy"] == generations[-1]["learner"]


def test_a_generation_that_was_not_promoted_is_no_start(renewed):
    first = made(renewed("a"))
    finish(renewed("bad"))
    assert set(states(renewed("bad")).values()) == {"reuse"}
    assert inputs_of(renewed("c"), "learner")["policy"] == first["learner"]


def test_a_verdict_that_compared_with_another_champion_promotes_nothing(renewed):
    plan = renewed("a")
    candidate = Judged(name="learner", fingerprint=plan.stage("learner").fingerprint, digest=None)
    rule = RuleResult(rule="beats_champion", demand="it wins", against="champion", outcome="better")
    verdict = Verdict(
        result="pass", approval="none", confidence=0.95, candidate=candidate, champion=None, rules=[rule]
    )  # fmt: skip
    finish(plan, *(each.name for each in plan.stages if each.name != "gate"))
    finish(plan, "gate", files={"verdict.json": verdict.to_json()})
    learner, gate, blank = (node_key(name, plan.stage(name).fingerprint) for name in ("learner", "gate", "blank"))
    assert pending(renewed("a")) == [f"{learner} waits for alias champion: a run promotes it"]
    hold(plan, "blank")
    why = f"{gate} compared learner with no champion, and alias champion names {blank} now"
    assert pending(renewed("a")) == [f"{learner}: {why}"]
    assert not has_work(renewed("a"))


NO_REPLAY = ("stages.data.method.replay_share=null", "~stages.data.inputs.replay")


@pytest.mark.parametrize("first", [(), NO_REPLAY])
@pytest.mark.parametrize("field", ["held_out=0.4", "seed=1"])
def test_old_rows_that_were_split_otherwise_are_refused_by_the_plan(renewed, first, field):
    made(renewed("a", *first))
    message = r"old-data: the old rows were split with held_out=0\.1 and seed=0, the new ones would be with .*" + field
    with pytest.raises(ConfigError, match=message):
        renewed("b", f"stages.data.method.{field}")
    assert "replay" in inputs_of(renewed("b"), "data")


def test_old_rows_that_no_alias_names_need_the_record_of_how_they_were_split(renewed, tmp_path):
    first = renewed("a")
    finish(first)
    output = first.entry(first.stage("data")).output
    assert "replay" in inputs_of(renewed("b", f"sources.old-data.path={output}"), "data")
    with pytest.raises(ConfigError, match=r"split with held_out=0\.1"):
        renewed("b", f"sources.old-data.path={output}", "stages.data.method.held_out=0.2")
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(ConfigError, match=r"nothing says how the rows in .*elsewhere were split"):
        renewed("b", f"sources.old-data.path={tmp_path}/elsewhere")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sources.start.fallback=blnk", r"sources\.start\.fallback=blnk: .*did you mean blank"),
        (
            "sources.start.fallback=data",
            r"sources\.start\.fallback=data: .*data gives text, this slot takes checkpoint",
        ),
        ("sources.start.fallback=source:champion", "is an alias too, which may be unset"),
        ("sources.start.fallback=exam", "fallback=exam: .*(gives report|cycle)"),
        ("sources.rows.fallback=blank", r"sources\.rows\.fallback=blank: is for an alias"),
    ],
)
def test_a_fallback_that_cannot_serve_is_refused_also_while_a_champion_is_there(renewed, override, message):
    made(renewed("a"))
    with pytest.raises(ConfigError, match=message):
        renewed("b", override)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stages.data.method.replay_share=null", "nothing says how much of it is replayed"),
        ("~stages.data.inputs.replay", "there are no old rows to replay"),
        ("retrain.promote=blank", "no gate has it as candidate"),
    ],
)
def test_what_retraining_lacks_is_named(renewed, override, message):
    with pytest.raises(ConfigError, match=message):
        renewed("a", override)
