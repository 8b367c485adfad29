"""What the report says of its metrics is what the gate does with them."""

import json
import math
import random
from dataclasses import fields
from pathlib import Path
from statistics import fmean, pvariance

import pytest

from tasks.evaluate.answers import Answer
from tasks.evaluate.measured import Measured, auc_scores, policy_scores
from tasks.evaluate.report import POLICY_METRICS, own_rows, write_report
from tasks.evaluate.row_scores import RowScores, is_bounded, is_perplexity, lower_is_better
from tasks.evaluate.rows import Pairs, Prompt, Question, Rows, Unpaired

DOCS = Path(__file__).parents[4] / "docs" / "evaluation.md"


@pytest.mark.parametrize("metric", POLICY_METRICS)
def test_the_arrow_of_a_column_is_what_a_gate_calls_better(tmp_path: Path, metric: str) -> None:
    write_report(
        tmp_path, {f"sft/{metric}": 1.0}, prompts=[], answers={"sft": []}, questions=[], references=[], answered={}
    )
    titles = (tmp_path / "table.md").read_text().splitlines()[0]
    assert ("↓" in titles) == lower_is_better(metric) and ("↑" in titles) != lower_is_better(metric)


def test_every_metric_of_a_policy_may_be_a_rule_of_a_gate_and_is_documented() -> None:
    """answer_tokens was measured, no gate took it, and no page named it."""
    prompt = Prompt(messages=[{"role": "user", "content": "a"}], tools=None)
    nothing: dict[str, object] = {each.name: [] for each in fields(Rows)} | {"lost": {}}
    rows = Rows(  # type: ignore[arg-type]
        **nothing | {
            "pairs": Pairs(chosen=[], rejected=[], kinds=[]),
            "unpaired": Unpaired(),
            "questions": [Question(prompt=prompt, reference="b", row_id="r", group="r")],
        }
    )  # fmt: skip
    answer = Answer(text="b.", finished=True, num_tokens=2)
    measured = Measured(text=[], answers=[], chosen=[], rejected=[], greedy=[], answered=[answer])
    found = {each.metric for each in policy_scores(rows, {"sft": measured}, measured, "one_sentence")}
    assert {"exact_match", "one_sentence_share", "answer_tokens"} <= found <= set(POLICY_METRICS)
    documented = DOCS.read_text(encoding="utf-8")
    assert [metric for metric in POLICY_METRICS if f"`{metric}`" not in documented] == []


def test_a_perplexity_beyond_the_range_of_floats_is_infinite() -> None:
    scores = RowScores(
        metric="text_perplexity", row_ids=["a"], groups=["a"], weights=[1], scores={"diverged": [-1e4], "sft": [-1.0]}
    )
    assert scores.value("diverged") == math.inf and scores.value("sft") == pytest.approx(math.e)


def test_a_reward_is_better_the_higher_it_is_whatever_its_name() -> None:
    assert not any(
        lower_is_better(f"reward/{name}") or is_perplexity(f"reward/{name}") for name in ("loss", "perplexity")
    )
    assert is_bounded("reward/exact") and is_bounded("reward/length") and not is_bounded("reward/my_accuracy")


def test_the_mean_is_the_share_of_pairs_that_are_ranked_right() -> None:
    # Of the pairs (3, 2), (3, 0), (1, 2), (1, 0) three are, and of (2, 2), (2, 0) one and a half.
    assert fmean(auc_scores([3.0, 1.0, 2.0, 2.0, 0.0], [True, True, True, False, False])) == pytest.approx(4.5 / 6)
    assert fmean(auc_scores([1.0, 0.0], [True, False])) == 1
    assert fmean(auc_scores([0.0, 0.0, 0.0], [True, False, False])) == 0.5


def test_the_variation_is_that_of_the_area_over_drawn_rows() -> None:
    generator = random.Random(0)

    def drawn() -> tuple[list[float], list[bool]]:
        labels = [True] * 20 + [False] * 60
        return [generator.gauss(0.8 if label else 0.0, 1.0) for label in labels], labels

    areas, estimated = [], []
    for _ in range(300):
        found = auc_scores(*drawn())
        areas.append(fmean(found))
        estimated.append(pvariance(found) / len(found))
    assert fmean(estimated) == pytest.approx(pvariance(areas), rel=0.2)


def test_answers_are_those_of_pairs_and_of_conversations_and_without_any_there_is_no_file(tmp_path: Path) -> None:
    question = [{"role": "user", "content": "1 + 1?"}]
    write_report(
        tmp_path / "sft", {"sft/answer_perplexity": 1.0}, prompts=[], answers={"sft": []}, questions=[question],
        references=["2"], answered={"sft": ["3"]},
    )  # fmt: skip
    (line,) = (tmp_path / "sft/answers.jsonl").read_text().splitlines()
    assert json.loads(line) == {"prompt": question, "right answer": "2", "sft": "3"}
    write_report(
        tmp_path / "none", {"sft/answer_perplexity": 1.0}, prompts=[], answers={"sft": []}, questions=[],
        references=[], answered={"sft": []},
    )  # fmt: skip
    assert not (tmp_path / "none/answers.jsonl").exists()


def test_metrics_without_a_column_of_their_own_are_further_ones():
    metrics = {"a/text_perplexity": 3.0, "a/text_perplexity/law": 4.0, "a/f1": 0.5, "a/f1/stderr": 0.1, "b/f1": 0.25}
    assert own_rows(metrics, ["b", "a"]) == [["text_perplexity/law", "", "4"], ["f1", "0.25", "0.5 ± 0.1"]]
