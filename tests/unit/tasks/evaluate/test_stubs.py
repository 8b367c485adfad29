"""Known-right and known-wrong stubs through the metrics and rules of a gate."""

from dataclasses import replace
from pathlib import Path

import pytest

from lineage.artifact import Kind
from lineage.errors import ConfigError
from tasks.context import TrainContext
from tasks.evaluate import Evaluate
from tasks.evaluate.row_scores import RowScores, write_scores
from tasks.evaluate.rows import Prompt, Rows, words_of_rows
from tasks.evaluate.stubs import Stubs, shuffled
from tasks.gate import Gate
from tasks.gate.rule import Rule
from tasks.method import Input
from tasks.reward_functions import RewardFunction, scorers
from tasks.reward_functions.metric import Metric, rewards_of

SLOTS = ("text", "conversations", "pairs", "unpaired")
TOOL = {"type": "function", "function": {"name": "find", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"]}}}  # fmt: skip


class Words:
    def __call__(self, text: str, **_options: object) -> dict[str, list[str]]:
        return {"input_ids": text.split()}


def made_up(*slots: str) -> Rows:
    return words_of_rows(dict.fromkeys(slots or SLOTS), num_rows=40, num_prompts=40, num_questions=40, seed=0)


def asking(**columns: object) -> Rows:
    """Prompts with columns; a function of the row's number gives its value."""
    prompts = [
        Prompt(
            messages=[{"role": "user", "content": f"{index}?"}], tools=None,
            columns={name: value(index) if callable(value) else value for name, value in columns.items()},
        )
        for index in range(20)
    ]  # fmt: skip
    return replace(made_up("prompts"), prompts=prompts, prompt_ids=[[0]] * len(prompts))


def stubs(rows: Rows, *slots: str, **fields: object) -> Stubs:
    method = Evaluate(answer_form="one_sentence", **fields)
    own = {each.name: each for each in scorers(rewards_of(method.own_metrics), Words(), "metrics")}
    functions = scorers(method.rewards or {}, Words())
    return method.stubs(rows, None, own, functions, frozenset(slots), [])


@pytest.mark.parametrize(
    ("metric", "right", "wrong"),
    [
        ("text_perplexity", 1, 32_000), ("answer_perplexity", 1, 32_000), ("exact_match", 1, 0),
        ("preference_accuracy", 1, 0), ("logp_accuracy", 1, 0), ("mean_logp_accuracy", 1, 0),
        ("unpaired_accuracy", 1, 0), ("unpaired_auc", 1, 0), ("one_sentence_share", 1, 0), ("unfinished_share", 0, 1),
        ("answer_tokens", 3, 64), ("reward_score", 1e3, -1e3), ("win_rate", 1, 0), ("accuracy", 1, 0), ("kl", 0, None),
    ],
)  # fmt: skip
def test_every_metric_of_a_policy_tells_the_right_stub_from_the_wrong_ones(metric, right, wrong):
    found = stubs(made_up(), "reward_model", kl_samples=1).scores[metric]
    assert found.value("right") == pytest.approx(right)
    others = [found.value(each) for each in found.scores if each != "right"]
    assert others and all(value == pytest.approx(wrong) if wrong is not None else value > 100 for value in others)


CASES = [
    ("exact", {}, {"answer": str}, ("shuffled", "empty")),
    ("numeric", {}, {"answer": lambda index: index}, ("shuffled", "empty")),
    ("f1", {"answer_tag": "answer"}, {"answer": lambda index: f"n{index}"}, ("shuffled", "empty")),
    ("regex", {"pattern": "a+"}, {"solution": "aa"}, ("empty",)),
    ("format", {}, {}, ("empty",)),
    ("json", {"column": "keys"}, {"keys": ["a"]}, ("empty",)),
    ("json", {"column": "schema"}, {"schema": TOOL["function"]["parameters"]}, ("empty",)),
    ("tool_call", {}, {"tools": [TOOL]}, ("empty",)),
    ("countdown", {}, {"numbers": [1, 2], "target": 3, "solution": "1 + 2"}, ("empty",)),
    ("code", {}, {"tests": "assert one() == 1", "solution": "def one(): return 1"}, ("empty",)),
    ("pass_at_k", {"checker": "exact", "samples": 2}, {"answer": str}, ("shuffled", "empty")),
    ("distinct", {"n": 1}, {"solution": "a b"}, ("empty",)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "columns", "refused"), CASES, ids=[case[0] for case in CASES])
def test_functions_are_fed_with_right_answers_of_the_rows(name, options, columns, refused):
    rows = asking(**columns)
    rows = replace(rows, prompts=rows.prompts[:4]) if name == "code" else rows
    metric = Metric(function=name, name="m", **options)
    found = stubs(rows, metrics=(metric,)).scores["m"]
    assert {each: found.value(each) for each in found.scores} == {"right": 1, **dict.fromkeys(refused, 0)}


def test_what_says_nothing_of_right_and_wrong_is_not_tested_and_says_why():
    found = stubs(asking(tests="assert True"), metrics=("tokens", "code", "refusal", "exact"))
    assert {name: why.partition(":")[0] for name, why in found.untested.items()} == {
        "tokens": "it measures no rightness", "refusal": "it measures no rightness",
        "code": "no row says a right answer; a column solution in the rows would",
        "exact": "the rows have no column answer",
    }  # fmt: skip
    assert not found.scores.keys() & found.untested.keys()


def test_a_shuffled_answer_differs_from_that_of_its_row():
    assert shuffled(["a", "a", "b", "a"]) == ["b", "b", "a", "b"]
    assert shuffled(["a", "a"]) is None and shuffled([]) is None


ZERO = "def score(completions, answer): return [0.0 for _ in completions]\n"
ALL = "def score(completions, answer): return [1.0 for _ in completions]\n"
EQUAL = "def score(completions, answer): return [float(a == b) for a, b in zip(completions, answer)]\n"
HALF = "def score(completions, answer): return [float(a == b and a != '7') for a, b in zip(completions, answer)]\n"
BY_PROMPT = "def score(prompts, completions): return [float(bool(each)) for each in completions]\n"
RAISES = "def score(completions, answer): raise ValueError('broken')\n"


def own(path: Path, code: str) -> Metric:
    path.write_text(code)
    return Metric(function=f"python:{path}:score", allow_code=True)


@pytest.mark.parametrize(
    ("code", "rule", "message"),
    [
        (ZERO, {"at_least": 0.5}, r"rules.r: score refuses a model that is right: its value is 0 .*row \w+ scores 0"),
        (HALF, {"at_least": 0.99}, r"refuses a model that is right: its value is 0.95 .*row \w+ scores 0"),
        (ALL, {"at_least": 0.5}, r"passes a known-wrong model \(shuffled\): its value is 1 .*row \w+ scores 1"),
        (ALL, {"against": "parent", "min_gain": 0.0}, "refuses a model that is right against the one that is"),
        (EQUAL, {"at_most": 0.5}, "refuses a model that is right: its value is 1"),
        (EQUAL, {"at_least": 0.0}, r"passes a known-wrong model \(shuffled\)"),
        (EQUAL, {"against": "parent", "max_regression": 1.0}, r"known-wrong model \(shuffled\) against the one"),
        (EQUAL, {"at_least": 0.9}, None),
        (EQUAL, {"against": "parent", "max_regression": 0.02}, None),
        (BY_PROMPT, {"at_least": 0.9}, None),  # it cannot know the right answer: only the empty one is wrong
    ],
)  # fmt: skip
def test_a_rule_that_refuses_the_right_one_or_passes_a_wrong_one_names_metric_and_row(tmp_path, code, rule, message):
    found = stubs(asking(answer=str), metrics=(own(tmp_path / "a.py", code),))
    gate = Gate(rules={"r": Rule(metric="score", **rule)})
    if message is None:
        gate.require_tested(found)
    else:
        with pytest.raises(ConfigError, match=message):
            gate.require_tested(found)


def test_a_function_that_fails_on_known_answers_says_so(tmp_path):
    found = stubs(asking(answer=str), metrics=(own(tmp_path / "a.py", RAISES),))
    assert "it fails on known answers: metrics.score" in found.untested["score"] and "broken" in found.untested["score"]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"metric": "text_perplexity", "at_most": 40_000.0}, r"passes a known-wrong model \(wrong\)"),
        ({"metric": "answer_tokens", "at_most": 64.0}, r"passes a known-wrong model \(endless\)"),
        ({"metric": "unfinished_share", "against": "parent", "max_regression": 1.0}, "passes a known-wrong model"),
        ({"metric": "text_perplexity", "against": "parent", "max_regression": 0.1}, None),
        ({"metric": "reward_score", "at_least": 3.0}, None),
        ({"metric": "win_rate", "at_least": 0.5}, None),
    ],
)
def test_bounds_that_can_refuse_nothing_are_found(rule, message):
    gate, found = Gate(rules={"r": Rule(**rule)}), stubs(made_up(), "reward_model")
    if message is None:
        gate.require_tested(found)
    else:
        with pytest.raises(ConfigError, match=message):
            gate.require_tested(found)


def test_a_gate_judges_the_stubs_of_its_report_before_the_candidate(tmp_path):
    ids = [str(index) for index in range(40)]
    scores = RowScores(
        metric="accuracy", row_ids=ids, groups=ids, weights=[1.0] * 40, scores={"dpo": [1.0] * 39 + [0.0]}
    )
    write_scores(tmp_path / "report", [scores], {"dpo": "fp-dpo"})
    inputs = {
        "report": Input(name="evaluate", kind=Kind.REPORT, fingerprint="r", path=tmp_path / "report"),
        "candidate": Input(name="dpo", kind=Kind.CHECKPOINT, fingerprint="fp-dpo", path=tmp_path / "dpo"),
    }
    gate, context = (
        Gate(rules={"r": Rule(metric="accuracy", at_least=0.5)}),
        TrainContext(output_dir=tmp_path, work_dir=tmp_path),
    )
    gate.run(inputs, context)
    assert "Not tested with known answers: evaluate has no stubs." in (tmp_path / "verdict.md").read_text()
    known = replace(scores, scores={"right": [1.0] * 40, "empty": [0.0] * 40})
    Stubs(scores={"accuracy": known}).write(tmp_path / "report")
    gate.run(inputs, context)
    assert "Tested with known-right and known-wrong models: 1 rules." in (tmp_path / "verdict.md").read_text()
    Stubs(scores={"accuracy": replace(known, scores={"right": [0.0] * 40})}).write(tmp_path / "report")
    with pytest.raises(ConfigError, match="accuracy refuses a model that is right"):
        gate.run(inputs, context)
    Stubs(untested={"accuracy": "it fails on known answers: broken"}).write(tmp_path / "report")
    with pytest.raises(ConfigError, match=r"rules.r: accuracy: it fails on known answers: broken"):
        gate.run(inputs, context)


def test_a_metric_that_failed_is_no_verdict(tmp_path):
    write_scores(tmp_path / "report", [], {"dpo": "fp-dpo"})
    (tmp_path / "report" / "failed.json").write_text('{"dpo/score": "metrics.score returned nan for row 3"}')
    inputs = {
        "report": Input(name="evaluate", kind=Kind.REPORT, fingerprint="r", path=tmp_path / "report"),
        "candidate": Input(name="dpo", kind=Kind.CHECKPOINT, fingerprint="fp-dpo", path=tmp_path / "dpo"),
    }
    gate = Gate(rules={"r": Rule(metric="score", at_least=0.5)})
    with pytest.raises(ConfigError, match=r"evaluate could not measure it: metrics.score returned nan for row 3"):
        gate.run(inputs, TrainContext(output_dir=tmp_path, work_dir=tmp_path))


def test_rewards_of_an_evaluation_are_tested_as_metrics_are():
    found = stubs(asking(answer=str), "prompts", rewards={"exact": RewardFunction()})
    assert found.scores["reward/exact"].value("right") == 1 and found.scores["reward/exact"].value("empty") == 0
