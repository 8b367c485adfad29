"""How sure a difference between two models is: the paired bootstrap over rows.

Koehn 2004, "Statistical significance tests for machine translation evaluation" (EMNLP); Efron & Tibshirani 1993,
"An Introduction to the Bootstrap", chapters 8 (what to draw) and 13 (percentile intervals). Near its bounds an accuracy
shows too little noise, and none where all rows agree; so four pseudo-groups are drawn with the rows, two at each bound
(Agresti & Coull 1998, "Approximate is better than 'exact' for interval estimation of binomial proportions"; of
differences in the spirit of Agresti & Min 2005, "Simple improved confidence intervals for comparing matched
proportions").

R reports, G groups of rows, B resamples.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tasks.evaluate.row_scores import RowScores, is_bounded, is_perplexity, lower_is_better

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers = NDArray[np.float64]

_CHUNK = 4_000_000  # counts that are held in memory at once
_PSEUDO_AT_EACH_BOUND = 2
_ROUNDING = 1e-9  # a narrower interval has no width but that of the sums' rounding


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A value with its confidence interval.

    Args:
        num_groups: how many groups of rows it rests on: what is drawn independently.
    """

    value: float
    low: float
    high: float
    num_groups: int

    @property
    def has_no_width(self) -> bool:
        """Whether all rows agree, so that the draws show no noise at all."""
        return self.high - self.low <= _ROUNDING * max(1.0, abs(self.value))


@dataclass(frozen=True, kw_only=True)
class Bootstrap:
    """How an interval is made.

    Args:
        confidence: share of such intervals that hold the truth.
        num_resamples: how often the rows are drawn anew.
        seed: of the draws.
    """

    confidence: float
    num_resamples: int
    seed: int

    def estimate(self, reports: Sequence[RowScores], policy: str, baseline: str | None) -> Estimate:
        """What a policy scores, or with a baseline its gain over it, as a mean over repeated evaluations.

        A group of rows is drawn with what every policy and every report says of it, so that what rows have in common
        cancels. With several reports the spread between them widens the interval (Student's t, in quadrature): it
        holds the noise of training and sampling seeds, which rows of one evaluation do not show.

        A gain is positive where the policy is better; of a perplexity it is the share of the baseline's. The value is
        that of the rows; of an accuracy the interval is that of the rows and the pseudo-groups, and holds the value.
        """
        import numpy as np

        groups = {group: index for index, group in enumerate(sorted({g for each in reports for g in each.groups}))}
        sums = [_sums(report, groups, policy, baseline) for report in reports]
        counts = np.ones((1, len(groups)))
        values_R = np.array([_statistic(reports[0].metric, each, counts, baseline)[0] for each in sums])
        bounded = is_bounded(reports[0].metric)
        drawn_from = [_with_pseudo_groups(each, baseline) for each in sums] if bounded else sums
        drawn_B = np.concatenate([
            np.mean([_statistic(reports[0].metric, each, counts, baseline) for each in drawn_from], axis=0)
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
        """How often each group is drawn, a row per resample, in chunks that fit the memory."""
        import numpy as np

        random = np.random.default_rng(self.seed)
        size = max(1, _CHUNK // num_groups)
        for start in range(0, self.num_resamples, size):
            chunk = min(size, self.num_resamples - start)
            yield random.multinomial(num_groups, [1 / num_groups] * num_groups, size=chunk).astype(float)

    def _spread(self, values_R: "Numbers") -> float:
        """Half the width of the interval that the values of repeated evaluations alone would give."""
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

    place = [groups[group] for group in report.groups]
    columns = (report.weights, report.scores[policy], report.scores[baseline] if baseline else report.weights)
    weights, scores, against = (
        np.bincount(place, np.asarray(column, dtype=float), minlength=len(groups)).astype(float) for column in columns
    )
    return weights, scores, against


def _with_pseudo_groups(
    sums: "tuple[Numbers, Numbers, Numbers]", baseline: str | None
) -> "tuple[Numbers, Numbers, Numbers]":
    """The groups and two pseudo-groups at each bound, each as heavy as a group of the report is in the mean."""
    import numpy as np

    weights = sums[0]
    weight = weights.sum() / np.count_nonzero(weights)  # a group that only another report has weighs nothing here
    scores = np.repeat([weight, 0.0], _PSEUDO_AT_EACH_BOUND)
    whole = np.full(len(scores), weight)
    added = (whole, scores, scores[::-1] if baseline else whole)
    first, second, third = (np.concatenate(pair) for pair in zip(sums, added, strict=True))
    return first, second, third


def _statistic(
    metric: str, sums: "tuple[Numbers, Numbers, Numbers]", counts_BG: "Numbers", baseline: str | None
) -> "Numbers":
    """The value, or the gain, of each resample."""
    import numpy as np

    weights, scores, against = (counts_BG @ each for each in sums)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):  # what is no number is judged by its reader
        if is_perplexity(metric):
            ratio_B: Numbers = np.exp(-(scores - against) / weights) if baseline else np.exp(-scores / weights)
            return 1 - ratio_B if baseline else ratio_B
        gain_B: Numbers = (scores - against) / weights if baseline else scores / weights
        return -gain_B if baseline and lower_is_better(metric) else gain_B
