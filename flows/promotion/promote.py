"""Promotion and rollback of an alias, subject to the newest verdicts and to licences."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from flows.declare.config import load_pipeline
from flows.declare.pipeline import Pipeline
from flows.planning.plan import Plan
from flows.planning.verdicts import Judgement, judgements, refusals
from lineage.artifact import DATA, MODELS, SOURCE, Kind
from lineage.errors import ArtifactError, ConfigError, GateError, PipelineError
from lineage.filesystem.digest import DigestCache
from lineage.fingerprint import short
from lineage.graph.ancestry import Graph, ancestry
from lineage.graph.index import Index
from lineage.graph.places import Indexed, node_key
from lineage.graph.refs import resolve
from lineage.promotions import Event, append, decision, locked, read_events, stacks
from lineage.record.labels import Statement, record_labels, who
from lineage.record.verdict import CHAMPION, VERDICT_TABLE, Verdict, interval_text, read_verdict
from lineage.source.sources import is_unchanged
from lineage.store import Entry, Manifest, Store
from tasks.gate import Gate
from tasks.gate.rule import Rule

_FORCE = "or promote with --force, which is recorded"


@dataclass(frozen=True, kw_only=True)
class Passed:
    """What lets a model be promoted.

    Args:
        verdict: fingerprint of the newest verdict; None: the promotion is forced.
        rules: ``gate@digits RULE: demand`` of each rule that it passed.
        eased: the same of each rule by which an earlier verdict refused it, and that is gone or less strict now.
    """

    verdict: str | None = None
    rules: list[str] = field(default_factory=list)
    eased: list[str] = field(default_factory=list)


def require_verdict(
    index: Index, model: Manifest, alias: str, events: Sequence[Event], pipeline: Pipeline, *, force: bool
) -> Passed:
    """The newest verdicts, if they allow a promotion.

    Raises:
        GateError: unless forced: there is no verdict, a gate refuses or has compared with another champion, or passes
            by easier rules than are declared what it refused before, or a person has rejected the model.
    """
    rules: list[str] = []
    eased: list[str] = []
    try:
        judges = _judges(index, model)
        _refuse_rejected(index, judges, model, events)
        newest = _newest_of_each_gate(index, judges, model)
        for found, verdict in newest:
            if reason := other_champion(verdict, found.id, alias, events):
                again = f"posttrain run of pipeline {found.pipeline}, its champion source at that alias, compares again"
                raise GateError(f"{reason}; {again}, {_FORCE}")
            _require_pass(index, found, verdict, events)
            rules += [f"{found.id} {rule.rule}: {rule.demand}" for rule in verdict.rules]
            eased += (easier := _eased(index, judges, found, model))
            if easier and not _is_declared(index, found, pipeline):
                raise GateError(
                    f"{found.id} passes {verdict.candidate.name} only since rules by which it was refused are gone or "
                    f"less strict: {'; '.join(easier)}; the file of pipeline={found.pipeline} does not declare "
                    "the new rules (read with the overrides of promote, but those of stages); declare them there, "
                    f"{_FORCE}"
                )
    except GateError:
        if force:
            return Passed()
        raise
    return Passed(verdict=newest[0][0].fingerprint, rules=rules, eased=eased)


def _eased(index: Index, judges: Sequence[Indexed], found: Indexed, model: Manifest) -> list[str]:
    """By which rules earlier verdicts of this gate refused the model that this one lacks, or has less strict."""
    now = _gate(index, found)
    eased: dict[str, str] = {}
    for other in judges:
        if (other.pipeline, other.stage) != (found.pipeline, found.stage) or other.end >= found.end:
            continue
        verdict, before = _verdict_on(index, other, model), _gate(index, other)
        if verdict is None or verdict.result != "refuse" or now is None or before is None:
            continue
        for rule in verdict.rules:
            decided = rule.outcome == "worse" or (rule.outcome == "inconclusive" and before.inconclusive == "refuse")
            if decided and not now.asks_as_much(before, rule.rule.partition("/")[0]):
                eased.setdefault(rule.rule, f"{other.id} {rule.rule}: {rule.demand}")
    return list(eased.values())


def _gate(index: Index, verdict: Indexed) -> Gate | None:
    """The gate of a verdict, by what its manifest has of it; None: it is a method of the user's own."""
    manifest = index.entry(verdict.id).manifest()
    recipe = json.loads(json.dumps(manifest.recipe if manifest else {}))
    if recipe.get("method") != Gate.name():
        return None
    rules = {name: Rule(**rule) for name, rule in recipe["rules"].items()}
    return Gate(rules=rules, inconclusive=recipe["inconclusive"], confidence=recipe["confidence"])


def _is_declared(index: Index, found: Indexed, pipeline: Pipeline) -> bool:
    """Whether its pipeline's file has the rules of a verdict now, without what a command overrode of stages."""
    kept = [each for each in pipeline.overrides or () if not each.lstrip("~+").startswith(("stage", "pipeline="))]
    try:
        stage = load_pipeline([f"pipeline={found.pipeline}", *kept], pipeline.config_dir).stages.get(found.stage)
    except ConfigError:  # it has no such file
        return False
    judged, method = _gate(index, found), stage.method if stage else None
    if judged is None or not isinstance(method, Gate):
        return False
    return all(
        method.asks_as_much(judged, name) and judged.asks_as_much(method, name)
        for name in {**method.rules, **judged.rules}
    )


def _judges(index: Index, model: Manifest) -> list[Indexed]:
    """All verdicts that read these weights, as candidate or for comparison, newest first."""
    children = {child for node in index.with_prefix(short(model.fingerprint)) for child, _ in index.children(node)}
    found = [each for each in map(index.artifact, children) if each and each.kind == Kind.VERDICT]
    return sorted(found, key=lambda each: each.end, reverse=True)


def _verdict_on(index: Index, found: Indexed, model: Manifest) -> Verdict | None:
    """The verdict, if exactly this model (same bytes) was its candidate; else None."""
    verdict = read_verdict(index.entry(found.id).output)
    judged = (verdict.candidate.fingerprint, verdict.candidate.digest)
    return verdict if judged == (model.fingerprint, model.output_digest) else None


def _newest_of_each_gate(index: Index, judges: Sequence[Indexed], model: Manifest) -> list[tuple[Indexed, Verdict]]:
    """The newest verdict of each gate on the model: all of them must pass."""
    newest: dict[tuple[str, str], tuple[Indexed, Verdict]] = {}
    for found in judges:
        gate = (found.pipeline, found.stage)
        verdict = None if gate in newest else _verdict_on(index, found, model)
        if verdict:
            newest[gate] = (found, verdict)
    if not newest:
        raise GateError(
            f"{model.stage}@{short(model.fingerprint)}: no gate has judged it as it is now; run a pipeline whose gate "
            f"has it as candidate (posttrain run pipeline=cpt-sft-dpo-gated), {_FORCE}"
        )
    return list(newest.values())


def _refuse_rejected(index: Index, judges: Sequence[Indexed], model: Manifest, events: Sequence[Event]) -> None:
    """Refuses a model that a person rejected, until a person approves it, whatever other gates say."""
    known = {found.fingerprint: found for found in judges}
    decided = [event for event in events if event.action in ("approve", "reject") and event.fingerprint in known]
    of_model = [event for event in decided if _verdict_on(index, known[event.fingerprint], model)]
    if of_model and of_model[-1].action == "reject":
        raise GateError(
            f"{model.stage}@{short(model.fingerprint)} was rejected by {of_model[-1].who}: {of_model[-1].why}; run "
            f"with gate.approval=required to be asked again, {_FORCE}"
        )


def other_champion(verdict: Verdict, gate: str, alias: str, events: Sequence[Event]) -> str | None:
    """Why a verdict does not apply: it compared with another model than the one to be replaced; None: it applies.

    Args:
        gate: node of the verdict.
    """
    if not verdict.rests_on_champion:
        return None
    compared, candidate = verdict.champion, verdict.candidate
    # A verdict without a champion does not record the alias that it would have compared with.
    aliases = [compared.alias] if compared and compared.alias else [alias, CHAMPION]
    moves = [each for name in aliases for each in stacks(events).get(name, [])]
    held = [each for each in moves if each.fingerprint != candidate.fingerprint]  # it is not compared with itself
    now = held[-1] if held else None
    if (now.fingerprint if now else None) == (compared.fingerprint if compared else None):
        return None
    then_name = f"{compared.name}@{short(compared.fingerprint)}" if compared else "no champion"
    now_name = node_key(now.stage or "", now.fingerprint) if now else "no other model"
    name = now.alias if now else alias
    return f"{gate} compared {candidate.name} with {then_name}, and alias {name} names {now_name} now"


def _require_pass(index: Index, found: Indexed, verdict: Verdict, events: Sequence[Event]) -> None:
    entry = index.entry(found.id)
    manifest = entry.require_intact()
    if verdict.result == "refuse":
        rules = "\n".join(f"  {line}" for line in verdict.complaints())
        table = entry.output / VERDICT_TABLE
        raise GateError(f"{found.id} refuses {verdict.candidate.name}:\n{rules}\nthe evidence is in {table}; {_FORCE}")
    decided = decision(events, manifest.fingerprint, manifest.output_digest)
    if verdict.approval == "required" and (decided is None or decided.action != "approve"):
        state = f"rejected by {decided.who}" if decided else "not given yet"
        raise GateError(
            f"{found.id} demands a person's approval, which is {state}; posttrain run of that pipeline asks, {_FORCE}"
        )


def outcome(
    plan: Plan, before: str | None, after: str | None, kept: str, error: PipelineError | None
) -> tuple[str, str]:
    """Subject and text of the notification on a run.

    Args:
        before, after: the model of the alias of ``retrain`` before and after the run.
        kept: why the alias did not move.
        error: why the run failed.
    """
    name, retrain = plan.pipeline.name, plan.pipeline.operation.retrain
    sentences = [*_data(plan), *_models(plan)]
    if error:
        sentences.append(f"The run failed: {error}")
    else:
        sentences += [_verdict(each) for each in judgements(plan)]
    if retrain:
        sentences.append(_champion(retrain.alias, before, after, kept))
    end = "failed" if error else _end(plan, moved=before != after)
    return f"{name}: {end}", " ".join(" ".join([f"{name}:", *sentences]).split())


def _end(plan: Plan, *, moved: bool) -> str:
    retrain = plan.pipeline.operation.retrain
    if moved and retrain:
        return f"{retrain.promote} is the new {retrain.alias}"
    return "refused" if refusals(plan) else "done"


def _data(plan: Plan) -> Iterator[str]:
    """``New rows: corpus 12 (and 5 replayed).``, or ``Rows: ...`` for data without replay."""
    found = {}
    for planned in plan.stages:
        manifest = plan.entry(planned).manifest() if planned.stage.method.produces in DATA else None
        if manifest and "rows" in manifest.metrics:
            found[planned.name] = manifest.metrics
    new = [name for name, metrics in found.items() if "new_rows" in metrics]
    if new:
        replayed = {name: f" (and {count:g} replayed)" for name in new if (count := found[name]["replayed_rows"])}
        counts = [f"{name} {found[name]['new_rows']:g}{replayed.get(name, '')}" for name in new]
        yield f"New rows: {', '.join(counts)}."
    whole = [f"{name} {metrics['rows']:g}" for name, metrics in found.items() if name not in new]
    if whole:
        yield f"Rows: {', '.join(whole)}."


def _models(plan: Plan) -> Iterator[str]:
    """``New models: cpt, sft, dpo, from dpo@0123456789abcdef.``"""
    made = [each for each in plan.stale if each.stage.method.produces in MODELS and plan.entry(each).is_finished()]
    starts = {
        node_key(each.entry.path.parent.name, each.fingerprint)
        for planned in made
        for each in planned.inputs.values()
        if each.entry and each.source and each.source.kind == Kind.CHECKPOINT
    }
    if made:
        origin = f", from {', '.join(sorted(starts))}" if starts else ""
        yield f"New models: {', '.join(planned.name for planned in made)}{origin}."


def _verdict(judged: Judgement) -> str:
    verdict = judged.verdict
    verb = "refuses" if judged.refusal() else "passes"
    model = node_key(verdict.candidate.name, verdict.candidate.fingerprint)
    figures = "; ".join(f"{rule.rule} {rule.outcome}, {interval_text(rule)}" for rule in verdict.rules)
    return f"{judged.gate} {verb} {model}: {figures}."


def _champion(alias: str, before: str | None, after: str | None, kept: str) -> str:
    if before != after:
        return f"Alias {alias}: {after}, before it {before or 'none'}."
    why = f": {kept}" if kept else ""
    return f"Alias {alias} stays with {after}{why}." if after else f"Alias {alias} is not set yet{why}."


_ALIAS = re.compile(r"(?!latest$|v\d+$)[A-Za-z0-9_-]+")  # a subset of what MLflow accepts


@dataclass(frozen=True, kw_only=True)
class Moved:
    """The result of moving an alias.

    Args:
        event: the recorded event; None: the alias named that model already.
        before: the promotion of the previous model.
    """

    alias: str
    entry: Entry
    manifest: Manifest
    event: Event | None
    before: Event | None


def promote(pipeline: Pipeline, ref: str, alias: str, *, why: str, force: bool) -> Moved:
    """Points an alias to a model whose newest verdicts pass.

    Args:
        force: promotes without such a verdict, which is recorded; damage and licences are checked all the same.

    Raises:
        ConfigError: ``ref`` names no model, or ``alias`` is not a valid name.
        ArtifactError: the model or its verdict was modified.
        GateError: no verdict lets it pass, or a licence forbids it.
    """
    if not _ALIAS.fullmatch(alias):
        raise ConfigError(
            f"--alias {alias}: is not a name for an alias; letters, digits, '_' and '-' are accepted, and neither "
            "'latest' nor 'v1'"
        )
    with Index(pipeline.store) as index:
        found = resolve(ref, index)
        if found.entry is None:
            raise ConfigError(f"{ref} is the source {found.node}; an alias names a model that a stage produced")
        manifest = found.entry.require_intact()
        if manifest.produces not in (*MODELS, None):  # None: an old manifest without the kind
            raise ConfigError(f"{ref} is {found.node}, which is {manifest.produces}; an alias names a model")
        with locked(pipeline.store):
            # Checked again: reading every byte took time, and under this lock gc deletes nothing.
            if not found.entry.is_finished():
                raise ArtifactError(f"{found.entry.path}: was deleted or damaged meanwhile; run its pipeline again")
            events = read_events(pipeline.store)
            commercial = _is_commercial(pipeline, alias, events)
            labels = _permitted(pipeline, index, found.node, alias, commercial=commercial)
            before = next(reversed(stacks(events).get(alias, [])), None)
            if before and _is_of(before, manifest):
                return Moved(alias=alias, entry=found.entry, manifest=manifest, event=None, before=before)
            passed = require_verdict(index, manifest, alias, events, pipeline, force=force)
            event = Event(
                action="promote", alias=alias, fingerprint=manifest.fingerprint, digest=manifest.output_digest,
                stage=manifest.stage, who=who(), why=why, verdict=passed.verdict, forced=passed.verdict is None,
                labels=labels, commercial=commercial, rules=passed.rules, eased=passed.eased,
            )  # fmt: skip
            append(pipeline.store, event)
    return Moved(alias=alias, entry=found.entry, manifest=manifest, event=event, before=before)


def roll_back(pipeline: Pipeline, alias: str, *, why: str) -> Moved:
    """Points an alias back to its previous model.

    Raises:
        ConfigError: there is no previous model.
        ArtifactError: that model was modified.
        GateError: its licence forbids it now.
    """
    with Index(pipeline.store) as index, locked(pipeline.store):
        events = read_events(pipeline.store)
        stack = stacks(events).get(alias, [])
        if len(stack) < 2:
            found = f"{stack[0].stage}@{short(stack[0].fingerprint)} is its first" if stack else "it is not set"
            raise ConfigError(f"--alias {alias}: there is no previous model: {found}; see posttrain promote")
        before, back = stack[-1], stack[-2]
        assert back.stage is not None
        entry = Store(pipeline.store).entry(back.stage, back.fingerprint)
        manifest = entry.require_intact()
        commercial = _is_commercial(pipeline, alias, events)
        labels = _permitted(pipeline, index, node_key(back.stage, back.fingerprint), alias, commercial=commercial)
        event = Event(
            action="rollback", alias=alias, fingerprint=manifest.fingerprint, digest=manifest.output_digest,
            stage=manifest.stage, who=who(), why=why, verdict=back.verdict, forced=back.forced, labels=labels,
            commercial=commercial,
        )  # fmt: skip
        append(pipeline.store, event)
    return Moved(alias=alias, entry=entry, manifest=manifest, event=event, before=before)


def _is_commercial(pipeline: Pipeline, alias: str, events: Sequence[Event]) -> bool:
    """As configured, or else as recorded at the last move of the alias."""
    if alias in pipeline.aliases:
        return pipeline.aliases[alias].commercial
    moves = [event for event in events if event.alias == alias]
    return bool(moves) and moves[-1].commercial


def _permitted(pipeline: Pipeline, index: Index, node: str, alias: str, *, commercial: bool) -> list[str]:
    """The labels of a model's ancestry, after checking that its licences permit the alias.

    Configured labels are kept for the bytes that the source has now. Of other bytes they count for this move alone.
    """
    graph = ancestry(index, node)
    configured = {name: source.labels for name, source in pipeline.sources.items()}
    cache = DigestCache(pipeline.store / "digests.json")
    record_labels(
        pipeline.store,
        [
            Statement(fingerprint=each.fingerprint, source=name, labels=list(own))
            for each in graph.nodes.values()
            if (own := configured.get(name := each.name.removeprefix(SOURCE))) and not each.labels.issuperset(own)
            if each.entry is None and is_unchanged(name, pipeline.sources[name], each.fingerprint, cache)
        ],
    )
    labels = all_labels(graph, configured)
    if commercial:
        require_commercial(graph, labels, pipeline.non_commercial_labels, alias)
    return sorted(set().union(*labels.values()))


def _is_of(event: Event, manifest: Manifest) -> bool:
    wanted = (manifest.stage, manifest.fingerprint, manifest.output_digest)
    return (event.stage, event.fingerprint, event.digest) == wanted


def all_labels(graph: Graph, configured: Mapping[str, Iterable[str]]) -> dict[str, set[str]]:
    """Node of a source -> its labels, recorded in any manifest or configured now.

    Configured labels also apply to the same bytes under another name.

    Args:
        configured: name of a source -> its labels in the configuration.
    """
    sources = [node for node in graph.nodes.values() if node.entry is None]
    now: dict[str, set[str]] = {}
    for node in sources:
        now.setdefault(short(node.fingerprint), set()).update(configured.get(node.name.removeprefix(SOURCE), ()))
    return {node.id: node.labels | now[short(node.fingerprint)] for node in sources}


def require_commercial(graph: Graph, labels: Mapping[str, set[str]], patterns: Sequence[str], alias: str) -> None:
    """Refuses a model with a non-commercial label in its ancestry.

    Raises:
        GateError: names the label and the path from the source to the model; or the missing input.
    """
    # A champion inherits labels: name the original sources first.
    for source, found in sorted(labels.items(), key=lambda item: bool(graph.parents(item[0]))):
        for label in sorted(found):
            if any(fnmatchcase(label.lower(), pattern.lower()) for pattern in patterns):
                way = " -> ".join(graph.path(source, graph.root))
                raise GateError(
                    f"alias {alias} is commercial, and {source} has the label {label}: {way}; "
                    "give it a model that was trained without that source (posttrain impact "
                    f"label:{label} says what that costs)"
                )
    for node in graph.nodes.values():
        if node.entry and node.manifest is None:
            way = " -> ".join(graph.path(node.id, graph.root))
            raise GateError(
                f"alias {alias} is commercial, and the ancestry of {node.id} is unknown: "
                f"{node.entry.path} is not in the store: {way}; restore it, or train the model again"
            )
