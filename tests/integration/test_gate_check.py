"""Rules that no report could satisfy are refused with the plan."""

import re
import shlex

import pytest

from flows.__main__ import _parser
from flows.declare.config import load_pipeline
from flows.planning.checks import check_gates
from lineage.errors import ConfigError
from tests.command import REPOSITORY

GATED = ("pipeline=cpt-sft-dpo-gated",)
RULES = "stages.gate.method.rules"


def check(*overrides: str) -> None:
    check_gates(load_pipeline([*GATED, *overrides]))


def test_the_shipped_gate_is_sound():
    check()
    rules = load_pipeline([*GATED]).stages["gate"].method.recipe()["rules"]
    assert isinstance(rules, dict) and set(rules["beats_sft"]) == {"metric", "against", "min_gain"}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((f"{RULES}.beats_sft.metric=preference_acuracy",), "does not measure it.*did you mean preference_accuracy"),
        ((f"{RULES}.beats_sft.against=stf",), "measures no such policy.*did you mean sft"),
        ((f"{RULES}.beats_sft.policy=stf",), "measures no such policy.*did you mean sft"),
        (("~stages.gate.inputs.champion",), r"nothing fills stages\.gate\.inputs\.champion"),
    ],
)
def test_a_rule_that_cannot_be_judged_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        check(*overrides)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (f"{RULES}.beats_sft.at_least=0.1", "has one bound of"),
        (f"{RULES}.beats_sft.max_regresion=0.1", "unknown key; accepted: metric.*did you mean max_regression"),
        ("gate.approval=maybe", r"gate\.approval"),
        ("aliases.production.comercial=true", "unknown key.*did you mean commercial"),
    ],
)
def test_a_gate_that_is_stated_wrongly_is_refused(override, message):
    with pytest.raises(ConfigError, match=message):
        load_pipeline([*GATED, override])


def test_a_rule_may_be_on_a_reward_that_the_report_measures():
    rule = f"+{RULES}.right={{metric: reward/exact, at_least: 0.5}}"
    with pytest.raises(ConfigError, match=r"metric=reward/exact: the report does not measure it"):
        check(rule)
    prompts = ("+stages.prompts={method: {_target_: tasks.prepare_data.PreparePrompts}, inputs: {rows: source:a}}",
               "+sources.a.path=rows.jsonl", "+stages.evaluate.inputs.prompts=prompts")  # fmt: skip
    check(rule, *prompts, "+stages.evaluate.method.rewards={exact: {}}")
    with pytest.raises(ConfigError, match="did you mean reward/exact"):
        check(rule.replace("exact", "exakt"), *prompts, "+stages.evaluate.method.rewards={exact: {}}")


def test_a_gate_without_rules_is_refused():
    names = load_pipeline([*GATED]).stages["gate"].method.recipe()["rules"]
    assert isinstance(names, dict)
    with pytest.raises(ConfigError, match="at least 1 item"):
        load_pipeline([*GATED, *(f"~{RULES}.{name}" for name in names)])


def test_approval_flows_from_the_root_to_every_gate_and_a_stage_may_differ():
    def approval(*overrides: str) -> object:
        return load_pipeline([*GATED, *overrides]).stages["gate"].method.recipe()["approval"]

    assert approval() == "none"
    assert approval("gate.approval=required") == "required"
    assert approval("gate.approval=required", "stages.gate.method.approval=none") == "none"


def test_the_commands_of_the_page_compose():
    text = (REPOSITORY / "docs" / "promotion.md").read_text()
    commands = re.findall(r"^posttrain (.*)$", text, re.MULTILINE)
    assert len(commands) > 6
    for command in commands:
        words = shlex.split(command, comments=True)
        options, rest = _parser(words).parse_known_args(words)
        assert load_pipeline([*options.overrides, *rest]).order(), command
