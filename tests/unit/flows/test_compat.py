"""``posttrain compat``: what works with what, and whether the stages of a pipeline do."""

import json
from importlib.util import find_spec

import pytest

from flows.reports.compat import _BASE, _GPU, all_outcomes, case_of, choices, outcome, rule_nearest, trainings
from lineage.errors import ConfigError
from tasks.train.compatibility import RULES, refusals
from tasks.train.models import quantization
from tests.command import Command


@pytest.fixture
def command(tmp_path):
    return Command(tmp_path)


def chosen(text: str):
    setting, value = text.split("=")
    return next(each for each in choices()[setting] if each.value == value)


def test_a_setting_is_shown_with_what_it_needs():
    assert outcome(chosen("quantization=nf4")).condition == {"method.adapter.type": "lora"}
    assert outcome(chosen("precision=fp16")).works == "on a GPU"
    assert outcome(chosen("precision=bf16")).works == "yes" and not outcome(chosen("precision=bf16")).condition


def test_two_settings_that_a_rule_joins_do_not_work_together():
    found = outcome(chosen("adapter=full"), chosen("quantization=nf4"))
    assert (found.works, found.rule) == ("no", "quantization-full-training")
    assert outcome(chosen("adapter=lora"), chosen("quantization=nf4")).works == "yes"
    assert outcome(chosen("precision=fp16"), chosen("sharding=zero2")).rule == "fp16-zero"
    assert outcome(chosen("precision=bf16"), chosen("sharding=zero2")).works == "yes"


def refused_on_every_machine(*pair):
    """Whether a training with both values is refused: without a GPU, and on one in bf16 and in fp32."""
    cls = next((each.method for each in pair if each.method), trainings()["sft"])
    fields = {path: value for each in pair for path, value in each.fields.items()}
    for machine in ({}, _GPU, {"resources.gpus_per_worker": 1}):
        needed = outcome(pair[0]).condition | outcome(pair[1]).condition  # as an adapter under a quantized base
        try:
            case = case_of(cls, {**_BASE, **needed, **machine, **fields})
        except ConfigError:
            continue
        if not list(refusals(case)):
            return False
    return True


def test_what_the_table_refuses_the_rules_refuse_whatever_the_machine():
    _, pairs = all_outcomes()
    refused = [each.choices for each in pairs if each.works == "no"]
    assert len(refused) > 300
    assert [tuple(map(str, each)) for each in refused if not refused_on_every_machine(*each)] == []


def test_a_format_that_wants_fp32_pages_its_optimizer_on_a_gpu():
    found = outcome(chosen("quantization=quanto_int8"), chosen("optimizer=paged_adamw_8bit"))
    assert found.works == "on a GPU" and found.condition["method.precision"] == "fp32"


def test_what_the_table_calls_working_lacks_nothing_but_packages(monkeypatch):
    monkeypatch.setattr(quantization, "_is_installed", lambda _module: True)
    alone, pairs = all_outcomes()
    works = [each for each in (*alone, *pairs) if each.works != "no"]
    for setting, on_gpu in {(each.case.method.quantization, each.case.on_gpu) for each in works}:
        assert setting is None or quantization.missing(setting.format, on_gpu=on_gpu) is None
    assert outcome(chosen("quantization=hqq")).works == "no"


@pytest.mark.parametrize(
    ("pair", "rule"),
    [
        (("adapter=adalora", "optimizer=lomo"), "adalora-backward"),
        (("method=grpo", "quantization=quanto_int4"), "quanto-int4-generating"),
        (("method=on_policy_distill", "quantization=quanto_int4"), "quanto-int4-generating"),
    ],
)
def test_pairs_that_died_in_training_are_refused(pair, rule):
    assert outcome(*map(chosen, pair)).rule == rule


def test_every_pair_is_judged_and_the_defaults_work_with_each_other():
    alone, pairs = all_outcomes()
    values = choices()
    assert len(alone) == sum(map(len, values.values()))
    defaults = {"method=sft", "adapter=full", "quantization=none", "precision=fp32", "sharding=none"}
    judged = {tuple(map(str, each.choices)): each for each in pairs}
    assert all(each.works == "yes" for names, each in judged.items() if set(names) <= defaults)
    assert ("adapter=lora", "quantization=nf4") in judged


def test_it_prints_every_rule_with_what_to_set(command):
    text = command("compat")
    assert text.returncode == 0
    assert all(rule.id in text.stdout for rule in RULES)
    assert max(map(len, text.stdout.splitlines())) <= 160  # folded without a screen too; a fix to paste stays whole
    found = json.loads(command("compat", "--json").stdout)
    assert [rule["rule"] for rule in found["rules"]] == [rule.id for rule in RULES]
    assert all(rule["nearest"] and rule["reason"] for rule in found["rules"]) and all(map(rule_nearest, RULES))
    assert {"settings": {"adapter": "lora", "quantization": "nf4"}, "works": "yes"} in found["combinations"]
    assert "stages" not in found


def test_with_overrides_it_says_of_every_stage_all_that_does_not_work_and_ends_with_2(command):
    overrides = ["stages.sft.method.precision=fp16", "stages.sft.resources.zero_stage=2"]
    found = command("compat", *overrides)
    assert found.returncode == 2
    assert "dpo     works\n" in found.stdout and "sft     does not work\n" in found.stdout
    assert "-> stages.sft.method.precision=bf16\n" in found.stdout
    assert "-> stages.sft.resources.sharding=none stages.sft.resources.zero_stage=0\n" in found.stdout
    stages = {each["stage"]: each for each in json.loads(command("compat", "--json", *overrides).stdout)["stages"]}
    assert [each["rule"] for each in stages["sft"]["refusals"]] == ["fp16-cpu", "fp16-zero", "sharding-one-worker"]
    assert stages["cpt"] == {"stage": "cpt", "works": True, "refusals": []}


def test_it_knows_the_model_of_a_stage(command, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "bloom"}')
    found = command("compat", f"model={model}", "stages.sft.method.packing=best_fit")
    assert found.returncode == 2 and "(packing-position-ids)" in found.stdout
    assert command("compat", f"model={model}").returncode == 0


def test_what_else_is_wrong_with_a_pipeline_is_the_users_error(command):
    found = command("compat", "stages.sft.method.sed=1")
    assert found.returncode == 2 and "unknown key" in found.stderr
    found = command("compat", "optimizer=grokadamw")
    assert find_spec("grokadamw") or (found.returncode == 2 and "pip install" in found.stderr)
    found = command("compat", "stages.sft.inputs.policy=nothing")
    assert found.returncode == 2 and "no such stage or source" in found.stderr
