"""A gate's rules on reports written by hand."""

import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from lineage.artifact import Kind, Source
from lineage.errors import ArtifactError, ConfigError
from lineage.record.verdict import Verdict, read_verdict
from tasks.context import TrainContext
from tasks.evaluate.row_scores import RowScores, read_policies, read_scores, write_scores
from tasks.evaluate.stubs import Stubs
from tasks.gate import Gate
from tasks.gate.bootstrap import Bootstrap
from tasks.gate.rule import Evidence, Rule
from tasks.method import Input
from tests.prepared import named


def report(
    directory: Path, count: int = 40, fingerprints: str = "fp-", weights: dict[str, str] | None = None, **wins: int
) -> Input:  # fmt: skip
    """Policies that win the first rows, and a perplexity that grows with the wins, in odd rows a bit more."""
    ids = [str(index) for index in range(count)]
    won = {name: [float(index < number) for index in range(count)] for name, number in wins.items()}
    logps = {
        name: [-2 - number / 100 * (0.95 + index % 2 / 10) for index in range(count)] for name, number in wins.items()
    }
    measured = [
        RowScores(metric=metric, row_ids=ids, groups=ids, weights=[1.0] * count, scores=values)
        for metric, values in (("accuracy", won), ("text_perplexity", logps))
    ]
    write_scores(directory, measured, {name: fingerprints + name for name in wins}, weights)
    return Input(name="evaluate", kind=Kind.REPORT, fingerprint=str(directory), path=directory)


def model(name: str, slot: str | None = None, source: Source | None = None) -> Input:
    return Input(
        name=slot or name, kind=Kind.CHECKPOINT, fingerprint=f"fp-{name}", path=Path(name), digest=f"d-{name}",
        source=source,
    )  # fmt: skip


@pytest.fixture
def inputs(tmp_path) -> dict[str, Input]:
    given = report(tmp_path / "report", base=10, sft=20, dpo=30, old=29)
    return {"report": given, "candidate": model("dpo"), "parent": model("sft")}


def judge(tmp_path: Path, inputs: dict[str, Input], method: Gate | None = None, **rule: object) -> Verdict:
    method = method or Gate(rules={"rule": Rule(**rule)})
    output = tmp_path / "output"
    output.mkdir(exist_ok=True)
    metrics = named(method, inputs, method.run(inputs, TrainContext(output_dir=output, work_dir=output)))
    verdict = read_verdict(output)
    assert metrics["passed"] == (verdict.result == "pass")
    assert Verdict.from_json(verdict.to_json()) == verdict
    return verdict


@pytest.mark.parametrize(
    ("rule", "outcome"),
    [
        ({"metric": "accuracy", "against": "parent", "min_gain": 0.0}, "better"),
        ({"metric": "accuracy", "against": "parent", "min_gain": 0.2}, "inconclusive"),
        ({"metric": "accuracy", "against": "parent", "min_gain": 0.5}, "worse"),
        ({"metric": "accuracy", "against": "candidate", "min_gain": 0.0}, "inconclusive"),
        ({"metric": "accuracy", "policy": "sft", "against": "dpo", "max_regression": 0.05}, "worse"),
        ({"metric": "accuracy", "policy": "sft", "against": "dpo", "max_regression": 0.5}, "better"),
        ({"metric": "accuracy", "at_least": 0.5}, "better"),
        ({"metric": "accuracy", "at_least": 0.95}, "worse"),
        ({"metric": "accuracy", "at_most": 0.5}, "worse"),
        # exp(2.3) against exp(2.2): ten percent more, and nearly the same in every row.
        ({"metric": "text_perplexity", "against": "parent", "max_regression": 0.11}, "better"),
        ({"metric": "text_perplexity", "against": "parent", "max_regression": 0.1}, "worse"),
        ({"metric": "text_perplexity", "policy": "sft", "against": "dpo", "min_gain": 0.09}, "better"),
        ({"metric": "text_perplexity", "against": "candidate", "max_regression": 0.0}, "better"),
        ({"metric": "text_perplexity", "against": "candidate", "min_gain": 0.0}, "inconclusive"),
    ],
)
def test_the_outcome_is_the_side_of_the_bound_on_which_the_interval_lies(tmp_path, inputs, rule, outcome):
    verdict = judge(tmp_path, inputs, **rule)
    [result] = verdict.rules
    assert result.outcome == outcome
    assert verdict.result == ("pass" if outcome == "better" else "refuse")
    assert bool(verdict.complaints()) == (outcome != "better")


def test_a_rule_on_several_metrics_is_one_on_each(tmp_path, inputs):
    """What a model forgets: no task of a benchmark may lose more, and the difference has its interval."""
    rows = read_scores(inputs["report"].path)["accuracy"]
    tasks = [
        replace(rows, metric=f"lm_eval/{task}/acc", scores={**rows.scores, "dpo": rows.scores[like]})
        for task, like in (("kept", "sft"), ("lost", "base"))
    ]
    write_scores(inputs["report"].path, [rows, *tasks], read_policies(inputs["report"].path))
    verdict = judge(tmp_path, inputs, metric="lm_eval/*", against="parent", max_regression=0.02)
    found = {each.rule: each for each in verdict.rules}
    assert {name: each.outcome for name, each in found.items()} == {
        "rule/lm_eval/kept/acc": "better", "rule/lm_eval/lost/acc": "worse",
    }  # fmt: skip
    lost = found["rule/lm_eval/lost/acc"]
    assert lost.low is not None and lost.low < lost.estimate == -0.25 < lost.high
    known = {"right": [1.0] * 40, "empty": [0.0] * 40}
    Stubs(scores={each.metric: replace(each, scores=known) for each in tasks}).write(inputs["report"].path)
    judge(tmp_path, inputs, metric="lm_eval/*", against="parent", max_regression=0.02)
    with pytest.raises(ConfigError, match="lm_eval/kept/acc passes a known-wrong model"):
        judge(tmp_path, inputs, metric="lm_eval/*", against="parent", max_regression=1.0)
    with pytest.raises(ConfigError, match=r"rules.rule.metric=other/\*: the report has none"):
        judge(tmp_path, inputs, metric="other/*", at_least=0.5)


def test_a_model_that_changes_while_the_gate_runs_changes_nothing(tmp_path, inputs):
    seen = []
    method = Gate(rules={"rule": Rule(metric="accuracy", at_least=0.5)})
    method.run(inputs, TrainContext(output_dir=tmp_path, work_dir=tmp_path, loaded=lambda *slots: seen.append(slots)))
    assert seen == [()]  # all of them: it reads no weights


def test_the_evidence_is_in_the_verdict(tmp_path, inputs):
    verdict = judge(tmp_path, inputs, metric="accuracy", against="parent", min_gain=0.0)
    [result] = verdict.rules
    assert (result.candidate, result.baseline, result.estimate) == (0.75, 0.5, 0.25)
    assert result.low is not None and result.high is not None and 0.05 < result.low < 0.25 < result.high < 0.45
    assert result.num_rows == 40
    assert (verdict.candidate.fingerprint, verdict.candidate.digest) == ("fp-dpo", "d-dpo")
    table = (tmp_path / "output" / "verdict.md").read_text()
    assert "pass: dpo@fp-dpo" in table and "+0.25 [+0." in table
    assert "Estimates with a sign are gains" in table


def test_a_champion_is_compared_and_its_alias_recorded(tmp_path, inputs):
    rule = {"metric": "accuracy", "against": "champion", "min_gain": 0.0}
    without = judge(tmp_path, inputs, **rule)
    assert (without.result, without.rules[0].note, without.champion) == ("pass", "no champion yet", None)
    assert " passes " in (tmp_path / "output" / "verdict.md").read_text()  # it is better than none
    source = Source(path="alias:champion", kind=Kind.CHECKPOINT)
    compared = judge(tmp_path, {**inputs, "champion": model("old", "source:champion", source)}, **rule)
    assert compared.rules[0].outcome == "inconclusive"  # one row of forty
    assert compared.champion is not None and compared.champion.alias == "champion"
    assert without.rests_on_champion and compared.rests_on_champion
    assert not judge(tmp_path, inputs, metric="accuracy", at_least=0.1).rests_on_champion


def test_what_the_rows_cannot_decide_is_refused_unless_set(tmp_path, inputs):
    gate = Gate(rules={"gain": Rule(metric="accuracy", against="old", min_gain=0.0)})
    assert judge(tmp_path, inputs, gate).result == "refuse"
    reported = replace(gate, inconclusive="promote")
    assert judge(tmp_path, inputs, reported).result == "pass"
    worse = replace(reported, rules={**gate.rules, "bound": Rule(metric="accuracy", at_least=0.95)})
    assert judge(tmp_path, inputs, worse).result == "refuse"


def test_few_rows_decide_nothing(tmp_path, inputs):
    given = {**inputs, "report": report(tmp_path / "few", count=19, sft=0, dpo=19)}
    rule = Rule(metric="accuracy", against="parent", min_gain=0.0)
    [result] = judge(tmp_path, given, Gate(rules={"rule": rule})).rules
    assert (result.outcome, result.note) == ("inconclusive", "fewer than min_rows=20 independent rows")
    assert judge(tmp_path, given, Gate(rules={"rule": rule}, min_rows=19)).result == "pass"


def test_repeated_evaluations_widen_the_interval(tmp_path, inputs):
    rule = Rule(metric="accuracy", against="parent", min_gain=0.0)
    alone = judge(tmp_path, inputs, Gate(rules={"rule": rule}))
    again = {
        "seed1": report(tmp_path / "1", fingerprints="trained-again-", sft=20, dpo=21),
        "seed2": report(tmp_path / "2", fingerprints="trained-again-", sft=20, dpo=39),
    }
    repeated = judge(tmp_path, {**inputs, **again}, Gate(rules={"rule": rule}))
    assert (alone.result, repeated.result, repeated.num_reports) == ("pass", "refuse", 3)
    assert repeated.rules[0].estimate == pytest.approx((10 + 1 + 19) / 3 / 40)


def test_a_metric_that_is_no_number_is_worse(tmp_path, inputs):
    lines = (inputs["report"].path / "scores.jsonl").read_text().splitlines()
    broken = [json.dumps({**row, "scores": {**row["scores"], "dpo": math.nan}}) for row in map(json.loads, lines)]
    (inputs["report"].path / "scores.jsonl").write_text("\n".join(broken) + "\n")
    verdict = judge(tmp_path, inputs, metric="accuracy", against="parent", max_regression=1.0)
    assert (verdict.rules[0].outcome, verdict.rules[0].estimate) == ("worse", None)


@pytest.mark.parametrize(
    ("field", "value"), [("confidence", 0.5), ("num_resamples", 100), ("seed", 4), ("approval", "required")]
)
def test_each_field_changes_the_verdict(tmp_path, inputs, field, value):
    rule = Rule(metric="text_perplexity", against="parent", max_regression=0.11)  # an accuracy's bounds are coarse
    gate = Gate(rules={"gain": rule}, num_resamples=151)
    assert judge(tmp_path, inputs, gate) != judge(tmp_path, inputs, replace(gate, **{field: value}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"candidate": model("other")}, "the gate's candidate is other, and the report evaluate does not measure it"),
        ({"report": Input(name="r", kind=Kind.REPORT, fingerprint="", path=Path("nowhere"))}, "has no policies.json"),
    ],
)
def test_a_report_that_does_not_fit_is_refused(tmp_path, inputs, change, message):
    with pytest.raises(ConfigError, match=message):
        judge(tmp_path, {**inputs, **change}, metric="accuracy", at_least=0.1)


@pytest.mark.parametrize(("slot", "policy"), [("candidate", "dpo"), ("parent", "sft")])
@pytest.mark.parametrize("number", [0, 1])
def test_a_report_of_another_checkpoint_than_the_judged_one_is_refused(tmp_path, inputs, slot, policy, number):
    """Also a further one; one of another model's fingerprint, as of another seed, may have other bytes."""
    wins = {"base": 10, "sft": 20, "dpo": 30}
    weights = {name: f"d-{name}" for name in (*wins, "reference")}
    given = {**inputs, "report": report(tmp_path / "report", weights=weights, **wins)}
    given["other"] = report(
        tmp_path / "other", fingerprints="of-another-seed-", weights=dict.fromkeys(wins, "d"), **wins
    )
    assert judge(tmp_path, given, metric="accuracy", at_least=0.5).result == "pass"
    key = ("report", "other")[number]
    given[key] = report(tmp_path / key, weights={**weights, policy: "another"}, **wins)
    with pytest.raises(
        ArtifactError, match=rf"inputs\.{slot}: {policy} has the digest d-{policy}, .* {policy} with another"
    ):
        judge(tmp_path, given, metric="accuracy", at_least=0.5)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"metric": "acuracy", "at_least": 0.1}, "the report has no scores of it; it has accuracy, text_perplexity"),
        ({"metric": "accuracy", "policy": "dop", "at_least": 0.1}, "a report has no accuracy of dop"),
        ({"metric": "accuracy", "against": "x", "min_gain": 0.1}, "a report has no accuracy of x"),
    ],
)
def test_a_rule_on_what_is_not_measured_is_refused(tmp_path, inputs, rule, message):
    with pytest.raises(ConfigError, match=message):
        judge(tmp_path, inputs, **rule)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({}, "found none"),
        ({"at_least": 0.1, "at_most": 0.2}, "found at_least, at_most"),
        ({"min_gain": 0.1}, "need `against`"),
        ({"at_least": 0.1, "against": "parent"}, "take none"),
    ],
)
def test_a_rule_has_exactly_one_bound(rule, message):
    with pytest.raises(ValueError, match=message):
        Rule(metric="accuracy", **rule)


def outcome_of(rule: Rule, candidate: Sequence[float], parent: Sequence[float] | None = None, seed: int = 0) -> str:
    ids = [str(index) for index in range(len(candidate))]
    scores = {"new": candidate, "old": parent or candidate}
    measured = RowScores(metric=rule.metric, row_ids=ids, groups=ids, weights=[1.0] * len(ids), scores=scores)
    evidence = Evidence(
        reports=[{rule.metric: measured}], names={"candidate": "new", "parent": "old"}, has_champion=False,
        bootstrap=Bootstrap(confidence=0.95, num_resamples=300, seed=seed), min_rows=20,
    )  # fmt: skip
    return rule.judge("rule", evidence).outcome


AT_LEAST = Rule(metric="accuracy", at_least=0.95)
MAX_REGRESSION = Rule(metric="accuracy", against="parent", max_regression=0.01)


def test_twenty_rows_that_agree_prove_no_accuracy_and_no_equality():
    assert outcome_of(Rule(metric="accuracy", at_least=1.0), [1.0] * 20) == "inconclusive"
    assert outcome_of(Rule(metric="accuracy", at_most=0.0), [0.0] * 20) == "inconclusive"
    assert outcome_of(MAX_REGRESSION, [1.0] * 20, [1.0] * 20) == "inconclusive"


@pytest.mark.parametrize("count", [20, 40, 100])
@pytest.mark.parametrize("rule", [AT_LEAST, MAX_REGRESSION], ids=["accuracy-0.90", "regression-0.03"])
def test_a_model_that_is_too_bad_passes_in_at_most_five_percent_of_evaluations(rule, count):
    trials, passed = 200, 0
    share = 0.90 if rule is AT_LEAST else 0.97
    for seed in range(trials):
        draw = random.Random(1000 * count + seed)
        right = [float(draw.random() < share) for _ in range(count)]
        passed += outcome_of(rule, right, [1.0] * count, seed) == "better"
    assert passed / trials <= 0.05


@pytest.mark.parametrize(
    ("bound", "new", "old", "outcome"),
    [
        ({"at_least": 0.5}, 1.0, None, "inconclusive"),
        ({"at_least": 2.0}, 1.0, None, "inconclusive"),
        ({"against": "parent", "min_gain": 0.5}, 2.1, 1.0, "inconclusive"),
        ({"against": "parent", "min_gain": 0.0}, 1.0, 1.0, "inconclusive"),
        ({"against": "parent", "max_regression": 0.5}, 1.0, 1.1, "inconclusive"),
        ({"against": "parent", "max_regression": 0.0}, 1.0, 1.0, "better"),
    ],
)
def test_of_an_unbounded_metric_rows_that_agree_decide_only_that_equal_models_are_no_worse(bound, new, old, outcome):
    rule = Rule(metric="reward_score", **bound)
    assert outcome_of(rule, [new] * 40, None if old is None else [old] * 40) == outcome


@pytest.mark.parametrize(
    ("now", "is_as_strict"),
    [({}, True), ({"min_gain": 0.2}, True), ({"min_gain": 0.05}, False), ({"metric": "win_rate"}, False),
     ({"against": "champion"}, False), ({"min_gain": None, "max_regression": 0.0}, False)],
)  # fmt: skip
def test_a_rule_is_as_strict_as_another_with_its_bound_or_a_narrower_one(now, is_as_strict):
    before = {"metric": "accuracy", "against": "parent", "min_gain": 0.1}
    gate, other = (Gate(rules={"rule": Rule(**fields)}) for fields in ({**before, **now}, before))
    assert gate.asks_as_much(other, "rule") == is_as_strict
    assert not replace(gate, inconclusive="promote").asks_as_much(other, "rule")
    assert not replace(gate, confidence=0.5).asks_as_much(other, "rule")
