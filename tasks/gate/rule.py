"""One rule of a gate: a bound on a metric, and whether the model meets it."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from annotated_types import Ge

from lineage.errors import ConfigError
from lineage.fingerprint import Setting
from lineage.record.verdict import CHAMPION, Outcome, RuleResult
from tasks.evaluate.row_scores import RowScores, is_perplexity
from tasks.gate.bootstrap import Bootstrap, Estimate

PARENT, CANDIDATE = "parent", "candidate"
RIGHT = "right"  # the stub that is right (tasks.evaluate.stubs)
_ABSOLUTE, _RELATIVE = ("at_least", "at_most"), ("min_gain", "max_regression")


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The evidence for all rules of a gate.

    Args:
        reports: metric -> its scores, for each report.
        names: name of a policy in rules -> its name in the reports.
        has_champion: whether there is a champion to compare with.
        min_rows: with fewer rows every rule is inconclusive.
    """

    reports: Sequence[Mapping[str, RowScores]]
    names: Mapping[str, str]
    has_champion: bool
    bootstrap: Bootstrap
    min_rows: int


@dataclass(frozen=True, kw_only=True)
class Rule(Setting):
    """Exactly one bound on one metric.

    A gain is in units of the metric; for a perplexity it is a share of the baseline's: 0.1 is ten percent.

    Args:
        metric: its name in the report without the policy: ``text_perplexity``; with ``*`` at its end every metric that
            begins so, each of which must keep the bound: ``lm_eval/*``.
        policy: the policy to judge; None: the candidate.
        against: the baseline of a gain: ``parent``, ``champion`` or a policy of the report.
        at_least, at_most: bounds of the metric itself.
        min_gain: the policy must be better than ``against`` by more than this.
        max_regression: the policy may be worse than ``against`` by at most this.
    """

    metric: str
    policy: str | None = None
    against: str | None = None
    at_least: float | None = None
    at_most: float | None = None
    min_gain: Annotated[float, Ge(0)] | None = None
    max_regression: Annotated[float, Ge(0)] | None = None

    def __post_init__(self) -> None:
        configured = [*self._bounds()]
        if len(configured) != 1:
            found = ", ".join(configured) or "none"
            raise ValueError(f"a rule has one bound of at_least, at_most, min_gain, max_regression; found {found}")
        if (configured[0] in _RELATIVE) != (self.against is not None):
            raise ValueError(
                "min_gain and max_regression need `against` (parent, champion or a policy of the report); "
                "at_least and at_most take none"
            )

    def is_as_strict_as(self, other: "Rule") -> bool:
        """Whether it is the same rule with the same bound, or a narrower one."""
        (bound,) = self._bounds()
        mine, others = getattr(self, bound), getattr(other, bound)
        if others is None or replace(self, **{bound: others}) != other:
            return False
        return bool(mine >= others if bound in ("at_least", "min_gain") else mine <= others)

    def is_on(self, metric: str) -> bool:
        """Whether it is on a metric."""
        return metric == self.metric or (self.metric.endswith("*") and metric.startswith(self.metric[:-1]))

    def of_each(self, name: str, metrics: Collection[str]) -> "dict[str, Rule]":
        """The rule for each of the metrics that it is on: by its own name, or of several by ``name/metric``."""
        if not self.metric.endswith("*"):
            return {name: self}
        found = [each for each in metrics if self.is_on(each)]
        return {f"{name}/{each}": replace(self, metric=each) for each in found}

    def judge(self, name: str, evidence: Evidence) -> RuleResult:
        """The outcome, with its evidence (ConfigError: a report lacks the metric or a policy)."""
        if self.against == CHAMPION and not evidence.has_champion:
            note = "no champion yet"
            return RuleResult(rule=name, demand=self.demand(), against=CHAMPION, outcome="better", note=note)
        scores = [self._scores(name, report) for report in evidence.reports]
        policy = self._named(name, self.policy or CANDIDATE, scores, evidence)
        baseline = self._named(name, self.against, scores, evidence) if self.against else None
        estimate = evidence.bootstrap.estimate(scores, policy, baseline)
        equal = baseline is not None and all(each.scores[policy] == each.scores[baseline] for each in scores)
        outcome, note = self._outcome(estimate, scores[0].value(policy), evidence.min_rows, equal)
        return RuleResult(
            rule=name,
            demand=self.demand(),
            against=self.against,
            outcome=outcome,
            candidate=_finite(scores[0].value(policy)),
            baseline=_finite(scores[0].value(baseline)) if baseline else None,
            estimate=_finite(estimate.value),
            low=_finite(estimate.low),
            high=_finite(estimate.high),
            num_rows=estimate.num_groups,
            note=note,
        )

    def require_tested(self, name: str, stubs: Mapping[str, RowScores], bootstrap: Bootstrap) -> None:
        """Judges known-right and known-wrong stubs, by their values alone.

        A rule on a metric must pass the right one and refuse the others; one that compares must pass the right one
        against each other, and refuse each other against the right one.

        Raises:
            ConfigError: the rule refuses the right one, or passes a wrong one; names metric and row.
        """
        if self.metric not in stubs:
            return
        scores = stubs[self.metric]
        wrong = [each for each in scores.scores if each != RIGHT]
        pairs: list[tuple[str, str | None]] = [(each, None) for each in scores.scores]
        if self.against:
            pairs = [pair for each in wrong for pair in ((RIGHT, each), (each, RIGHT))]
        for stub, baseline in pairs:
            value = bootstrap.estimate([scores], stub, baseline).value
            if self._is_met(value) == (stub == RIGHT):
                continue
            small_is_good = scores.lower_is_better and not is_perplexity(self.metric)  # of a row, a log-probability
            best = max if small_is_good == (stub == RIGHT) else min
            row = best(range(len(scores.row_ids)), key=lambda index: scores.scores[stub][index])
            what = "refuses a model that is right" if stub == RIGHT else f"passes a known-wrong model ({stub})"
            than = f" against the one that is {baseline}" if baseline else ""
            raise ConfigError(
                f"rules.{name}: {self.metric} {what}{than}: its value is {scores.value(stub):.4g} ({self.demand()}); "
                f"row {scores.row_ids[row]} scores {scores.scores[stub][row]:.4g}; correct the metric, the right "
                "answer of that row or the rule's bound"
            )

    def _is_met(self, value: float) -> bool:
        [(kind, bound)] = self._bounds().items()
        if kind == "at_most":
            return value <= bound
        if kind == "min_gain":
            return value > bound
        return value >= (-bound if kind == "max_regression" else bound)

    def demand(self) -> str:
        """The rule as a sentence."""
        [(kind, bound)] = self._bounds().items()
        subject = f"{self.policy or CANDIDATE}'s {self.metric}"
        if kind in _ABSOLUTE:
            return f"{subject} {kind.replace('_', ' ')} {bound:g}"
        shown = f"{bound:.4g}" if not is_perplexity(self.metric) else f"{100 * bound:.4g} %"
        verb = f"gains more than {shown} over" if kind == "min_gain" else f"loses at most {shown} against"
        return f"{subject} {verb} {self.against}"

    def _outcome(self, estimate: Estimate, value: float, min_rows: int, equal: bool) -> tuple[Outcome, str]:
        """``equal``: policy and baseline score the same in every row; only then may an interval have no width."""
        if not math.isfinite(value):
            return "worse", "the metric is non-finite"
        if estimate.num_groups < min_rows:
            return "inconclusive", f"fewer than min_rows={min_rows} independent rows"
        [(kind, bound)] = self._bounds().items()
        bound = -bound if kind == "max_regression" else bound
        low, high = estimate.low - bound, estimate.high - bound
        if kind == "at_most":
            low, high = -high, -low
        better = low > 0 or (low == 0 and kind != "min_gain")
        if estimate.has_no_width and not (equal and better):
            return "inconclusive", "all rows agree, so their noise is unknown"
        if better:
            return "better", ""
        return ("worse", "") if high < 0 else ("inconclusive", "")

    def _bounds(self) -> dict[str, float]:
        values = {kind: getattr(self, kind) for kind in (*_ABSOLUTE, *_RELATIVE)}
        return {kind: value for kind, value in values.items() if value is not None}

    def _scores(self, name: str, report: Mapping[str, RowScores]) -> RowScores:
        if self.metric not in report:
            raise ConfigError(
                f"rules.{name}.metric={self.metric}: the report has no scores of it; it has {', '.join(report)}"
            )
        return report[self.metric]

    def _named(self, name: str, policy: str, scores: Sequence[RowScores], evidence: Evidence) -> str:
        found = evidence.names.get(policy, policy)
        for each in scores:
            if found not in each.scores:
                raise ConfigError(
                    f"rules.{name}: a report has no {self.metric} of {policy}; it has that of {', '.join(each.scores)}"
                )
        return found


def _finite(value: float) -> float | None:
    """None for a non-finite value, which JSON cannot hold."""
    return value if math.isfinite(value) else None
