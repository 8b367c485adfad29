"""Confidence intervals of metrics and of differences between models: the paired bootstrap over rows.

Koehn 2004, "Statistical significance tests for machine translation evaluation" (EMNLP); Efron & Tibshirani 1993,
"An Introduction to the Bootstrap", chapters 8 (what to draw) and 13 (percentile intervals). Near its bounds an accuracy
shows too little noise, and none where all rows agree. Therefore four pseudo-groups are drawn with the rows, two at each
bound (Agresti & Coull 1998, "Approximate is better than 'exact' for interval estimation of binomial proportions"; for
differences in the spirit of Agresti & Min 2005, "Simple improved confidence intervals for comparing matched
proportions").

Shapes: R reports, G groups of rows, B resamples.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tasks.evaluate.row_scores import RowScores, is_perplexity

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers = NDArray[np.float64]

_CHUNK = 4_000_000  # counts in memory at once
_PSEUDO_AT_EACH_BOUND = 2
_ROUNDING = 1e-9  # a narrower interval is a rounding error of the sums


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A value with its confidence interval.

    Args:
        num_groups: groups of rows, which are drawn independently.
    """

    value: float
    low: float
    high: float
    num_groups: int

    @property
    def has_no_width(self) -> bool:
        """Whether all rows agree, so that the resamples show no noise."""
        return self.high - self.low <= _ROUNDING * max(1.0, abs(self.value))


@dataclass(frozen=True, kw_only=True)
class Bootstrap:
    """Settings of the bootstrap.

    Args:
        confidence: share of such intervals that contain the true value.
        num_resamples: number of resamples of the rows.
        seed: of the resamples.
    """

    confidence: float
    num_resamples: int
    seed: int

    def estimate(self, reports: Sequence[RowScores], policy: str, baseline: str | None) -> Estimate:
        """A policy's metric, or with a baseline its gain over it, as a mean over repeated evaluations.

        A group of rows is drawn with the scores of all policies in all reports, so that noise which policies share
        cancels. With several reports the spread between them widens the interval (Student's t, in quadrature): it
        contains the noise of training and sampling seeds, which the rows of one evaluation do not show.

        A gain is positive where the policy is better; for a perplexity it is a share of the baseline's. The value is
        computed from the rows; the interval of an accuracy from the rows and the pseudo-groups, and it contains the
        value.
        """
        import numpy as np

        groups = {group: index for index, group in enumerate(sorted({g for each in reports for g in each.groups}))}
        sums = [_sums(report, groups, policy, baseline) for report in reports]
        counts = np.ones((1, len(groups)))
        values_R = np.array([_statistic(reports[0], each, counts, baseline)[0] for each in sums])
        bounded = reports[0].is_bounded
        drawn_from = [_with_pseudo_groups(each, baseline) for each in sums] if bounded else sums
        drawn_B = np.concatenate([
            np.mean([_statistic(reports[0], each, counts, baseline) for each in drawn_from], axis=0)
            for counts in self._draws(len(drawn_from[0][0]))
        ])  # fmt: skip
        value = float(values_R.mean())
        tail = (1 - self.confidence) / 2
        low, high = (float(each) for each in np.quantile(drawn_B, [tail, 1 - tail]))
        if bounded:
            low, high = min(low, value), max(high, value)
        spread = self._spread(values_R)
        return Estimate(
            value=value,
            low=value - float(np.hypot(value - low, spread)) if spread else low,
            high=value + float(np.hypot(high - value, spread)) if spread else high,
            num_groups=len(groups),
        )

    def _draws(self, num_groups: int) -> "Iterator[Numbers]":
        """Counts of each group, a row per resample, in chunks that fit in memory."""
        import numpy as np

        random = np.random.default_rng(self.seed)
        size = max(1, _CHUNK // num_groups)
        for start in range(0, self.num_resamples, size):
            chunk = min(size, self.num_resamples - start)
            yield random.multinomial(num_groups, [1 / num_groups] * num_groups, size=chunk).astype(float)

    def _spread(self, values_R: "Numbers") -> float:
        """Half the width of the interval from the values of repeated evaluations alone."""
        if len(values_R) < 2:
            return 0.0
        from scipy.special import stdtrit

        quantile = stdtrit(len(values_R) - 1, (1 + self.confidence) / 2)
        return float(quantile * values_R.std(ddof=1) / len(values_R) ** 0.5)


def _sums(
    report: RowScores, groups: dict[str, int], policy: str, baseline: str | None
) -> "tuple[Numbers, Numbers, Numbers]":
    """Weights, the policy's scores and the baseline's, summed within each group."""
    import numpy as np

    index = [groups[group] for group in report.groups]
    columns = (report.weights, report.scores[policy], report.scores[baseline] if baseline else report.weights)
    weights, scores, against = (
        np.bincount(index, np.asarray(column, dtype=float), minlength=len(groups)).astype(float) for column in columns
    )
    return weights, scores, against


def _with_pseudo_groups(
    sums: "tuple[Numbers, Numbers, Numbers]", baseline: str | None
) -> "tuple[Numbers, Numbers, Numbers]":
    """Adds two pseudo-groups at each bound, each with the mean weight of the report's groups."""
    import numpy as np

    weights = sums[0]
    weight = weights.sum() / np.count_nonzero(weights)  # a group of another report has weight 0 here
    scores = np.repeat([weight, 0.0], _PSEUDO_AT_EACH_BOUND)
    whole = np.full(len(scores), weight)
    added = (whole, scores, scores[::-1] if baseline else whole)
    first, second, third = (np.concatenate(pair) for pair in zip(sums, added, strict=True))
    return first, second, third


def _statistic(
    report: RowScores, sums: "tuple[Numbers, Numbers, Numbers]", counts_BG: "Numbers", baseline: str | None
) -> "Numbers":
    """The value, or the gain, of each resample."""
    import numpy as np

    weights, scores, against = (counts_BG @ each for each in sums)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):  # the gate handles non-finite values
        if is_perplexity(report.metric):
            ratio_B: Numbers = np.exp(-(scores - against) / weights) if baseline else np.exp(-scores / weights)
            return 1 - ratio_B if baseline else ratio_B
        gain_B: Numbers = (scores - against) / weights if baseline else scores / weights
        return -gain_B if baseline and report.lower_is_better else gain_B
