"""The intervals: known cases, their rate of error, and what rows and reports have in common."""

import math
import random

import pytest

from tasks.evaluate.row_scores import RowScores
from tasks.gate.bootstrap import Bootstrap

PLAIN = Bootstrap(confidence=0.95, num_resamples=2000, seed=0)


def scores(metric: str, weights: list[float] | None = None, groups: list[str] | None = None, **policies) -> RowScores:
    count = len(next(iter(policies.values())))
    ids = [str(index) for index in range(count)]
    return RowScores(
        metric=metric, row_ids=ids, groups=groups or ids, weights=weights or [1.0] * count, scores=policies
    )


def wins(seed: int, count: int, share: float) -> list[float]:
    draw = random.Random(seed)
    return [float(draw.random() < share) for _ in range(count)]


def test_a_clear_win_and_a_clear_loss():
    report = scores("accuracy", good=wins(1, 200, 0.9), bad=wins(2, 200, 0.5))
    gain = PLAIN.estimate([report], "good", "bad")
    assert 0.25 < gain.low < gain.value < gain.high < 0.55
    loss = PLAIN.estimate([report], "bad", "good")
    assert (loss.low, loss.high) == pytest.approx((-gain.high, -gain.low))


def test_of_an_accuracy_the_interval_is_that_of_the_normal_approximation():
    values = wins(3, 400, 0.5)
    found = PLAIN.estimate([scores("accuracy", a=values)], "a", None)
    share = sum(values) / 400
    assert found.value == pytest.approx(share)
    half = 1.96 * math.sqrt(share * (1 - share) / 400)
    assert (found.high - found.low) / 2 == pytest.approx(half, rel=0.1)


def test_a_perplexity_weighs_rows_by_their_tokens_and_a_lower_one_or_a_lower_loss_is_a_gain():
    report = scores("text_perplexity", [1.0, 3.0], new=[-1.0, -9.0], old=[-2.0, -18.0])
    assert PLAIN.estimate([report], "new", None).value == pytest.approx(math.exp(10 / 4))
    assert PLAIN.estimate([report], "new", "old").value == pytest.approx(1 - math.exp(10 / 4) / math.exp(20 / 4))
    assert PLAIN.estimate([report], "old", "new").value == pytest.approx(1 - math.exp(20 / 4) / math.exp(10 / 4))
    assert report.value("new") == pytest.approx(math.exp(10 / 4))
    loss = scores("loss", new=[1.0, 1.0], old=[2.0, 2.0])
    assert PLAIN.estimate([loss], "new", "old").value == pytest.approx(1.0)


def test_what_rows_have_in_common_cancels():
    draw = random.Random(0)
    hard = [draw.gauss(0, 10) for _ in range(100)]
    report = scores("reward_score", a=[each + 0.1 for each in hard], b=hard)
    gain = PLAIN.estimate([report], "a", "b")
    assert gain.low == pytest.approx(0.1) and gain.high == pytest.approx(0.1)
    alone = PLAIN.estimate([report], "a", None)
    assert alone.high - alone.low > 2


def test_rows_of_one_group_count_once():
    values = wins(5, 50, 0.5)
    apart = PLAIN.estimate([scores("accuracy", a=values)], "a", None)
    copies = scores("accuracy", groups=[str(index % 50) for index in range(200)], a=values * 4)
    together = PLAIN.estimate([copies], "a", None)
    assert (together.low, together.high, together.num_groups) == (apart.low, apart.high, 50)


@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_equal_policies_are_taken_for_better_as_rarely_as_the_confidence_says(confidence):
    trials, better, worse = 250, 0, 0
    for seed in range(trials):
        report = scores("accuracy", a=wins(2 * seed, 60, 0.5), b=wins(2 * seed + 1, 60, 0.5))
        found = Bootstrap(confidence=confidence, num_resamples=150, seed=seed).estimate([report], "a", "b")
        better += found.low > 0
        worse += found.high < 0
    expected = (1 - confidence) / 2
    margin = 3 * math.sqrt(expected * (1 - expected) / trials) + 0.01  # the percentile interval is a little short
    assert abs(better / trials - expected) < margin
    assert abs(worse / trials - expected) < margin


def test_the_spread_of_repeated_evaluations_widens_the_interval_and_never_narrows_it():
    base = wins(7, 300, 0.5)

    def report(gain: float) -> RowScores:
        return scores("reward_score", a=[each + gain for each in base], b=base)

    same = PLAIN.estimate([report(0.3)] * 3, "a", "b")
    assert (same.low, same.high) == pytest.approx((0.3, 0.3))
    spread = PLAIN.estimate([report(0.1), report(0.3), report(0.5)], "a", "b")
    assert spread.value == pytest.approx(0.3)
    half = 4.302653 * 0.2 / math.sqrt(3)  # Student's t with two degrees of freedom
    assert (spread.low, spread.high) == pytest.approx((0.3 - half, 0.3 + half), rel=1e-4)


def test_each_field_changes_the_interval():
    report = scores("accuracy", a=wins(1, 50, 0.6), b=wins(2, 50, 0.5))

    def interval(**fields) -> tuple[float, float]:
        found = Bootstrap(**{"confidence": 0.95, "num_resamples": 300, "seed": 0, **fields}).estimate(
            [report], "a", "b"
        )
        return found.low, found.high

    plain = interval()
    assert interval() == plain
    assert all(interval(**change) != plain for change in ({"confidence": 0.5}, {"num_resamples": 400}, {"seed": 1}))


def test_of_an_accuracy_no_interval_is_of_zero_width_and_the_value_stays_that_of_the_rows():
    report = scores("accuracy", all=[1.0] * 20, none=[0.0] * 20)
    right, wrong = PLAIN.estimate([report], "all", None), PLAIN.estimate([report], "none", None)
    assert (right.value, right.high, right.num_groups) == (1.0, 1.0, 20) and 0.75 < right.low < 0.85
    assert (wrong.value, wrong.low) == (0.0, 0.0) and 0.15 < wrong.high < 0.25
    same = PLAIN.estimate([report], "all", "all")
    assert same.value == 0 and same.low == pytest.approx(-same.high, abs=0.05) and same.high > 0.1
    gain = PLAIN.estimate([report], "all", "none")
    assert (gain.value, gain.high) == (1.0, 1.0) and gain.low < 0.75
    assert not any(each.has_no_width for each in (right, wrong, same, gain))


def test_of_an_unbounded_metric_rows_that_agree_leave_no_width():
    report = scores("reward_score", a=[0.3 + 0.1] * 30, b=[0.1] * 30)
    assert PLAIN.estimate([report], "a", "b").has_no_width
    assert not PLAIN.estimate([scores("reward_score", a=[0.4, 0.5] * 15)], "a", None).has_no_width


def test_an_interval_holds_its_value_at_any_confidence():
    narrow = Bootstrap(confidence=0.3, num_resamples=2000, seed=0)
    found = narrow.estimate([scores("accuracy", a=[1.0] * 100)], "a", None)
    assert found.low < found.high == found.value == 1.0
