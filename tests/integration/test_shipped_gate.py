"""The bounds of the shipped gate: a better model passes, one that is worse in a single thing does not."""

import random
from collections.abc import Sequence
from dataclasses import replace
from math import log
from pathlib import Path

import pytest

from flows.declare.config import load_pipeline
from lineage.artifact import Kind
from lineage.verdict import Verdict, read_verdict
from tasks.context import TrainContext
from tasks.evaluate.row_scores import RowScores, write_scores
from tasks.gate import Gate
from tasks.method import Input

NUM_ROWS = 200
# What two models score in the mean: shares of rows, and of perplexities nats per token.
SFT = {
    "preference_accuracy": 0.5, "win_rate": 0.5, "mean_logp_accuracy": 0.6, "unfinished_share": 0.05,
    "answer_perplexity": -2.0, "text_perplexity": -3.0,
}  # fmt: skip
BETTER = {
    **SFT, "preference_accuracy": 0.8, "win_rate": 0.7, "mean_logp_accuracy": 0.75, "answer_perplexity": -2.03,
    "text_perplexity": -3.03,
}  # fmt: skip


TIES = {"tiny": 0.74}  # share of prompts that two models answer alike


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


def gate(model: str = "qwen2.5-0.5b", pipeline: str = "cpt-sft-dpo-gated") -> Gate:
    method = load_pipeline([f"pipeline={pipeline}", f"model={model}"]).stages["gate"].method
    assert isinstance(method, Gate)
    return replace(method, num_resamples=1000)  # a tenth: the interval is as wide, the bounds are those of the file


def judge(
    directory: Path, candidate: dict[str, float], parent: dict[str, float] = SFT, model: str = "qwen2.5-0.5b",
    pipeline: str = "cpt-sft-dpo-gated",
) -> Verdict:  # fmt: skip
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
    inputs = {
        "report": Input(name="evaluate", kind=Kind.REPORT, fingerprint="r", path=directory / "report"),
        **{
            slot: Input(name=name, kind=Kind.CHECKPOINT, fingerprint=f"fp-{name}", path=directory, digest="d")
            for slot, name in (("candidate", "dpo"), ("parent", "sft"))
        },
    }
    gate(model, pipeline).run(inputs, TrainContext(output_dir=directory, work_dir=directory))
    return read_verdict(directory)


def failing(verdict: Verdict) -> Sequence[str]:
    return [rule.rule for rule in verdict.rules if rule.outcome != "better"]


def test_a_better_model_passes(tmp_path: Path) -> None:
    verdict = judge(tmp_path, BETTER)
    assert (verdict.result, failing(verdict)) == ("pass", [])


@pytest.mark.parametrize(
    ("worse", "rule"),
    [
        ({"preference_accuracy": 0.55}, "prefers_chosen"),
        ({"win_rate": 0.4}, "wins_over_sft"),
        ({"win_rate": 0.52}, "wins_over_sft"),  # as good as chance
        ({"mean_logp_accuracy": 0.5}, "beats_sft"),
        ({"mean_logp_accuracy": 0.6}, "beats_sft"),  # the parent's own
        ({"answer_perplexity": -2.2}, "keeps_answers"),
        ({"text_perplexity": -3.2}, "keeps_language"),
        ({"unfinished_share": 0.3}, "finishes"),
    ],
)
def test_a_model_that_is_worse_in_one_thing_is_refused(tmp_path: Path, worse: dict[str, float], rule: str) -> None:
    verdict = judge(tmp_path, {**BETTER, **worse})
    assert (verdict.result, failing(verdict)) == ("refuse", [rule])


def test_the_parent_itself_is_refused(tmp_path: Path) -> None:
    verdict = judge(tmp_path, SFT)
    assert verdict.result == "refuse"
    assert {"prefers_chosen", "wins_over_sft", "beats_sft"} == set(failing(verdict))


# What `posttrain run pipeline=cpt-sft-dpo-gated` printed of the demo's models, and of dpo with three and ten times its
# learning rate: stages.dpo.method.learning_rate=3e-3 and 1e-2.
TINY_SFT = {
    "preference_accuracy": 0.5, "win_rate": 0.5, "mean_logp_accuracy": 0.76, "unfinished_share": 0.0025,
    "exact_match": 0.675, "answer_perplexity": -log(1.311), "text_perplexity": -log(597.4),
}  # fmt: skip
TINY_DPO = {
    "preference_accuracy": 0.91, "win_rate": 0.51, "mean_logp_accuracy": 0.9, "unfinished_share": 0.0,
    "exact_match": 0.76, "answer_perplexity": -log(1.361), "text_perplexity": -log(1098),
}  # fmt: skip


TINY_BROKEN = {
    "3e-3": {
        "preference_accuracy": 0.835, "win_rate": 0.53, "mean_logp_accuracy": 0.845, "unfinished_share": 0.0,
        "exact_match": 0.71, "answer_perplexity": -log(1.982), "text_perplexity": -log(3984),
    },
    "1e-2": {
        "preference_accuracy": 0.8, "win_rate": 0.535, "mean_logp_accuracy": 0.8, "unfinished_share": 0.0,
        "exact_match": 0.61, "answer_perplexity": -log(3.609), "text_perplexity": -log(38470),
    },
}  # fmt: skip


def test_the_demos_dpo_passes_the_bounds_of_the_tiny_model(tmp_path: Path) -> None:
    verdict = judge(tmp_path, TINY_DPO, TINY_SFT, "tiny")
    assert (verdict.result, failing(verdict)) == ("pass", [])


@pytest.mark.parametrize(
    ("learning_rate", "rules"),
    [
        ("3e-3", {"keeps_answers", "keeps_language"}),
        ("1e-2", {"keeps_answers", "keeps_language", "right_answers"}),
    ],
)
def test_a_dpo_that_its_learning_rate_broke_is_refused(tmp_path: Path, learning_rate: str, rules: set[str]) -> None:
    verdict = judge(tmp_path, TINY_BROKEN[learning_rate], TINY_SFT, "tiny")
    assert verdict.result == "refuse"
    assert set(failing(verdict)) >= rules


def test_a_tiny_dpo_that_answers_fewer_questions_right_is_refused(tmp_path: Path) -> None:
    verdict = judge(tmp_path, {**TINY_DPO, "exact_match": 0.6}, TINY_SFT, "tiny")
    assert (verdict.result, failing(verdict)) == ("refuse", ["right_answers"])


def test_the_tiny_model_has_bounds_of_its_own_for_what_it_can_and_cannot_do() -> None:
    tiny, shipped = gate("tiny").rules, gate().rules
    assert {name for name, rule in tiny.items() if rule != shipped.get(name)} == {
        "right_answers", "wins_over_sft", "keeps_language",
    }  # fmt: skip


TINY_START = {"reward_score": 0.0, "kl": 0.0, "exact_match": 0.7, "answer_perplexity": -0.3, "unfinished_share": 0.0}
TINY_PPO = {**TINY_START, "reward_score": 0.3, "kl": 0.1}


@pytest.mark.parametrize(
    ("worse", "rules"),
    [
        ({}, []),
        ({"reward_score": 0.0}, ["higher_reward"]),
        ({"kl": 1.4}, ["stays_close"]),
        ({"exact_match": 0.5}, ["right_answers"]),
        ({"unfinished_share": 0.3}, ["finishes"]),
    ],
)
def test_ppo_is_refused_where_a_higher_reward_costs_answers(
    tmp_path: Path, worse: dict[str, float], rules: list[str]
) -> None:
    verdict = judge(tmp_path, {**TINY_PPO, **worse}, TINY_START, "tiny", "rlhf-ppo")
    assert (verdict.result, failing(verdict)) == ("refuse" if rules else "pass", rules)
