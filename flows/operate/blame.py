"""``posttrain blame``: the first stage whose model is worse than that of the predecessor, on the same rows."""

import graphlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from flows.declare.config import load_pipeline
from flows.declare.pipeline import Pipeline, Stage, listed
from flows.declare.store_root import asked_store
from flows.planning.aliases import Champion, artifact_as_source
from flows.planning.plan import Plan, make_plan
from flows.reports.diagnosis import read_diagnosis
from flows.reports.diff import cause_lines
from flows.run import run_one
from lineage.artifact import ALIAS, SOURCE, Kind, Source
from lineage.errors import ArtifactError, ConfigError
from lineage.fingerprint import short
from lineage.graph.ancestry import Graph, Node, ancestry
from lineage.graph.diff import Cause, diff, paired_nodes
from lineage.graph.index import Index, newest_where
from lineage.graph.refs import resolve
from lineage.markup import markdown_table
from lineage.record.verdict import RuleResult, interval_text
from tasks.evaluate.evaluate import Evaluate
from tasks.evaluate.row_scores import read_scores
from tasks.gate.bootstrap import Bootstrap
from tasks.gate.rule import Evidence, Rule

_BOOTSTRAP = Bootstrap(confidence=0.95, num_resamples=10_000, seed=0)  # the gate's defaults, as _MIN_ROWS
_MIN_ROWS = 20


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The two models of one stage: from the ancestry of the predecessor, and of the model under test."""

    before: Node
    after: Node

    @property
    def lost(self) -> Node | None:
        """A node whose output is no longer in the store; None: both are there."""
        return next((each for each in (self.before, self.after) if not _is_here(each)), None)


@dataclass(frozen=True, kw_only=True)
class Blame:
    """The result of ``blame``.

    Args:
        judged: pairs in the order of the graph, each with its result; None: an output is no longer in the store.
        first: the first stage whose model is worse; None: there is none.
        causes: differences of its two models, without those of ancestors that are not worse.
        report: the output of the evaluation.
    """

    metric: str
    before: str
    after: str
    judged: list[tuple[Pair, RuleResult | None]]
    first: str | None
    causes: list[Cause]
    report: Path | None

    def to_dict(self) -> dict[str, object]:
        """The object that ``blame --json`` prints."""
        return {
            "a": self.before, "b": self.after, "metric": self.metric, "first": self.first,
            "stages": [
                {"stage": pair.after.name, "a": pair.before.id, "b": pair.after.id, **(asdict(rule) if rule else {})}
                for pair, rule in self.judged
            ],
            "differences": [asdict(cause) for cause in self.causes],
            "report": str(self.report) if self.report else None,
        }  # fmt: skip

    def text(self) -> str:
        """The result as text."""
        lines = [f"A {self.before}", f"B {self.after}", ""]
        rows = [
            (
                pair.after.name, short(pair.before.fingerprint)[:8], short(pair.after.fingerprint)[:8],
                *(_number(value) for value in ((rule.baseline, rule.candidate) if rule else (None, None))),
                interval_text(rule) if rule else f"{pair.lost.id if pair.lost else ''} is no longer in the store",
            )
            for pair, rule in self.judged
        ]  # fmt: skip
        if rows:
            lines += [markdown_table(("stage", "A", "B", f"{self.metric} of A", "of B", "gain"), rows), ""]
        if self.first is None:
            return "\n".join([*lines, f"no stage's model is worse in {self.metric} beyond the noise of these rows"])
        lines.append(f"{self.first} is the first stage whose model is worse in {self.metric}; what differs there:")
        return "\n".join([*lines, *cause_lines(self.causes)])


def blame(
    ref: str,
    against: str | None,
    metric: str,
    overrides: Sequence[str],
    config_dir: Path | None,
    cli_args: Sequence[str],
) -> Blame:
    """Evaluates the models of both ancestries that differ, on the rows of the pipeline's evaluation; trains nothing.

    Args:
        against: REF of the predecessor; None: the previous model of an alias, else the previous model of that stage.
        overrides: after those of the run that produced the model.
        cli_args: arguments of the command, for the record.

    Raises:
        ConfigError: there is no predecessor, no evaluation, or no such metric.
        ArtifactError: the rows of the evaluation are not finished.
    """
    with Index(asked_store(overrides, config_dir)) as index:
        after = _model(resolve(ref, index).node, index)
        before = _model(resolve(against, index).node if against else _predecessor(ref, after, index), index)
        if before == after:
            raise ConfigError(f"{ref} and {against} are one artifact, {after}; name another with --against")
        left, right = ancestry(index, before), ancestry(index, after)
        pairs = list(_pairs(left, right))
        present = [pair for pair in pairs if pair.lost is None]
        rules, report = {}, None
        if present:
            plan, name = _plan(index.store, after, present, overrides, config_dir)
            report = _evaluated(plan, name, metric, cli_args)
            rules = {pair.after.id: rule for pair, rule in zip(present, _judged(report, metric, present), strict=True)}
        judged = [(pair, rules.get(pair.after.id)) for pair in pairs]
        worse = next((pair for pair, rule in judged if rule and rule.outcome == "worse"), None)
        causes = list(_causes(index, right, pairs, worse)) if worse else []
    return Blame(
        metric=metric, before=before, after=after, judged=judged, first=worse.after.name if worse else None,
        causes=causes, report=report,
    )  # fmt: skip


def _model(node: str, index: Index) -> str:
    found = index.artifact(node)
    if found is None or found.kind != Kind.CHECKPOINT:
        kind = found.kind if found else "no artifact"
        raise ConfigError(f"{node}: is {kind}, and blame compares models; name a checkpoint")
    return node


def _predecessor(ref: str, node: str, index: Index) -> str:
    """The previous model of the given alias, or of an alias of the model; else the stage's previous model."""
    for alias, owners in index.alias_history.items():
        if (ref == ALIAS + alias or not ref.startswith(ALIAS)) and node in owners:
            last = max(place for place, each in enumerate(owners) if each == node)
            earlier = [each for each in owners[:last] if each != node]
            if earlier:
                return earlier[-1]
    found = index.artifact(node)
    assert found
    made = next(iter(index.artifacts(newest_where(f"end < {found.end!r}"), found.pipeline, found.stage)), None)
    if made is None:
        raise ConfigError(f"{ref}: no alias had a model before, and {found.stage} made none; name it with --against")
    return made.id


def _pairs(left: Graph, right: Graph) -> Iterator[Pair]:
    """Corresponding models that differ, parents first."""
    above = {node: [edge.parent for edge in right.parents(node)] for node in right.nodes}
    others = {after: before for before, after in paired_nodes(left, right)}
    for node in graphlib.TopologicalSorter(above).static_order():
        if node in others and node != others[node]:
            pair = Pair(before=left.nodes[others[node]], after=right.nodes[node])
            made = [each.manifest for each in (pair.before, pair.after)]
            if all(manifest and manifest.produces == Kind.CHECKPOINT for manifest in made):
                yield pair


def _is_here(node: Node) -> bool:
    return bool(node.manifest and node.entry and not node.manifest.missing(node.entry.output))


def _slot(node: Node) -> str:
    return f"{node.name}-{short(node.fingerprint)[:8]}"


def _plan(
    store: Path, after: str, pairs: Sequence[Pair], overrides: Sequence[str], config_dir: Path | None
) -> tuple[Plan, str]:
    """The plan of the run that produced a model with an evaluation of these models; and the evaluation's name."""
    recorded, folder = read_diagnosis(after, store).cli_args()
    pipeline = load_pipeline([*recorded, *overrides], config_dir or (Path(folder) if folder else None))
    name, stage = _evaluation(pipeline, after.rpartition("@")[0])
    placed: dict[str, Champion] = {}
    for node in (each for pair in pairs for each in (pair.before, pair.after)):
        assert node.entry and node.manifest
        source = Source(path=str(node.entry.output), kind=Kind.CHECKPOINT)
        placed[_slot(node)] = artifact_as_source(source, node.entry, node.manifest)
    own = {slot: ref for slot, ref in stage.inputs.items() if slot in stage.method.consumes}
    blamed = replace(stage, inputs={**own, **{slot: SOURCE + slot for slot in placed}})
    sources = {**pipeline.sources, **{slot: each.pinned.source for slot, each in placed.items()}}
    name = f"{name}-blame"
    return make_plan(replace(pipeline, sources=sources, stages={**pipeline.stages, name: blamed}), placed=placed), name


def _evaluation(pipeline: Pipeline, model: str) -> tuple[str, Stage]:
    """A stage that evaluates the model, or else any evaluation."""
    found = [
        (model not in stage.inputs.values(), name, stage)
        for name, stage in pipeline.stages.items()
        if stage.method.produces == Kind.REPORT and stage.method.consumes.get("*") == Kind.CHECKPOINT
    ]
    if not found:
        raise ConfigError(
            f"pipeline {pipeline.name} has no stage that evaluates models; add one (conf/stage/evaluate.yaml), or "
            "name a pipeline that has one: pipeline=NAME"
        )
    _, name, stage = min(found, key=lambda each: each[0])
    return name, stage


def _evaluated(plan: Plan, name: str, metric: str, cli_args: Sequence[str]) -> Path:
    """The report of the evaluation, which runs unless it is finished."""
    planned = plan.stage(name)
    method = planned.stage.method
    known = method.policy_metrics(planned.stage.inputs) if isinstance(method, Evaluate) else (metric,)
    if metric not in known:
        measured = listed(metric, known)
        raise ConfigError(f"--metric {metric}: {name} does not measure it; it measures {measured}")
    for upstream in planned.upstream:
        found = plan.stage(upstream)
        if found.state != "reuse":
            raise ArtifactError(
                f"{name} reads {upstream}, which is not finished ({found.reason}), and blame runs nothing but the "
                "evaluation; run the pipeline first, or give the overrides of the run that made the model"
            )
    if planned.state != "reuse":
        run_one(plan, name, cli_args, command="blame")
    return plan.entry(planned).output


def _judged(report: Path, metric: str, pairs: Sequence[Pair]) -> list[RuleResult]:
    """Compares each model with that of the predecessor, by the paired bootstrap of the gate."""
    scores = read_scores(report)
    if metric not in scores:
        raise ConfigError(f"--metric {metric}: {report} has no scores of it; it has {', '.join(sorted(scores))}")
    evidence = Evidence(reports=[scores], names={}, has_champion=False, bootstrap=_BOOTSTRAP, min_rows=_MIN_ROWS)
    rules = [
        Rule(metric=metric, policy=_slot(pair.after), against=_slot(pair.before), max_regression=0.0) for pair in pairs
    ]
    return [rule.judge(pair.after.name, evidence) for rule, pair in zip(rules, pairs, strict=True)]


def _causes(index: Index, right: Graph, pairs: Sequence[Pair], worse: Pair) -> Iterator[Cause]:
    """Differences of two models, without those of ancestors that are not worse."""
    cleared: set[str] = set()
    for pair in pairs[: pairs.index(worse)]:
        cleared |= {right.nodes[node].name for node in right.toward(pair.after.id)}
    own = {right.nodes[node].name for node in right.toward(worse.after.id)} - cleared
    found = diff(index, worse.before.id, worse.after.id).causes
    yield from [each for each in found if own & set(each.stages)] or found


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
