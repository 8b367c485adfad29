"""The area under the curve as scores of rows: their mean is the area, their variation its noise."""

import random
from statistics import fmean, pvariance

import pytest

from tasks.evaluate.measured import auc_scores


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
