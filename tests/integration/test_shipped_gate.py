"""The bounds of the shipped gate, and what the plan refuses: a model worse in one thing, rules nobody can satisfy."""

import json
import random
import re
import shlex
from dataclasses import replace
from importlib import import_module
from math import log
from pathlib import Path

import pytest
import yaml

from flows.__main__ import _parser, main
from flows.declare.config import load_pipeline
from flows.planning.checks import check_gates
from flows.planning.plan import Plan, make_plan
from flows.planning.verdicts import judgements, record_decision, require_passed
from flows.promotion.retrain import pending
from flows.stages.run import inputs_as_planned, job_inputs
from lineage.artifact import Kind
from lineage.errors import ConfigError, GateError, StageError
from lineage.record.verdict import Approval, Judged, Result, RuleResult, Verdict, read_verdict
from tasks.context import TrainContext
from tasks.evaluate.row_scores import RowScores, write_scores
from tasks.gate import Gate
from tasks.method import Input
from tests.command import REPOSITORY
from tests.finished import finish

GATED = "pipeline=cpt-sft-dpo-gated"
NUM_ROWS = 200
TIES = {"tiny": 0.74}  # share of prompts that two models answer alike
Means = dict[str, float]  # what a model scores in the mean: shares of rows, and of perplexities nats per token
SFT: Means = {
    "preference_accuracy": 0.5, "win_rate": 0.5, "mean_logp_accuracy": 0.6, "unfinished_share": 0.05,
    "answer_perplexity": -2.0, "text_perplexity": -3.0,
}  # fmt: skip
BETTER: Means = {
    **SFT, "preference_accuracy": 0.8, "win_rate": 0.7, "mean_logp_accuracy": 0.75, "answer_perplexity": -2.03,
    "text_perplexity": -3.03,
}  # fmt: skip
# What `posttrain run pipeline=cpt-sft-dpo-gated` printed of the demo's models, and of dpo with three and ten times its
# learning rate: stages.dpo.method.learning_rate=3e-3 and 1e-2.
TINY_SFT: Means = {
    "preference_accuracy": 0.5, "win_rate": 0.5, "mean_logp_accuracy": 0.76, "unfinished_share": 0.0025,
    "exact_match": 0.675, "answer_perplexity": -log(1.311), "text_perplexity": -log(597.4),
}  # fmt: skip
TINY_DPO: Means = {
    "preference_accuracy": 0.91, "win_rate": 0.51, "mean_logp_accuracy": 0.9, "unfinished_share": 0.0,
    "exact_match": 0.76, "answer_perplexity": -log(1.361), "text_perplexity": -log(1098),
}  # fmt: skip
TINY_3E3: Means = {
    "preference_accuracy": 0.835, "win_rate": 0.53, "mean_logp_accuracy": 0.845, "unfinished_share": 0.0,
    "exact_match": 0.71, "answer_perplexity": -log(1.982), "text_perplexity": -log(3984),
}  # fmt: skip
TINY_1E2: Means = {
    "preference_accuracy": 0.8, "win_rate": 0.535, "mean_logp_accuracy": 0.8, "unfinished_share": 0.0,
    "exact_match": 0.61, "answer_perplexity": -log(3.609), "text_perplexity": -log(38470),
}  # fmt: skip


def scores(metric: str, mean: float, ties: float) -> list[float]:
    """What a model scores in each row; two models agree in most rows, as those of one chain do."""
    draw = random.Random(metric)
    if metric.endswith(("perplexity", "kl", "reward_score")):
        own = random.Random(mean)
        return [mean + draw.gauss(0, 0.5) + own.gauss(0, 0.05) for _ in range(NUM_ROWS)]
    if mean == 0.5:  # the reference against itself
        return [0.5] * NUM_ROWS
    if metric == "win_rate":
        decided = (mean - ties / 2) / (1 - ties)
        return [0.5 if draw.random() < ties else float(draw.random() < decided) for _ in range(NUM_ROWS)]
    return [float(draw.random() < mean) for _ in range(NUM_ROWS)]


def gate(model: str, pipeline: str = GATED) -> Gate:
    method = load_pipeline([pipeline, f"model={model}"]).stages["gate"].method
    assert isinstance(method, Gate)
    return replace(method, num_resamples=1000)  # a tenth: the interval is as wide, the bounds are those of the file


def failing(directory: Path, candidate: Means, parent: Means, model: str, pipeline: str = GATED) -> set[str]:
    """The rules that the shipped gate refuses a candidate by; none: it passes."""
    ids = [str(index) for index in range(NUM_ROWS)]
    models = {"sft": parent, "dpo": candidate}
    measured = [
        RowScores(
            metric=metric, row_ids=ids, groups=ids, weights=[1.0] * NUM_ROWS,
            scores={name: scores(metric, means[metric], TIES.get(model, 0)) for name, means in models.items()},
        )
        for metric in parent
    ]  # fmt: skip
    write_scores(directory / "report", measured, {name: f"fp-{name}" for name in models})
    inputs = {"report": Input(name="evaluate", kind=Kind.REPORT, fingerprint="r", path=directory / "report")}
    for slot, name in (("candidate", "dpo"), ("parent", "sft")):
        inputs[slot] = Input(name=name, kind=Kind.CHECKPOINT, fingerprint=f"fp-{name}", path=directory, digest="d")
    gate(model, pipeline).run(inputs, TrainContext(output_dir=directory, work_dir=directory))
    verdict = read_verdict(directory)
    found = {rule.rule for rule in verdict.rules if rule.outcome != "better"}
    assert verdict.result == ("refuse" if found else "pass")
    return found


@pytest.mark.parametrize(
    ("candidate", "rules"),
    [
        (BETTER, set()),
        ({**BETTER, "preference_accuracy": 0.55}, {"prefers_chosen"}),
        ({**BETTER, "win_rate": 0.4}, {"wins_over_sft"}),
        ({**BETTER, "win_rate": 0.52}, {"wins_over_sft"}),  # as good as chance
        ({**BETTER, "mean_logp_accuracy": 0.5}, {"beats_sft"}),
        ({**BETTER, "mean_logp_accuracy": 0.6}, {"beats_sft"}),  # the parent's own
        ({**BETTER, "answer_perplexity": -2.2}, {"keeps_answers"}),
        ({**BETTER, "text_perplexity": -3.2}, {"keeps_language"}),
        ({**BETTER, "unfinished_share": 0.3}, {"finishes"}),
        (SFT, {"prefers_chosen", "wins_over_sft", "beats_sft"}),
    ],
)
def test_a_better_model_passes_and_one_that_is_worse_in_one_thing_is_refused(
    tmp_path: Path, candidate: Means, rules: set[str]
) -> None:
    assert failing(tmp_path, candidate, SFT, "qwen2.5-0.5b") == rules


@pytest.mark.parametrize(
    ("candidate", "rules"),
    [
        (TINY_DPO, set()),
        ({**TINY_DPO, "exact_match": 0.6}, {"right_answers"}),
        (TINY_3E3, {"keeps_answers", "keeps_language"}),
        (TINY_1E2, {"keeps_answers", "keeps_language", "right_answers"}),
    ],
)
def test_the_tiny_model_has_bounds_of_its_own_for_what_it_can_and_cannot_do(
    tmp_path: Path, candidate: Means, rules: set[str]
) -> None:
    found = failing(tmp_path, candidate, TINY_SFT, "tiny")
    assert found >= rules and (found == rules or candidate in (TINY_3E3, TINY_1E2))  # a broken one may fail more
    tiny, shipped = gate("tiny").rules, gate("qwen2.5-0.5b").rules
    own = {name for name, rule in tiny.items() if rule != shipped.get(name)}
    assert own == {"right_answers", "wins_over_sft", "keeps_language"}


RULES = "stages.gate.method.rules"


def check(*overrides: str) -> None:
    check_gates(load_pipeline([GATED, *overrides]))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (f"{RULES}.beats_sft.metric=preference_acuracy", "does not measure it.*did you mean preference_accuracy"),
        (f"{RULES}.beats_sft.against=stf", "measures no such policy.*did you mean sft"),
        (f"{RULES}.beats_sft.policy=stf", "measures no such policy.*did you mean sft"),
        ("~stages.gate.inputs.champion", r"nothing fills stages\.gate\.inputs\.champion"),
        (f"{RULES}.beats_sft.at_least=0.1", "has one bound of"),
        (f"{RULES}.beats_sft.max_regresion=0.1", "unknown key; accepted: metric.*did you mean max_regression"),
        ("gate.approval=maybe", r"gate\.approval"),
        ("aliases.production.comercial=true", "unknown key.*did you mean commercial"),
        (f"+{RULES}.right={{metric: reward/exact, at_least: 0.5}}", "metric=reward/exact: evaluate does not measure"),
    ],
)
def test_a_rule_that_no_report_could_satisfy_is_refused_with_the_plan(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(override)


def test_a_rule_may_be_on_a_reward_that_the_report_measures() -> None:
    prompts = (
        "+stages.prompts={method: {_target_: tasks.prepare_data.PreparePrompts}, inputs: {rows: source:a}}",
        "+sources.a.path=rows.jsonl", "+stages.evaluate.inputs.prompts=prompts",
        "+stages.evaluate.method.rewards={exact: {}}",
    )  # fmt: skip
    rule = f"+{RULES}.right={{metric: reward/exact, at_least: 0.5}}"
    check(rule, *prompts)
    with pytest.raises(ConfigError, match="did you mean reward/exact"):
        check(rule.replace("exact", "exakt"), *prompts)


def test_a_gate_has_rules_and_the_approval_of_the_root_unless_it_states_its_own() -> None:
    def recipe(*overrides: str) -> dict:
        return dict(load_pipeline([GATED, *overrides]).stages["gate"].method.recipe())

    check()
    rules = recipe()["rules"]
    assert set(rules["beats_sft"]) == {"metric", "against", "min_gain"}
    with pytest.raises(ConfigError, match="at least 1 item"):
        recipe(*(f"~{RULES}.{name}" for name in rules))
    assert recipe()["approval"] == "none"
    assert recipe("gate.approval=required")["approval"] == "required"
    assert recipe("gate.approval=required", "stages.gate.method.approval=none")["approval"] == "none"
    with pytest.raises(ConfigError, match=r"gate\.approval=required: cpt-sft-dpo has no gate"):
        load_pipeline(["model=tiny", "gate.approval=required"])


def test_the_commands_of_the_page_compose() -> None:
    commands = re.findall(r"^posttrain (.*)$", (REPOSITORY / "docs" / "promotion.md").read_text(), re.MULTILINE)
    assert len(commands) > 6
    for command in commands:
        cli_args = shlex.split(command, comments=True)
        options, rest = _parser(cli_args).parse_known_args(cli_args)
        assert load_pipeline([*options.overrides, *rest]).order(), command


TINY_START: Means = {
    "reward_score": 0.0, "kl": 0.0, "exact_match": 0.7, "answer_perplexity": -0.3, "unfinished_share": 0.0,
}  # fmt: skip
TINY_PPO: Means = {**TINY_START, "reward_score": 0.3, "kl": 0.1}


@pytest.mark.parametrize(
    ("worse", "rules"),
    [
        ({}, set()),
        ({"reward_score": 0.0}, {"higher_reward"}),
        ({"kl": 1.4}, {"stays_close"}),
        ({"exact_match": 0.5}, {"right_answers"}),
        ({"unfinished_share": 0.3}, {"finishes"}),
    ],
)
def test_ppo_is_refused_where_a_higher_reward_costs_answers(tmp_path: Path, worse: Means, rules: set[str]) -> None:
    assert failing(tmp_path, {**TINY_PPO, **worse}, TINY_START, "tiny", "pipeline=rlhf-ppo") == rules


def test_gate_check_puts_known_answers_through_a_pipeline_that_has_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shipped = ["gate-check", "cpt-sft-dpo-gated", f"store={tmp_path}", "--json"]
    assert main(shipped) == 0
    rules = json.loads(capsys.readouterr().out)["rules"]
    assert {each["rule"] for each in rules} >= {"prefers_chosen", "right_answers", "keeps_language"}
    assert all(each["values"]["right"] in (0, 1) and not each["error"] and not each["untested"] for each in rules)
    cli_args = ["stages.evaluate.method.metrics=[f1]", "+stages.gate.method.rules.words={metric: f1, at_least: 0.5}"]
    assert main(["gate-check", GATED, f"store={tmp_path}", *cli_args]) == 0
    assert "right 1, shuffled 0, empty 0" in capsys.readouterr().out
    blind = "stages.gate.method.rules.prefers_chosen.at_least=0.0"
    assert main(["gate-check", GATED, f"store={tmp_path}", blind]) == 2
    out, err = capsys.readouterr()
    assert "rules.prefers_chosen: preference_accuracy passes a known-wrong model (wrong)" in err
    assert "row made-up-0-0 scores 0" in err and "beats_sft" in out
    assert main(["gate-check", "cpt-sft-dpo", f"store={tmp_path}"]) == 2
    assert "cpt-sft-dpo has no gate" in capsys.readouterr().err


def test_gate_check_refuses_a_metric_that_fails_on_right_answers_and_its_prints_are_no_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "print('loaded')\ndef score(completions, answer):\n    print('called')\n    raise ValueError('broken')\n"
    )
    metric = f"{{function: 'python:{file}:score', allow_code: true, name: own}}"
    cli_args = [
        f"stages.evaluate.method.metrics=[{metric}]",
        "+stages.gate.method.rules.own={metric: own, at_least: 0.5}",
    ]
    assert main(["gate-check", GATED, f"store={tmp_path}", *cli_args, "--json"]) == 2
    out, err = capsys.readouterr()
    *_, own = json.loads(out)["rules"]
    assert own["error"].startswith("rules.own: own: it fails on known answers: ") and "broken" in own["error"]
    assert "called" in err and own["error"] in err


def test_an_evaluation_beside_a_training_is_set_beside_its_method(tmp_path: Path) -> None:
    given = [GATED, f"store={tmp_path}"]
    short = load_pipeline([*given, "+stages.sft.evaluation={every_steps: 5, metrics: [f1]}"])
    long = load_pipeline([*given, "stages.sft.method.evaluation={every_steps: 5, metrics: [f1]}"])
    assert short.stages["sft"].method == long.stages["sft"].method != load_pipeline(given).stages["sft"].method
    best = "+stages.sft.evaluation={every_steps: 5, pick: best}"
    plans = [make_plan(load_pipeline([*given, *more])).stage("sft").fingerprint for more in ([], [best])]
    assert make_plan(short).stage("sft").fingerprint == plans[0] != plans[1]
    with pytest.raises(ConfigError, match=r"evaluation.every_step: unknown key"):
        load_pipeline([*given, "+stages.sft.evaluation={every_step: 5}"])
    divided = load_pipeline([*given, best, "stages.sft.resources={sharding: zero2, num_workers: 2}"])
    assert divided.stages["sft"].resources.sharding == "zero2"


def test_a_rule_may_be_on_a_further_metric(tmp_path: Path) -> None:
    known = ["stages.evaluate.method.metrics=[f1]", "+stages.gate.method.rules.words={metric: f1, at_least: 0.5}"]
    check_gates(load_pipeline([GATED, f"store={tmp_path}", *known]))
    with pytest.raises(ConfigError, match="evaluate does not measure it"):
        check_gates(load_pipeline([GATED, f"store={tmp_path}", known[1]]))


def test_a_training_may_wait_for_a_verdict_which_is_no_part_of_its_identity(tmp_path: Path) -> None:
    early = (
        "stages.gate.inputs.candidate=sft", "stages.gate.inputs.parent=cpt", "~stages.evaluate.inputs.reward_model",
        "~stages.gate.method.rules.wins_over_sft", "~stages.gate.method.rules.beats_champion",
    )  # fmt: skip
    alone = load_pipeline([GATED, f"store={tmp_path}", *early])
    waiting = load_pipeline([GATED, f"store={tmp_path}", *early, "+stages.reward.inputs.verdict=gate"])
    assert make_plan(waiting).stage("reward").fingerprint == make_plan(alone).stage("reward").fingerprint
    assert "gate" in waiting.before("reward") and "gate" not in alone.before("reward")
    with pytest.raises(ConfigError, match=r"stages.reward.inputs.verdict.*is a checkpoint|verdict"):
        load_pipeline([GATED, f"store={tmp_path}", "+stages.reward.inputs.verdict=sft"])


def test_a_finished_training_whose_verdict_refuses_now_is_named(tmp_path: Path) -> None:
    early = (
        "stages.gate.inputs.candidate=sft", "stages.gate.inputs.parent=cpt", "~stages.evaluate.inputs.reward_model",
        "~stages.gate.method.rules.wins_over_sft", "~stages.gate.method.rules.beats_champion",
        "+stages.reward.inputs.verdict=gate", f"store={tmp_path}",
    )  # fmt: skip
    plan = make_plan(load_pipeline([GATED, *early]))
    finish(plan, *(each.name for each in plan.stages if each.name != "gate"))

    def judged(result: Result) -> Plan:
        rule = RuleResult(rule="rule", demand="it wins", against=None, outcome="worse")
        name = Judged(name="sft", fingerprint="a", digest=None)
        verdict = Verdict(result=result, approval="none", confidence=0.95, candidate=name, champion=None, rules=[rule])
        finish(plan, "gate", files={"verdict.json": verdict.to_json()})
        return make_plan(load_pipeline([GATED, *early]))

    refused = judged("refuse")
    assert refused.stage("reward").state == "reuse"
    after = "; reward began after another verdict and would not begin now, but is finished and reused"
    assert pending(refused) == [f"gate refuses sft: a run ends with exit code 3{after}"]
    with pytest.raises(GateError, match=r"\nreward began after another verdict"):
        require_passed(refused)
    assert not pending(judged("pass"))


# Kind of a slot -> what fills it, of the stages below.
FROM = {
    Kind.TEXT: "corpus", Kind.CONVERSATIONS: "instructions", Kind.PREFERENCES: "preferences", Kind.UNPAIRED: "answers",
    Kind.PROMPTS: "problems", Kind.CHECKPOINT: "sft", Kind.REWARD_MODEL: "reward", Kind.REPORT: "evaluate",
    Kind.ROWS: "'source:instructions'",
}  # fmt: skip
# Stage -> the optional slots that it needs.
MORE = {
    "merge": {"other": "cpt"}, "merge_reward_models": {"other": "reward"}, "teacher_answers": {"prompts": "problems"},
    "evaluate": {"sft": "sft", "text": "corpus"},
    **{name: {"reward_model": "reward"} for name in ("grpo", "rloo", "online_dpo", "ppo")},
}  # fmt: skip


def after_the_gate(store: Path, *, waits: bool) -> Plan:
    """The gated pipeline, and after it a stage of each kind, which waits for the gate or does not."""
    overrides = [
        GATED, f"store={store}", "+stage@stages.answers.method=unpair", "+stages.answers.inputs={pairs: preferences}",
        "+stage@stages.problems.method=prompts", "+stages.problems.inputs={rows: 'source:instructions'}",
        "stages.merge.method.combination=linear", "stages.merge_reward_models.method.combination=linear",
        "+stages.later_gate.method.rules={wins: {metric: win_rate, at_least: 0.5}}",
    ]  # fmt: skip
    overrides = [each.replace("stages.merge", "stages.later_merge") for each in overrides]
    for name in sorted(path.stem for path in (REPOSITORY / "conf" / "stage").glob("*.yaml")):
        target = yaml.safe_load((REPOSITORY / "conf" / "stage" / f"{name}.yaml").read_text())["_target_"]
        module, _, cls = target.rpartition(".")
        method = getattr(import_module(module), cls)
        slots = {slot: FROM[kind] for slot, kind in method.consumes.items() if slot not in {*method.optional, "*"}}
        slots |= MORE.get(name, {}) | ({"verdict": "gate"} if waits else {})
        filled = ", ".join(f"{slot}: {reference}" for slot, reference in slots.items())
        overrides += [f"+stage@stages.later_{name}.method={name}", f"+stages.later_{name}.inputs={{{filled}}}"]
    return make_plan(load_pipeline(overrides))


@pytest.mark.parametrize(
    ("result", "approval", "decided", "message"),
    [
        ("refuse", "none", None, r"gate gate@\w+ refuses dpo:\n  rule: worse: .*\nso {name} does not begin"),
        ("pass", "required", None, r"no person has approved it yet\nso {name} does not begin"),
        ("pass", "required", "reject", r"was rejected by ada\nso {name} does not begin"),
        ("pass", "required", "approve", None), ("pass", "none", None, None),
    ],
)  # fmt: skip
def test_a_stage_of_any_kind_begins_only_where_the_verdict_that_it_waits_for_passes(
    tmp_path: Path, result: Result, approval: Approval, decided: str | None, message: str | None
) -> None:
    plan = after_the_gate(tmp_path, waits=True)
    finish(plan, *(each.name for each in plan.stages if not each.name.startswith("later")))
    judged = Judged(name="dpo", fingerprint="a", digest=None)
    rule = RuleResult(rule="rule", demand="it wins", against=None, outcome="worse" if result == "refuse" else "better")
    verdict = Verdict(result=result, approval=approval, confidence=0.95, candidate=judged, champion=None, rules=[rule])
    finish(plan, "gate", files={"verdict.json": verdict.to_json()})
    if decided:
        (found,) = judgements(plan)
        record_decision(tmp_path, found, approved=decided == "approve", who="ada", why="")
    later = [each for each in plan.stages if each.name.startswith("later")]
    assert len(later) > 25
    for planned in later:
        if message is None:
            parents = inputs_as_planned(plan, planned)
            assert "gate" in parents and "verdict" not in job_inputs(plan, planned, parents)
        else:
            with pytest.raises(StageError, match=message.format(name=planned.name)) as refused:
                inputs_as_planned(plan, planned)
            assert refused.value.exit_code == GateError.exit_code == 3


def test_a_verdict_is_part_of_no_identity(tmp_path: Path) -> None:
    alone, waiting = (after_the_gate(tmp_path, waits=waits) for waits in (False, True))
    assert [each.fingerprint for each in waiting.stages] == [
        alone.stage(each.name).fingerprint for each in waiting.stages
    ]
    assert all("gate" in each.upstream for each in waiting.stages if each.name.startswith("later"))
