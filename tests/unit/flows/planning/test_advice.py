"""What a plan says of values outside the ranges of the reference documents, and ``advice=strict``."""

import re
from pathlib import Path

import pytest

from flows.declare.config import load_pipeline
from flows.declare.project import with_project
from flows.operate.rehearsal import scratch_plan
from flows.planning.advice import origins, set_fields
from flows.planning.plan import Plan, make_plan
from flows.reports.run import plan_table
from lineage.errors import ConfigError
from tests.finished import finish

PRETRAINED = "model=smollm2"
RATE = "stages.sft.method.learning_rate=1e-3"
DATA = ("corpus", "instructions", "preferences")


def plan(store: Path, *overrides: str) -> Plan:
    return make_plan(load_pipeline([f"store={store}", *overrides]))


def lines_of(found: Plan) -> list[str]:
    return [line for line in plan_table(found).splitlines() if line.startswith("advice")]


def test_what_we_ship_gets_no_advice_and_what_the_user_sets_takes_one_line(tmp_path: Path) -> None:
    finish(plan(tmp_path, PRETRAINED), *DATA, metrics={"train_rows": 900.0})
    assert lines_of(plan(tmp_path, PRETRAINED)) == []
    (line,) = lines_of(plan(tmp_path, PRETRAINED, "stages.sft.method.global_batch_size=64", "stages.dpo.method.seed=1"))
    assert line.startswith("advice: sft: method.global_batch_size=64 is outside the recommended")
    assert lines_of(plan(tmp_path, PRETRAINED, "adapter=lora")) == []  # its rank is ours


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("stages.sft.method={global_batch_size: 64}", "sft: method.global_batch_size=64"),
        ("resources.keep_last=9", "cpt: resources.keep_last=9"),
        ("stages.sft.method.warmup_ratio=0.9", "sft: method.schedule.warmup=0.9"),
    ],
)
def test_a_field_is_set_by_a_node_for_all_stages_and_by_its_short_form(
    tmp_path: Path, override: str, named: str
) -> None:
    finish(plan(tmp_path, PRETRAINED), *DATA, metrics={"train_rows": 900.0})
    (line,) = lines_of(plan(tmp_path, PRETRAINED, override))
    assert named in line


def test_a_field_is_set_in_a_file_of_the_users_own_groups(tmp_path: Path) -> None:
    (tmp_path / "own/model").mkdir(parents=True)
    text = "# @package _global_\nsources: {base: {kind: checkpoint, path: owner/name, revision: main}}\n"
    for name, more in (("plain", ""), ("set", "stages: {sft: {method: {learning_rate: 0.001}}}\n")):
        (tmp_path / f"own/model/{name}.yaml").write_text(text + more)
    keys = [
        set_fields(load_pipeline([f"store={tmp_path}", f"model={name}"], tmp_path / "own"))
        for name in ("plain", "set")
    ]  # fmt: skip
    assert [of("sft", "method.learning_rate") for of in keys] == [False, True]
    assert not keys[1]("dpo", "method.learning_rate")


def test_each_value_has_the_file_that_sets_it_last(tmp_path: Path) -> None:
    (tmp_path / "ours" / "pipeline").mkdir(parents=True)
    (tmp_path / "ours" / "pipeline" / "mine.yaml").write_text(
        "# @package _global_\ndefaults: [/pipeline/sft, _self_]\nstages: {sft: {method: {max_length: 64}}}\n"
    )
    (tmp_path / "own.yaml").write_text("stages.sft.method.learning_rate: 1e-4\n")
    cli_args = with_project(["pipeline=mine", "model=tiny", str(tmp_path / "own.yaml"), "stages.sft.method.seed=3"])
    found = origins(load_pipeline(cli_args, tmp_path / "ours"))
    assert {key: found[f"stages.sft.method.{key}"] for key in ("max_length", "learning_rate", "seed")} == {
        "max_length": "ours/pipeline/mine.yaml", "learning_rate": str(tmp_path / "own.yaml"), "seed": "command line",
    }  # fmt: skip
    assert found["stages.sft.method._target_"] == "conf/stage/sft.yaml"


def test_a_value_outside_is_named_with_its_range_and_source_and_in_json(tmp_path: Path) -> None:
    found = plan(tmp_path, PRETRAINED, RATE)
    message = "method.learning_rate=0.001 is outside the permissible < 5e-5 (reference documents, job form)"
    assert f"advice: sft: {message}" in lines_of(found)
    assert found.to_dict()["advice"] == [
        {
            "stage": "sft", "field": "method.learning_rate", "value": 1e-3, "bound": "permissible",
            "accepted": "< 5e-5", "source": "reference documents, job form",
        }
    ]  # fmt: skip


def test_the_size_of_the_data_decides_once_it_is_prepared(tmp_path: Path) -> None:
    overrides = (PRETRAINED, "stages.sft.method.learning_rate=2e-6")
    assert not [line for line in lines_of(plan(tmp_path, *overrides)) if "learning_rate" in line]
    finish(plan(tmp_path, *overrides), *DATA, metrics={"train_rows": 60_000.0})
    assert (
        "advice: sft: method.learning_rate=2e-06 is outside the recommended 1e-5..3e-5 "
        "(reference documents, by data size: > 50K rows)"
    ) in lines_of(plan(tmp_path, *overrides))


def test_a_model_made_from_scratch_gets_no_advice_and_is_not_refused(tmp_path: Path) -> None:
    assert lines_of(plan(tmp_path, RATE)) == []
    assert lines_of(plan(tmp_path, "advice=strict", "adapter=lora", RATE)) == []
    assert "advice" not in plan(tmp_path).to_dict()


def test_of_many_findings_the_worst_is_named_and_the_others_are_counted(tmp_path: Path) -> None:
    many = ("adapter=lora", "resources.keep_last=9", "schedule=linear", "stages.dpo.method.num_epochs=60")
    (line,) = lines_of(plan(tmp_path, PRETRAINED, *many))
    assert line.startswith("advice: dpo: method.num_epochs=60 is outside the permissible < 50")
    assert re.search(r"; and \d+ more: posttrain advise$", line)


def test_strict_refuses_what_warn_says_and_off_says_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"advice=strict(.|\n)*sft: method\.learning_rate=0\.001 .* < 5e-5"):
        plan(tmp_path, PRETRAINED, RATE, "advice=strict")
    off = plan(tmp_path, PRETRAINED, RATE, "advice=off")
    assert lines_of(off) == [] and "advice" not in off.to_dict()
    with pytest.raises(ConfigError, match="advice"):
        plan(tmp_path, "advice=loud")


def test_it_is_no_identity_and_what_is_finished_gets_no_advice(tmp_path: Path) -> None:
    one, other = (plan(tmp_path, PRETRAINED, RATE, f"advice={how}") for how in ("warn", "off"))
    assert [each.fingerprint for each in one.stages] == [each.fingerprint for each in other.stages]
    finish(one)
    assert lines_of(plan(tmp_path, PRETRAINED, RATE, "advice=strict")) == []


def test_a_rehearsal_in_two_steps_is_not_refused_for_being_short(tmp_path: Path) -> None:
    pipeline = load_pipeline([f"store={tmp_path}", PRETRAINED, RATE, "advice=strict"])
    assert scratch_plan(pipeline, tmp_path / "short", num_steps=2, save_steps=1).advice.found == ()


def test_few_rows_may_hold_out_more_than_a_fifth(tmp_path: Path) -> None:
    assert lines_of(plan(tmp_path, PRETRAINED, "stages.instructions.method.held_out=0.3")) == []
