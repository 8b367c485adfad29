"""The verdict of a gate on a model, with its evidence: ``output/verdict.json``."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from lineage.errors import ArtifactError

VERDICT_FILE, VERDICT_TABLE = "verdict.json", "verdict.md"
CHAMPION = "champion"

Outcome = Literal["better", "worse", "inconclusive"]
Result = Literal["pass", "refuse"]
Approval = Literal["none", "required"]


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A model that a verdict refers to.

    Args:
        name: of its stage, or ``source:NAME``.
        fingerprint, digest: of the model, and of its bytes.
        alias: the alias of a champion.
    """

    name: str
    fingerprint: str
    digest: str | None
    alias: str | None = None


@dataclass(frozen=True, kw_only=True)
class RuleResult:
    """The result of one rule.

    Args:
        rule: its name in the gate's recipe.
        demand: its requirement, in words.
        against: ``parent``, ``champion``, a policy of the report, or None.
        outcome: better: the whole interval is on the good side of the bound; worse: on the bad side.
        candidate, baseline: values of the metric.
        estimate, low, high: the value compared with the bound, and its confidence interval; None: not measured.
        num_rows: number of independent rows.
        note: why the evidence is limited.
    """

    rule: str
    demand: str
    against: str | None
    outcome: Outcome
    candidate: float | None = None
    baseline: float | None = None
    estimate: float | None = None
    low: float | None = None
    high: float | None = None
    num_rows: int = 0
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A verdict; a refusal is a finished artifact like any other."""

    result: Result
    approval: Approval
    confidence: float
    candidate: Judged
    champion: Judged | None
    rules: list[RuleResult]
    num_reports: int = 1
    schema_version: int = 1

    @property
    def rests_on_champion(self) -> bool:
        """Whether the verdict depends on the champion."""
        return any(rule.against == CHAMPION for rule in self.rules)

    def complaints(self) -> list[str]:
        """The unmet rules, one line each."""
        return [
            f"{rule.rule}: {rule.outcome}: {rule.demand}: {interval_text(rule)}"
            for rule in self.rules
            if rule.outcome != "better"
        ]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    @staticmethod
    def from_json(text: str) -> "Verdict":
        fields = json.loads(text)
        fields["candidate"] = Judged(**fields["candidate"])
        fields["champion"] = Judged(**fields["champion"]) if fields["champion"] else None
        fields["rules"] = [RuleResult(**rule) for rule in fields["rules"]]
        return Verdict(**fields)


def interval_text(rule: RuleResult) -> str:
    """Estimate and interval as ``+0.305 [+0.250, +0.360], n=200``, or why there are none."""
    if rule.estimate is None or rule.low is None or rule.high is None:
        return rule.note
    sign = "+" if rule.against else ""
    numbers = [f"{value:{sign}.4g}" for value in (rule.estimate, rule.low, rule.high)]
    text = f"{numbers[0]} [{numbers[1]}, {numbers[2]}], n={rule.num_rows}"
    return f"{text}; {rule.note}" if rule.note else text


def read_verdict(output: Path) -> Verdict:
    """The verdict in a gate's output directory (ArtifactError: it is missing, or not readable by this version)."""
    try:
        return Verdict.from_json((output / VERDICT_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ArtifactError(
            f"{output / VERDICT_FILE}: is not a verdict ({error}); delete {output.parent} to judge again"
        ) from error
