import json

import pytest

from flows.declare.config import load_pipeline
from flows.planning.plan import make_plan
from lineage.errors import ConfigError
from tests.finished import finish


def states(plan) -> dict[str, str]:
    return {planned.name: planned.state for planned in plan.stages}


def test_a_field_reruns_its_stage_and_what_depends_on_it_and_the_reason_names_both_values(toy):
    assert {(planned.state, planned.reason) for planned in toy().stages} == {("run", "never run")}
    finish(toy())
    assert set(states(toy()).values()) == {"reuse"}
    larger = toy("stages.model.method.size=2")
    assert states(larger) == {"data": "reuse", "model": "run", "left": "run", "right": "run"}
    assert larger.stage("model").reason == "size: 1 -> 2"
    assert larger.stage("left").reason.startswith("input policy: model@")
    faster = toy("stages.left.method.learning_rate=0.2")
    assert states(faster) == {"data": "reuse", "model": "reuse", "left": "run", "right": "reuse"}
    assert faster.stage("left").reason == "learning_rate: 0.1 -> 0.2"
    finish(toy("stages.left.method.learning_rate=0.2", "stages.left.method.seed=5"), "left")
    assert states(toy())["left"] == "reuse"  # what was made earlier stays
    nearest = toy("stages.left.method.learning_rate=0.3").stage("left")
    assert nearest.reason == "learning_rate: 0.1 -> 0.3"  # compared with the nearest output


@pytest.mark.parametrize(
    "override",
    ["resources.micro_batch_size=4", "resources=cluster", "resources.cpus_per_worker=1", "resources.gpus_per_worker=1",
     "resources.num_workers=2", "resources=foreground", "resources.launcher=process", "code_drift=rerun"],
)  # fmt: skip
def test_execution_is_not_identity(toy, override):
    finish(toy())
    assert set(states(toy(override)).values()) == {"reuse"}


def test_a_changed_byte_of_a_source_reruns_what_reads_it(toy, tmp_path):
    finish(toy())
    (tmp_path / "rows.txt").write_text("other rows")
    plan = toy()
    assert set(states(plan).values()) == {"run"}
    assert plan.stage("data").reason.startswith("input rows: source:rows@")


def test_a_lost_output_file_is_made_again(toy):
    plan = toy()
    finish(plan)
    (plan.entry(plan.stage("left")).output / "f").unlink()
    assert toy().stage("left").reason == "its output is damaged: f is missing"


def test_an_attempt_that_stopped_says_where(toy):
    plan = toy()
    entry = plan.entry(plan.stage("left"))
    entry.begin()
    entry.metrics.write_text('{"step": 7, "time": 0, "metrics": {}}\n{"step": 8, "ti')
    assert toy().stage("left").reason == (
        "the attempt before ended at step 7, before its first checkpoint; starts again"
    )


def test_drifted_code_is_reused_and_said_or_rerun_or_refused(toy, monkeypatch):
    finish(toy())
    monkeypatch.setattr("tasks.recipe.code_digest", lambda module: "other code")
    plan = toy()
    assert set(states(plan).values()) == {"reuse"}
    assert all("its code changed since" in planned.reason for planned in plan.stages)
    plan = toy("code_drift=rerun")
    assert set(states(plan).values()) == {"run"}
    assert not plan.stage("left").is_finished(plan.entry(plan.stage("left")))
    with pytest.raises(ConfigError, match="code_drift=refuse"):
        toy("code_drift=refuse")


def test_the_code_of_a_reward_function_drifts_and_its_folder_is_no_identity(toy, tmp_path):
    def plan(folder: str, code: str, **options: object):
        file = tmp_path / folder / "mine.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"raise SystemExit('the plan ran it')\n{code}\n")
        fields = {"function": f"python:{file}:score", "allow_code": True, **options}
        configured = ",".join(f"{name}:{json.dumps(value)}" for name, value in fields.items())
        return toy("+stages.model.method.rewards={mine:{" + configured + "}}")

    finish(plan("one", "def score(completions): return [1]"))
    moved = plan("two", "def score(completions): return [1]")
    assert set(states(moved).values()) == {"reuse"} and "code changed" not in moved.stage("model").reason
    changed = plan("one", "def score(completions): return [2]")
    assert states(changed)["model"] == "reuse" and "its code changed since" in changed.stage("model").reason
    assert plan("one", "def score(completions): return [1]", weight=2.0).stage("model").reason == (
        "rewards.mine.weight: 1.0 -> 2.0"
    )


def test_plan_json_has_the_fields_of_the_contract(toy):
    document = json.loads(json.dumps(toy().to_dict()))
    assert document.keys() == {"pipeline", "store", "stages"}
    for row in document["stages"]:
        trained = {"learning_rate", "length"} if row["method"].endswith("ToyTraining") else set()
        assert row.keys() == {"stage", "method", "fingerprint", "state", "reason", "inputs", "output"} | trained
    left = next(row for row in document["stages"] if row["stage"] == "left")
    model = next(row for row in document["stages"] if row["stage"] == "model")
    assert left["inputs"]["policy"] == model["fingerprint"]
    assert f"/left/{left['fingerprint'][:16]}/output" in left["output"]


def test_code_is_read_once_for_all_stages_of_a_class_and_again_for_the_next_plan(toy, monkeypatch):
    from tests.toy_methods import ToyTraining

    read = []

    def code_digest(method, *, now: bool = False) -> str:
        read.append(type(method).__name__)
        return f"{len(read)}"

    monkeypatch.setattr(ToyTraining, "code_digest", code_digest)
    assert [toy().stage(name).code_digest for name in ("left", "right")] == ["1", "2"]  # each of a plan of its own
    plan = toy()
    assert {plan.stage(name).code_digest for name in ("left", "right")} == {"3"}


@pytest.mark.parametrize("max_length", [None, 64])
def test_the_limits_of_an_evaluation_are_checked_before_anything_trains(max_length):
    configured = [f"stages.evaluate.method.max_length={max_length}"] if max_length else []
    with pytest.raises(ConfigError, match=r"stages.evaluate.method: .*max_new_tokens"):
        make_plan(load_pipeline([*configured, "stages.evaluate.method.max_new_tokens=4096"]))
