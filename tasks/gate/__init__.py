"""Judges a model by its reports: better, worse or inconclusive, with the evidence. It reads no weights."""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, get_args

from annotated_types import Ge, Gt, Lt, MinLen

from lineage.artifact import ALIAS, Kind
from lineage.errors import ArtifactError, ConfigError
from lineage.fingerprint import short
from lineage.record.verdict import (
    CHAMPION,
    VERDICT_FILE,
    VERDICT_TABLE,
    Approval,
    Judged,
    Outcome,
    Result,
    RuleResult,
    Verdict,
    interval_text,
)
from tasks.context import Metrics, TrainContext
from tasks.evaluate.report import table_of
from tasks.evaluate.row_scores import read_failed, read_policies, read_scores, read_weights
from tasks.evaluate.stubs import FAILS, Stubs
from tasks.gate.bootstrap import Bootstrap
from tasks.gate.rule import PARENT, Evidence, Rule
from tasks.recipe import Input, Inputs, Method

logger = logging.getLogger(__name__)

_OF_RULES = ("estimate", "low", "high")  # metrics of each rule
_TITLES = ("rule", "demand", "outcome", "candidate", "baseline", "estimate")


@dataclass(frozen=True, kw_only=True)
class Gate(Method):
    """Judges a candidate by rules; a refusal is a finished verdict, not a failure.

    Every slot that ``consumes`` does not name is a further report: the same evaluation with another seed, or of the
    same pipeline trained with another seed. Its policies have the same names as those of the first report.
    """

    consumes: ClassVar[Mapping[str, Kind]] = {
        "report": Kind.REPORT,
        "candidate": Kind.CHECKPOINT,
        PARENT: Kind.CHECKPOINT,
        CHAMPION: Kind.CHECKPOINT,
        "*": Kind.REPORT,
    }
    optional: ClassVar[frozenset[str]] = frozenset({PARENT, CHAMPION, "*"})
    produces: ClassVar[Kind] = Kind.VERDICT
    preload: ClassVar[tuple[str, ...]] = ()
    version: ClassVar[int] = 2  # 2: no interval of an accuracy is of zero width
    measures: ClassVar[tuple[str, ...]] = ("passed", *(f"rules_{outcome}" for outcome in get_args(Outcome)))

    rules: Annotated[Mapping[str, Rule], MinLen(1)]  # name -> what a candidate must reach
    inconclusive: Literal["refuse", "promote"] = "refuse"  # the effect of a rule that the rows cannot decide
    approval: Approval = "none"  # required: a person must approve a candidate that passes
    confidence: Annotated[float, Gt(0), Lt(1)] = 0.95  # of the intervals
    num_resamples: Annotated[int, Ge(100)] = 10_000  # of the bootstrap over rows
    min_rows: Annotated[int, Ge(2)] = 20  # fewer are too few for the bootstrap: inconclusive
    seed: Annotated[int, Ge(0)] = 0  # of the resamples

    def measured_metrics(self, slots: Collection[str], *, of_steps: bool = False) -> tuple[str, ...] | None:
        found = super().measured_metrics(slots, of_steps=of_steps)
        each = [f"{name}/*" if rule.metric.endswith("*") else name for name, rule in self.rules.items()]
        return found and (*found, *(f"{name}/{key}" if name[-1] != "*" else name for name in each for key in _OF_RULES))

    def each_rule(self, metrics: Collection[str]) -> dict[str, Rule]:
        """Its rules, each on one of these metrics (ConfigError: a rule is on none of them)."""
        found: dict[str, Rule] = {}
        for name, rule in self.rules.items():
            of_each = rule.of_each(name, metrics)
            if not of_each:
                raise ConfigError(
                    f"rules.{name}.metric={rule.metric}: the report has none; it has {', '.join(metrics)}"
                )
            found |= of_each
        return found

    def run(self, inputs: Inputs, ctx: TrainContext) -> Metrics:
        ctx.loaded()  # what it reads of the models is their names
        names = _names(inputs)
        reports = [read_scores(each.path) for each in inputs.values() if each.kind == Kind.REPORT]
        _require_measured(inputs)
        bootstrap = Bootstrap(confidence=self.confidence, num_resamples=self.num_resamples, seed=self.seed)
        evidence = Evidence(
            reports=reports, names=names, has_champion=CHAMPION in inputs, bootstrap=bootstrap, min_rows=self.min_rows
        )
        tested = self._test(inputs["report"])
        results = [rule.judge(name, evidence) for name, rule in self.each_rule(reports[0]).items()]
        verdict = Verdict(
            result=self._result(results),
            approval=self.approval,
            confidence=self.confidence,
            candidate=_judged(inputs["candidate"]),
            champion=_judged(inputs[CHAMPION]) if CHAMPION in inputs else None,
            rules=results,
            num_reports=len(reports),
        )
        (ctx.output_dir / VERDICT_FILE).write_text(verdict.to_json(), encoding="utf-8")
        (ctx.output_dir / VERDICT_TABLE).write_text(f"{verdict_table(verdict)}{tested}\n", encoding="utf-8")
        return _metrics(verdict)

    def asks_as_much(self, before: "Gate", rule: str) -> bool:
        """Whether it asks of a rule at least what an earlier gate asked."""
        is_decided = self.inconclusive == "refuse" or before.inconclusive == "promote"
        old, new = before.rules.get(rule), self.rules.get(rule)
        strict = old is None or (new is not None and new.is_as_strict_as(old))
        return strict and is_decided and self.confidence >= before.confidence

    def require_tested(self, stubs: Stubs, only: str | None = None) -> None:
        """Judges stubs by the rules, or by one of them.

        Raises:
            ConfigError: a rule refuses the right one or passes a wrong one; names the metric and a row. Or its metric
                fails on known answers.
        """
        few = Bootstrap(confidence=self.confidence, num_resamples=1, seed=self.seed)  # only values are read
        for name in [only] if only else self.rules:
            for metric, why in stubs.untested.items():
                on_part = self.rules[name].metric.startswith(f"{metric}/")  # of a benchmark
                if why.startswith(FAILS) and (on_part or self.rules[name].is_on(metric)):
                    raise ConfigError(f"rules.{name}: {metric}: {why}")
            for own, rule in self.rules[name].of_each(name, stubs.scores).items():
                rule.require_tested(own, stubs.scores, few)

    def _test(self, report: Input) -> str:
        """Tests the rules with the report's stubs; returns a sentence for the table.

        Raises:
            ConfigError: a rule fails; or its metric failed in the evaluation.
        """
        failed = read_failed(report.path)
        for name, rule in self.rules.items():
            for key, reason in failed.items():
                if rule.is_on(key.partition("/")[2]):
                    raise ConfigError(
                        f"rules.{name}.metric={rule.metric}: {report.name} could not measure it: {reason}"
                    )
        stubs = Stubs.read(report.path)
        if stubs is None:
            return f"Not tested with known answers: {report.name} has no stubs."
        self.require_tested(stubs)
        known = {name: rule.of_each(name, stubs.scores).values() for name, rule in self.rules.items()}
        untested = [name for name, of in known.items() if not any(each.metric in stubs.scores for each in of)]
        if untested:
            logger.warning("rules=%s state=untested: no known-right and known-wrong answers", ",".join(untested))
        rest = f" Not tested: {', '.join(untested)}." if untested else ""
        return f"Tested with known-right and known-wrong models: {len(self.rules) - len(untested)} rules.{rest}"

    def _result(self, results: list[RuleResult]) -> Result:
        outcomes = {rule.outcome for rule in results}
        undecided = "inconclusive" in outcomes and self.inconclusive == "refuse"
        return "refuse" if "worse" in outcomes or undecided else "pass"


def _names(inputs: Inputs) -> dict[str, str]:
    """Name of a policy in rules -> its name in the reports: its own, and ``parent``, ``champion``, ``candidate``.

    Raises:
        ConfigError: the report does not measure one of the gate's input models.
    """
    policies = read_policies(inputs["report"].path)
    names = {name: name for name in policies}
    for slot, model in inputs.items():
        if model.kind != Kind.CHECKPOINT:
            continue
        found = [name for name, fingerprint in policies.items() if fingerprint == model.fingerprint]
        if not found:
            raise ConfigError(
                f"the gate's {slot} is {model.name}, and the report {inputs['report'].name} does not measure it; "
                f"it measures {', '.join(policies)}; add the model to that stage's inputs as a further policy"
            )
        names[slot] = found[0]
    return names


def _require_measured(inputs: Inputs) -> None:
    """Requires that each report measured the bytes of the models that are judged."""
    for report in (each for each in inputs.values() if each.kind == Kind.REPORT):
        policies, weights = read_policies(report.path), read_weights(report.path)
        for slot, model in inputs.items():
            judged = model.digest or model.fingerprint
            for name, fingerprint in policies.items():
                if fingerprint == model.fingerprint and weights.get(name, judged) != judged:
                    raise ArtifactError(
                        f"inputs.{slot}: {model.name} has the digest {short(judged)}, and {report.name} measured it as "
                        f"{name} with {short(weights[name])}: another checkpoint would be judged, and none is; a "
                        "report of the same bytes is accepted; run the evaluation again"
                    )


def _judged(model: Input) -> Judged:
    path = model.source.path if model.source else ""
    alias = path.removeprefix(ALIAS) if path.startswith(ALIAS) else None
    return Judged(name=model.name, fingerprint=model.fingerprint, digest=model.digest, alias=alias)


def _metrics(verdict: Verdict) -> dict[str, float]:
    """Number of rules by outcome, and the estimate of each rule."""
    outcomes = [rule.outcome for rule in verdict.rules]
    counts = {f"rules_{name}": float(outcomes.count(name)) for name in get_args(Outcome)}
    measured = {
        f"{rule.rule}/{key}": value
        for rule in verdict.rules
        for key in _OF_RULES
        if (value := getattr(rule, key)) is not None
    }
    return {"passed": float(verdict.result == "pass"), **counts, **measured}


def verdict_table(verdict: Verdict) -> str:
    """Markdown: the result, the compared models, a line per rule."""
    champion = f", champion {_model(verdict.champion)}" if verdict.champion else ""
    reports = f"{verdict.num_reports} reports" if verdict.num_reports > 1 else "one report"
    asked = " if a person approves it" if verdict.approval == "required" and verdict.result == "pass" else ""
    head = f"{verdict.result}{asked}: {_model(verdict.candidate)}{champion}"
    foot = f"Intervals have confidence {verdict.confidence:g}: paired bootstrap over rows, {reports}."
    if any(rule.against and rule.estimate is not None for rule in verdict.rules):
        foot += " Estimates with a sign are gains: below 0 the candidate is worse (of a perplexity, -0.1 is 10 %)."
    return f"{head}\n\n{table_of(_TITLES, [_row(rule) for rule in verdict.rules])}\n{foot}\n"


def _row(rule: RuleResult) -> list[str]:
    values = ["" if value is None else f"{value:.4g}" for value in (rule.candidate, rule.baseline)]
    outcome = rule.outcome if rule.candidate is not None or rule.outcome != "better" else "passes"  # without a champion
    return [rule.rule, rule.demand, outcome, *values, interval_text(rule)]


def _model(judged: Judged) -> str:
    named = f" (alias {judged.alias})" if judged.alias else ""
    return f"{judged.name}@{short(judged.fingerprint)}{named}"
