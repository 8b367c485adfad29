"""A finding about a training's curves, the rule behind it, and the setting changes that rules share."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from lineage.diagnosis.curves import Curves

Confidence = Literal["high", "medium", "low"]
Value = float | int | str | bool | None
WILD_RATE = 0.01  # Adam moves each weight by about the rate in a step, and weights start at about 0.02
_LEAST_RATE = 1e-6  # of a training of all weights; ten times that of an adapter
Change = dict[str, Value]  # field of the stage, such as method.learning_rate -> its new value


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a rule found.

    Args:
        evidence: what the curve shows, with steps and values.
        change: overrides of the stage that fix it; empty: no override does.
        metric: name of the curve that shows it; empty: none.
        at: the step at which it starts; None: no single step.
        rule, remedy: name and remedy of the rule.
    """

    evidence: str
    confidence: Confidence
    change: Mapping[str, Value] = field(default_factory=dict)
    metric: str = "loss"
    at: int | None = None
    rule: str = ""
    remedy: str = ""


Check = Callable[[Curves], Finding | None]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A check of curves, with its documentation.

    Args:
        group: rules of one group explain the same curve: only the first that fires counts.
        steps, validations: the fewest reported steps, and losses on held-out rows, that it judges.
    """

    name: str
    group: str
    sign: str
    remedy: str
    steps: int
    validations: int
    check: Check

    @property
    def needs(self) -> str:
        """How much of a curve it needs, in words."""
        found = {"steps": self.steps, "validations": self.validations}
        return ", ".join(f"{count} {name}" for name, count in found.items() if count) or "-"

    def find(self, curves: Curves) -> Finding | None:
        """Applies the rule; None: it finds nothing."""
        if curves.num_reports < self.steps or len(curves.validation) < self.validations:
            return None
        found = self.check(curves)
        return replace(found, rule=self.name, remedy=self.remedy) if found else None


def rounded(value: float) -> float:
    """Rounds to two significant digits."""
    return float(f"{value:.2g}")


def rate(curves: Curves, factor: float) -> Change:
    """Override that multiplies the learning rate, with its minimum where that would not be below it.

    It leaves no rate of Adam above ``WILD_RATE``.
    """
    now = curves.learning_rate
    most = WILD_RATE if is_adam(curves) else math.inf
    if not now:
        return {}
    new = rounded(min(now * factor, most))
    is_low = curves.number("schedule", "min_learning_rate") >= new
    return {"method.learning_rate": new, **({"method.schedule.min_learning_rate": rounded(new / 10)} if is_low else {})}


def is_adam(curves: Curves) -> bool:
    """Whether the optimizer, if the recipe names one, is of Adam's family."""
    found = curves.recipe.get("optimizer")
    return "adam" in str(found.get("name", "adam")) if isinstance(found, Mapping) else True


def is_wild(curves: Curves) -> bool:
    """Whether a step of Adam moves weights by half of what they are, or more."""
    return curves.learning_rate >= WILD_RATE and is_adam(curves)


def length(curves: Curves, steps: float) -> Change:
    """Overrides that set the length of the training, without a patience that it would be too short for."""
    change: Change = {"method.num_steps": max(1, round(steps)), "method.num_epochs": None}
    if steps <= curves.number("validation", "patience") * curves.number("validation", "every_steps"):
        change["method.validation.patience"] = None
    return change


def stopped(curves: Curves, step: int) -> Change:
    """Overrides that stop at a step; a training that was made longer is not made as short again."""
    longer = curves.because == "still-falling"
    return length(curves, max(step, 0.75 * curves.num_steps) if longer else step)


def regularized(curves: Curves) -> Change:
    """The next override against overfitting, after those that the recipe has; empty: it has them all.

    Weight decay 0.01, 0.05, 0.1; dropout 0.05, 0.1; rank 16, 8, 4; the learning rate / 3 down to ``_LEAST_RATE``.
    """
    adapter = curves.recipe.get("adapter")
    has = adapter if isinstance(adapter, Mapping) else {}
    steps = (
        ("method.optimizer.weight_decay", curves.number("weight_decay"), (0.01, 0.05, 0.1)),
        ("method.adapter.dropout", curves.number("adapter", "dropout", default=1.0), (0.05, 0.1)),
    )
    for name, now, values in steps:
        if higher := [value for value in values if value > now]:
            return {name: higher[0]}
    rank = curves.number("adapter", "rank")
    if lower := [value for value in (16, 8, 4) if value < rank]:
        scaled = int(curves.number("adapter", "alpha") * lower[0] / rank)  # the update keeps its scale
        return {"method.adapter.rank": lower[0], **({"method.adapter.alpha": scaled} if scaled else {})}
    is_lowest = curves.learning_rate / 3 < _LEAST_RATE * (10 if has else 1)
    return {} if is_lowest else rate(curves, 1 / 3)


def stabilised(curves: Curves, factor: float) -> Change:
    """Overrides against instability: lower learning rate, more warm-up, clipping at 1, no fp16."""
    change = rate(curves, 1 / factor)
    if not curves.number("schedule", "warmup_steps") and curves.number("warmup_ratio") < 0.1:
        change["method.schedule.warmup"] = 0.1
    if not 0 < curves.number("max_grad_norm", default=1.0) <= 1:
        change["method.max_grad_norm"] = 1.0
    if curves.recipe.get("precision") == "fp16":
        change["method.precision"] = "bf16"
    return change


def stronger_kl(curves: Curves) -> Change:
    """Overrides that halve the learning rate and strengthen the KL penalty."""
    if "kl_coef" in curves.series or "kl_coef" in curves.recipe:
        now = curves.number("kl_coef", default=curves["kl_coef"].last if len(curves["kl_coef"]) else 0.05)
        pull: Change = {"method.kl_coef": rounded(max(0.05, now * 4))}
    else:
        pull = {"method.beta": rounded(max(0.04, curves.number("beta") * 4))}
    return {**pull, **rate(curves, 0.5)}
