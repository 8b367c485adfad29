"""A verdict as a table for people."""

from lineage.fingerprint import short
from lineage.verdict import Judged, RuleResult, Verdict, interval_text
from tasks.evaluation_report import markdown_table

_TITLES = ("rule", "demand", "outcome", "candidate", "baseline", "estimate")


def verdict_table(verdict: Verdict) -> str:
    """Markdown: the result, who was judged against whom, a line per rule."""
    champion = f", champion {_model(verdict.champion)}" if verdict.champion else ""
    reports = f"{verdict.num_reports} reports" if verdict.num_reports > 1 else "one report"
    asked = " if a person approves it" if verdict.approval == "required" and verdict.result == "pass" else ""
    head = f"**{verdict.result}**{asked}: {_model(verdict.candidate)}{champion}"
    foot = f"Intervals hold the truth with confidence {verdict.confidence:g}: paired bootstrap over rows, {reports}."
    return f"{head}\n\n{markdown_table(_TITLES, [_row(rule) for rule in verdict.rules])}\n{foot}\n"


def _row(rule: RuleResult) -> list[str]:
    values = ["" if value is None else f"{value:.4g}" for value in (rule.candidate, rule.baseline)]
    return [rule.rule, rule.demand, rule.outcome, *values, interval_text(rule)]


def _model(judged: Judged) -> str:
    named = f" (alias {judged.alias})" if judged.alias else ""
    return f"{judged.name}@{short(judged.fingerprint)}{named}"
