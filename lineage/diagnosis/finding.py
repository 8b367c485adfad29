"""A finding of the loss-curve doctor, the rule that makes it, and the changes that rules share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from lineage.diagnosis.curves import Curves

Confidence = Literal["high", "medium", "low"]
Value = float | int | str | bool | None
Change = dict[str, Value]  # field of the stage, such as method.learning_rate -> its new value


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a rule has found.

    Args:
        evidence: what the curve shows, with steps and values.
        change: to be pasted as overrides of the stage; empty: no override mends it.
        metric: the curve that shows it; empty: none does.
        at: the step at which it shows; None: all along.
        rule, remedy: of the rule.
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
    """A pure function of curves, and its line in the documentation.

    Args:
        group: rules of one group explain the same curve: only the first that fires counts.
    """

    name: str
    group: str
    sign: str
    remedy: str
    check: Check

    def find(self, curves: Curves) -> Finding | None:
        """What it finds in curves."""
        found = self.check(curves)
        return replace(found, rule=self.name, remedy=self.remedy) if found else None


def rule(rules: list[Rule], name: str, group: str, sign: str, remedy: str) -> Callable[[Check], Check]:
    """Adds a function to a table of rules."""

    def add(check: Check) -> Check:
        rules.append(Rule(name=name, group=group, sign=sign, remedy=remedy, check=check))
        return check

    return add


def rounded(value: float) -> float:
    """To two digits."""
    return float(f"{value:.2g}")


def rate(curves: Curves, factor: float) -> Change:
    """The learning rate times a factor."""
    return {"method.learning_rate": rounded(curves.learning_rate * factor)} if curves.learning_rate else {}


def length(steps: float) -> Change:
    """A training of so many steps."""
    return {"method.num_steps": max(1, round(steps)), "method.num_epochs": None}


def calmer(curves: Curves, factor: float) -> Change:
    """A lower rate, more warm-up, clipping at 1, and no fp16."""
    change = rate(curves, 1 / factor)
    if not curves.number("schedule", "warmup_steps") and curves.number("warmup_ratio") < 0.1:
        change["method.schedule.warmup"] = 0.1
    if not 0 < curves.number("max_grad_norm", default=1.0) <= 1:
        change["method.max_grad_norm"] = 1.0
    if curves.recipe.get("precision") == "fp16":
        change["method.precision"] = "bf16"
    return change


def tighter(curves: Curves) -> Change:
    """Half the rate, and a stronger pull to the policy that a reinforcement started from."""
    if "kl_coef" in curves.series or "kl_coef" in curves.recipe:
        now = curves.number("kl_coef", default=curves["kl_coef"].last if len(curves["kl_coef"]) else 0.05)
        pull: Change = {"method.kl_coef": rounded(now * 4)}
    else:
        pull = {"method.beta": rounded(max(0.04, curves.number("beta") * 4))}
    return {**pull, **rate(curves, 0.5)}
