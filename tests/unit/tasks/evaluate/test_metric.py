"""Metrics that an evaluation is asked for: what they give, what they refuse, and what a bad value becomes."""

import shutil
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from lineage.errors import ConfigError
from tasks.evaluate import Evaluate, benchmarks
from tasks.evaluate.answers import Answer
from tasks.evaluate.measured import Asked, Measured, metric_scores
from tasks.reward_functions import RewardFunction, scorers
from tasks.reward_functions.metric import Metric, asked_texts, at_equal_length, pass_at_k, rewards_of


class Words:
    def __call__(self, text: str, **_options: object) -> dict[str, list[str]]:
        return {"input_ids": text.split()}


def score(name: str, completion: str, **row: object) -> float:
    options = {key.removeprefix("_"): row.pop(key) for key in [*row] if key.startswith("_")}
    (scorer,) = scorers({name: RewardFunction(**options)}, Words())
    columns = {column: [value] for column, value in row.items()}
    scorer.check(columns)
    (value,) = scorer([[]], [completion], columns)
    return value


@pytest.mark.parametrize(
    ("name", "completion", "row", "value"),
    [
        ("f1", "The cat, sat!", {"answer": "a cat sat"}, 1.0), ("f1", "cat", {"answer": "cat sat"}, 2 / 3),
        ("f1", "A.", {"answer": "A"}, 1.0), ("f1", "the A", {"answer": "a"}, 2 / 3), ("f1", "", {"answer": "A"}, 0.0),
        ("f1", "", {"answer": "cat"}, 0.0), ("f1", "dog", {"answer": ["cat", "DOG"]}, 1.0),
        ("f1", "<answer>Katze", {"answer": "Katze", "_answer_tag": "answer"}, 0.0),
        ("f1", "猫が好き", {"answer": "猫が好き"}, 1.0), ("f1", "Вода", {"answer": "вода"}, 1.0),
        ("rouge_l", "a b c", {"answer": "a x c"}, 2 / 3), ("rouge_l", "Вода тут", {"answer": "вода тут"}, 1.0),
        ("rouge_l", "", {"answer": "a"}, 0.0), ("rouge_l", "b", {"answer": ["a", "b"]}, 1.0),
        ("bleu", "Paris", {"answer": "Paris"}, 1.0), ("bleu", "", {"answer": "Paris"}, 0.0),
        ("bleu", "the cat sat on the mat", {"answer": "the cat sat on the mat"}, 1.0),
        ("bleu", "the dog sat on the mat", {"answer": "the cat sat on the mat"}, pytest.approx(0.537, abs=1e-3)),
        ("tokens", "a b c", {}, 3.0), ("tokens", "", {}, 0.0),
        ("refusal", "I\u2019m sorry, but I can't help with that.", {}, 1.0), ("refusal", "I cannot do it", {}, 1.0),
        ("refusal", "Water boils at 100 degrees.", {}, 0.0), ("refusal", "no", {"_pattern": "^no$"}, 1.0),
        ("refusal", "x " * 100 + "I cannot say", {}, 0.0),
        ("distinct", "a b a b", {}, 2 / 3), ("distinct", "a a a", {"_n": 1}, 1 / 3), ("distinct", "a", {}, 0.0),
    ],
)  # fmt: skip
def test_functions(name, completion, row, value):
    if name in ("rouge_l", "bleu"):
        pytest.importorskip({"rouge_l": "rouge_score", "bleu": "sacrebleu"}[name])
    assert score(name, completion, **row) == pytest.approx(value)


def test_the_chance_of_a_right_answer_among_k():
    assert pass_at_k(1, 4, 1) == 0.25 and pass_at_k(4, 4, 2) == 1.0 and pass_at_k(0, 4, 2) == 0.0
    assert pass_at_k(2, 4, 2) == pytest.approx(1 - 1 / 6)


def test_a_win_rate_at_equal_length_takes_out_what_length_explains():
    lengths, others = [20, 20, 4, 4] * 10, [10] * 40
    by_length = [1.0, 1.0, 0.0, 0.0] * 10  # the longer one wins, whatever it says
    assert sum(at_equal_length(by_length, lengths, others)) / 40 == pytest.approx(0.5, abs=0.1)
    assert sum(by_length) / 40 == 0.5
    longer = [1.0, 1.0, 1.0, 0.0] * 10
    more = [30, 30, 20, 10] * 10
    assert sum(at_equal_length(longer, more, others)) / 40 < sum(longer) / 40
    assert at_equal_length([1.0, 0.0], [5, 5], [5, 5]) == [1.0, 0.0]
    assert at_equal_length([1.0, 0.0], [6, 6], [5, 5]) == [1.0, 0.0]  # one difference tells no effect
    assert at_equal_length([], [], []) == []


ASKED = Asked(
    rows=[(str(index), str(index)) for index in range(4)], prompts=[[{"role": "user", "content": "?"}]] * 4, ids=[],
    columns={"answer": ["0", "1", "2", "3"]}, answers=lambda policy: policy.greedy,
)  # fmt: skip


def policy(*texts: str, samples: int = 0) -> Measured:
    answers = [Answer(text=text, finished=True, num_tokens=len(text.split())) for text in texts]
    return Measured(
        text=(), answers=(), chosen=(), rejected=(), greedy=answers, answered=(),
        sampled=[answers[:1] * (samples - 1) + [each] for each in answers],
    )  # fmt: skip


def values(metric: Metric, rewards=None, **policies: Measured):
    functions = {each.name: each for each in scorers(rewards_of([metric]), Words(), "metrics")}
    reference = policies.pop("reference", policy("0", "0", "0", "0"))
    scores, failed = metric_scores(ASKED, policies, reference, [metric], functions, rewards)
    return {name: list(of) for each in scores for name, of in each.scores.items()}, failed, scores


def test_a_metric_of_answers_and_its_standard_error():
    found, failed, (scores,) = values(Metric(function="exact"), sft=policy("0", "x", "2", "3"))
    assert found == {"sft": [1, 0, 1, 1]} and not failed
    assert scores.value("sft") == 0.75 and scores.standard_error("sft") == pytest.approx(0.25)
    assert replace(scores, groups=["a"] * 4).standard_error("sft") is None
    assert scores.is_bounded and not scores.lower_is_better


def test_pass_at_k_scores_samples():
    metric = Metric(function="pass_at_k", checker="exact", samples=2, k=2)
    assert metric.label == "pass@2"
    found, _, _ = values(metric, sft=policy("0", "1", "x", "3", samples=2))
    assert found == {"sft": [1, 1, 0, 1]}


JUDGE = "def judge(completions, references): return [float(len(a) > len(b)) for a, b in zip(completions, references)]\n"


def test_a_judge_compares_with_the_reference(tmp_path):
    (tmp_path / "j.py").write_text(JUDGE)
    metric = Metric(function="win_rate", judge=f"python:{tmp_path / 'j.py'}:judge", allow_code=True)
    found, failed, _ = values(metric, sft=policy("00", "0", "000", ""))
    assert (found, failed, metric.label) == ({"sft": [1, 0, 1, 0]}, {}, "judged_win_rate")
    controlled = replace(metric, length_control=True)
    assert controlled.label == "length_controlled_win_rate"
    wide = policy("0 0", "0", "0 0 0", "")
    plain, (mean,) = values(metric, sft=wide)[0]["sft"], [values(controlled, sft=wide)[2][0]]
    assert mean.value("sft") != sum(plain) / 4 and not mean.is_bounded
    by_model = Metric(function="win_rate", judge="reward_model")
    rewards = {"sft": [1.0, 2.0, 0.0, 1.0], "reference": [0.0, 2.0, 1.0, 2.0]}
    assert values(by_model, rewards, sft=wide)[0] == {"sft": [1, 0.5, 0, 0]}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [float('nan')] * len(completions)", r"metrics.score returned nan for row 0"),
        ("return ['1'] * len(completions)", "returned '1' for row 0"),
        ("return [1.0, None, 1.0, 1.0]", "metrics.score returned None for row 1"),
        ("return None", "returned None for 4 completions"),
        ("return [1.0, float('inf'), 1, 1]", "inf for row 1"),
        ("return [1.0]", "returned 1 values for 4 completions"),
        ("return [1.0 / (a != '2') for a in completions]", r"ZeroDivisionError: .* for row 2"),
        ("raise SystemExit(3)", "SystemExit"),
    ],
)
def test_a_bad_value_names_metric_row_and_value_and_is_recorded_as_failed(tmp_path, body, message):
    import re

    (tmp_path / "a.py").write_text(f"def score(completions): {body}\n")
    metric = Metric(function=f"python:{tmp_path / 'a.py'}:score", allow_code=True)
    found, failed, _ = values(metric, sft=policy("0", "1", "2", "3"))
    assert found == {} and failed.keys() == {"sft/score"} and re.search(message, failed["sft/score"])


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (("nothing",), "there is no reward function nothing"),
        (("exact", "exact"), "two metrics have this name"),
        (("exact_match",), "no reward function exact_match|have this name"),
        ((Metric(function="exact", name="win_rate"),), "metrics.win_rate: two metrics have this name"),
        ((Metric(function="exact", weight=2.0),), "weight: it is of a reward"),
        ((Metric(function="exact", k=2),), "metrics.exact.k=2: exact does not read it"),
        ((Metric(function="exact", tolerance=0.1),), "exact does not read it"),
        ((Metric(function="pass_at_k", k=3, samples=2),), "at least k samples"),
        ((Metric(function="win_rate"),), "judge: is not set"),
        ((Metric(function="win_rate", judge="exact"),), "it compares no two answers"),
        ((Metric(function="python:a.py:f"),), "allow_code"),
        ((Metric(name="x"),), "metrics.x.function: is not set"),
        (
            (
                Metric(function="pass_at_k", temperature=0.5),
                Metric(function="pass_at_k", temperature=0.7, k=2, samples=2),
            ),
            "all metrics score the same samples",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(metrics, message):
    with pytest.raises(ConfigError, match=message):
        Evaluate(metrics=metrics)


def test_a_package_that_is_missing_is_named_with_the_command(monkeypatch):
    import tasks.reward_functions.metric as metric_module
    import tasks.reward_functions.scorer as scorer_module

    for module in (metric_module, scorer_module):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    for name, package in (("rouge_l", "rouge-score"), ("bleu", "sacrebleu"), ("lm_eval:arc_easy", "lm-eval")):
        with pytest.raises(ConfigError, match=rf"package {package}.* not installed; .*pip install 'posttrain\[eval\]'"):
            Evaluate(metrics=(name,))


def test_metrics_are_identity_and_where_they_lie_is_not(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "f.py").write_text("def score(completions): return [1.0] * len(completions)\n")
    plain = Evaluate()
    assert "metrics" not in plain.recipe()
    one, other = (
        Evaluate(metrics=(Metric(function=f"python:{tmp_path / folder / 'f.py'}:score", allow_code=True),))
        for folder in "ab"
    )
    assert one.recipe() == other.recipe() != plain.recipe() and one.code_digest() == other.code_digest()
    (tmp_path / "b" / "f.py").write_text("def score(completions): return [2.0] * len(completions)\n")
    assert one.code_digest(now=True) != other.code_digest(now=True) != plain.code_digest()
    assert Evaluate(metrics=("exact",)).recipe() == Evaluate(metrics=(Metric(function="exact"),)).recipe()
    options = [
        Metric(function="exact", column="a"), Metric(function="exact", answer_tag="a"),
        Metric(function="exact", mode="min"), Metric(function="pass_at_k", name="exact", checker="exact"),
    ]  # fmt: skip
    recipes = [str(Evaluate(metrics=(each,)).recipe()) for each in [Metric(function="exact"), *options]]
    assert len(set(recipes)) == len(recipes)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", '{"q": "a\u2028b"}\n\n  \n{"q": "c"}\n'),
        ("a.json", '\ufeff[{"q": "a\u2028b"},\n {"q": "c"}]'),
        ("a.json", '{\n "rows": [{"q": "a\u2028b"},\n {"q": "c"}]\n}'),
        ("a.jsonl", '{"q": "a\u2028b"}\nnot JSON'),
        ("a.csv", 'q,n\n"a\u2028b",1\n"c",2\n'),
    ],
)
def test_what_a_benchmark_asks_is_read_from_any_file_of_rows(tmp_path, name, text):
    (tmp_path / name).write_text(text, encoding="utf-8")
    task = f'task: a\ndoc_to_text: "{{{{q}}}}"\ndataset_kwargs: {{data_files: {name}, field: rows}}\n'
    (tmp_path / "task.yaml").write_text(task)
    found = asked_texts(Metric(function=f"lm_eval:{tmp_path / 'task.yaml'}"))
    assert found == ([] if "not JSON" in text else ["a\u2028b", "c"])


def test_a_bundled_benchmark_whose_rows_are_not_reached_is_named_with_a_command(tmp_path, monkeypatch):
    tasks = tmp_path / "lm_eval" / "tasks"
    (tasks / "arc").mkdir(parents=True)
    (tasks / "arc" / "easy.yaml").write_text("tag:\n  - arc\ntask: arc_easy\ndataset_path: allenai/ai2_arc\n")
    (tasks / "arc" / "hard.yaml").write_text("include: easy.yaml\ntask: arc_hard\n")
    (tasks / "arc" / "both.yaml").write_text("group: arc_both\ntask: [arc_easy, arc_hard]\n")
    spec = SimpleNamespace(origin=str(tmp_path / "lm_eval" / "__init__.py"))
    monkeypatch.setattr(benchmarks, "find_spec", lambda name: spec)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    asked = [Metric(function=f"lm_eval:{name}") for name in ("arc_hard", "arc_both", "arc")]
    for offline, why in ((False, "refused"), (True, "HF_HUB_OFFLINE is set")):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        for each in asked:
            command = "hf download --repo-type dataset allenai/ai2_arc"
            with pytest.raises(ConfigError, match=f"{each.label}: .*{why}.*{command}"):
                benchmarks.require_reached([each])
    hub, made = "hub/datasets--allenai--ai2_arc", "home/datasets/allenai___ai2_arc/default/0.0.0"
    (cut, main), rows = (f"{hub}/blobs/b1.x.incomplete", f"{hub}/refs/main"), f"{hub}/snapshots/c1/data/test.parquet"
    for files, is_kept in (
        ((f"{hub}/",), False), ((f"{made}/",), False), ((main, f"{hub}/snapshots/c1/"), False),
        ((main, f"{hub}/snapshots/c1/README.md"), False), ((main, f"{hub}/snapshots/c0/test.parquet"), False),
        ((main, rows, cut), False), ((main, rows, cut, f"{hub}/blobs/b1"), True), ((main, rows), True), ((rows,), True),
        ((f"{made}/f1.incomplete/a.arrow",), False), ((f"{made}/f1/a.arrow",), True),
    ):  # fmt: skip
        for each in files:
            place = tmp_path / each
            (place if each.endswith("/") else place.parent).mkdir(parents=True, exist_ok=True)
            if not each.endswith("/"):
                place.write_text("c1")
        assert benchmarks._is_kept("allenai/ai2_arc") is is_kept, files
        if is_kept:
            benchmarks.require_reached(asked)
        for folder in ("hub", "home"):
            shutil.rmtree(tmp_path / folder, ignore_errors=True)
    index = SimpleNamespace(TaskManager=lambda: SimpleNamespace(task_index={}))
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", index)
    monkeypatch.setitem(sys.modules, "lm_eval", SimpleNamespace(tasks=index))
    with pytest.raises(ConfigError, match="lm-eval has no task arc_esay; a name of `lm-eval ls tasks`"):
        benchmarks.require_reached([Metric(function="lm_eval:arc_esay")])
