"""What works with what: the rules that join settings of a training with each other, its model and its resources.

A rule of one setting alone is in its dataclass; one that joins several is an entry of ``RULES``. The plan refuses what
a rule refuses, ``posttrain compat`` prints the table, and ``docs/settings.md`` is rendered from it.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from lineage.errors import ConfigError
from tasks.context import Resources
from tasks.method import Method, Training
from tasks.train.model_rules import MODEL_RULES
from tasks.train.rule import Case, Fields, Rule
from tasks.train.step_rules import STEP_RULES

_NONE: Fields = {}
RULES: tuple[Rule, ...] = (*MODEL_RULES, *STEP_RULES)


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A rule that refuses a training, and what to do.

    Args:
        found: the fields that do not work together -> their values.
        nearest: the fields to set.
    """

    rule: str
    found: Fields
    reason: str
    nearest: Fields

    def text(self, where: str) -> str:
        """A message about the stage at ``where``, such as ``stages.sft``, that ends in overrides to paste."""
        return (
            f"{where}: {', '.join(assigned(self.found))}: {self.reason}; set {' '.join(assigned(self.nearest, where))}"
        )


def refusals(case: Case) -> Iterator[Refusal]:
    """What every rule that refuses a training says."""
    for rule in RULES:
        if rule.refuses(case):
            yield Refusal(
                rule=rule.id,
                found=dict(case.found(path) for path in rule.fields),
                reason=rule.detail(case) if rule.detail else rule.reason,
                nearest=rule.nearest(case) if callable(rule.nearest) else rule.nearest,
            )


def check_compatible(where: str, method: Method, resources: Resources, config: Mapping[str, object] = _NONE) -> None:
    """Requires that the settings of a stage work together, where it is a training.

    Args:
        where: ``stages.NAME``.
        config: of its model, where that is known.

    Raises:
        ConfigError: names the fields, the reason, and the overrides that make it work.
    """
    if isinstance(method, Training):
        for refusal in refusals(Case(method=method, resources=resources, config=config)):
            raise ConfigError(refusal.text(where))


def assigned(values: Fields, where: str = "") -> list[str]:
    """Fields and values in the form of overrides."""
    prefix = f"{where}." if where else ""
    return [f"{prefix}{path}={_written(value)}" for path, value in values.items()]


def _written(value: object) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value)
