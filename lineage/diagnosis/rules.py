"""All diagnosis rules, and their combined findings."""

import math
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from lineage.diagnosis.curves import Curves, read_curves
from lineage.diagnosis.finding import Finding
from lineage.diagnosis.loss_rules import LOSS_RULES
from lineage.diagnosis.method_rules import METHOD_RULES
from lineage.store import MANIFEST

RULES = (*METHOD_RULES, *LOSS_RULES)  # the more specific first
_ORDER = ("high", "medium", "low")
# Rule -> the rules whose change its own would undo.
_UNDOES = {"still-falling": {"overfit", "validation-flat", "overconfident"}, "noisy": {"smooth-but-slow"}}


def diagnose(curves: Curves) -> list[Finding]:
    """All findings, most certain first; at most one per group, and only the failure if there is one."""
    found: dict[str, Finding] = {}
    for rule in RULES:
        if rule.group not in found and (finding := rule.find(curves)):
            if curves.because in _UNDOES.get(rule.name, ()):
                evidence = f"{finding.evidence}; no change: the recipe follows {curves.because}, and this would undo it"
                finding = replace(finding, change={}, evidence=evidence)
            found[rule.group] = finding
    if "failure" in found:
        return [found["failure"]]
    return sorted(found.values(), key=lambda finding: _ORDER.index(finding.confidence))


def live_findings(directory: Path) -> tuple[Finding, ...]:
    """Findings of a running stage, recomputed when its reports have grown by about a tenth."""
    try:
        size = (directory / "metrics.jsonl").stat().st_size
    except OSError:
        return ()
    return _findings(directory, int(8 * math.log2(size + 1)), (directory / MANIFEST).exists())


@lru_cache(maxsize=64)
def _findings(directory: Path, size: int, is_over: bool) -> tuple[Finding, ...]:
    return tuple(diagnose(read_curves(directory)))


def as_line(finding: Finding) -> str:
    """A finding in one line."""
    return f"{finding.rule}: {finding.evidence}"
