"""The bounds of the shipped gate: a better model passes, one that is worse in a single thing does not."""

import random
from collections.abc import Sequence
from dataclasses import replace
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


def scores(metric: str, mean: float) -> list[float]:
    """What a model scores in each row; two models agree in most rows, as those of one chain do."""
    draw = random.Random(metric)
    if metric.endswith("perplexity"):
        own = random.Random(mean)
        return [mean + draw.gauss(0, 0.5) + own.gauss(0, 0.05) for _ in range(NUM_ROWS)]
    if mean == 0.5:  # the reference against itself
        return [0.5] * NUM_ROWS
    return [float(draw.random() < mean) for _ in range(NUM_ROWS)]


def gate() -> Gate:
    method = load_pipeline(["pipeline=cpt-sft-dpo-gated", "model=qwen2.5-0.5b"]).stages["gate"].method
    assert isinstance(method, Gate)
    return replace(method, num_resamples=1000)  # a tenth: the interval is as wide, the bounds are those of the file


def judge(directory: Path, candidate: dict[str, float]) -> Verdict:
    ids = [str(index) for index in range(NUM_ROWS)]
    models = {"sft": SFT, "dpo": candidate}
    measured = [
        RowScores(
            metric=metric, row_ids=ids, groups=ids, weights=[1.0] * NUM_ROWS,
            scores={name: scores(metric, means[metric]) for name, means in models.items()},
        )
        for metric in SFT
    ]  # fmt: skip
    write_scores(directory / "report", measured, {name: f"fp-{name}" for name in models})
    inputs = {
        "report": Input(name="evaluate", kind=Kind.REPORT, fingerprint="r", path=directory / "report"),
        **{
            slot: Input(name=name, kind=Kind.CHECKPOINT, fingerprint=f"fp-{name}", path=directory, digest="d")
            for slot, name in (("candidate", "dpo"), ("parent", "sft"))
        },
    }
    gate().run(inputs, TrainContext(output_dir=directory, work_dir=directory))
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


def test_the_tiny_model_has_two_bounds_of_its_own() -> None:
    tiny = load_pipeline(["pipeline=cpt-sft-dpo-gated"]).stages["gate"].method
    assert isinstance(tiny, Gate)
    shipped = gate().rules
    assert {name for name, rule in tiny.rules.items() if rule != shipped[name]} == {"wins_over_sft", "keeps_language"}
