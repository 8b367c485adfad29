"""Promotion and rollback of an alias, behind the newest verdict of the gate."""

import getpass
import re
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from flows.declare.pipeline import Pipeline
from flows.planning.plan import Plan
from flows.planning.verdicts import Judgement, judgements
from lineage.artifact import DATA, MODELS, SOURCE, Kind
from lineage.errors import ArtifactError, ConfigError, GateError, PipelineError
from lineage.fingerprint import short
from lineage.graph.ancestry import Graph, ancestry
from lineage.graph.index import Index
from lineage.graph.places import Indexed, node_key
from lineage.graph.refs import resolve
from lineage.manifest import Manifest
from lineage.promotions import Event, append, decision, locked, read_events, stacks
from lineage.store import Entry, Store
from lineage.verdict import CHAMPION, VERDICT_TABLE, Verdict, interval_text, read_verdict

_FORCE = "or promote with --force, which is recorded"


def require_verdict(index: Index, model: Manifest, alias: str, events: Sequence[Event], *, force: bool) -> str | None:
    """Fingerprint of the newest of the passing verdicts that a promotion rests on; None: it is forced.

    Raises:
        GateError: there is none, a gate refuses or has not met today's champion, or a person has rejected the model;
            and it is not forced.
    """
    try:
        judges = _judges(index, model)
        _refuse_rejected(index, judges, model, events)
        newest = _newest_of_each_gate(index, judges, model)
        for found, verdict in newest:
            _require_current(index, found, verdict, alias, events)
            _require_pass(index, found, verdict, events)
    except GateError:
        if force:
            return None
        raise
    return newest[0][0].fingerprint


def _judges(index: Index, model: Manifest) -> list[Indexed]:
    """Every verdict that read these weights, as candidate or for comparison, the newest first."""
    children = {child for node in index.with_prefix(short(model.fingerprint)) for child, _ in index.children(node)}
    found = [each for each in map(index.artifact, children) if each and each.kind == Kind.VERDICT]
    return sorted(found, key=lambda each: each.end, reverse=True)


def _verdict_on(index: Index, found: Indexed, model: Manifest) -> Verdict | None:
    """None: another model was the candidate, or other bytes of this one."""
    verdict = read_verdict(index.entry(found.id).output)
    judged = (verdict.candidate.fingerprint, verdict.candidate.digest)
    return verdict if judged == (model.fingerprint, model.output_digest) else None


def _newest_of_each_gate(index: Index, judges: Sequence[Indexed], model: Manifest) -> list[tuple[Indexed, Verdict]]:
    """Every gate has a say: which one ended last is chance."""
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
    """A person's no stands until a person says yes, whatever gate the model is sent through next."""
    known = {found.fingerprint: found for found in judges}
    said = [event for event in events if event.action in ("approve", "reject") and event.fingerprint in known]
    of_model = [event for event in said if _verdict_on(index, known[event.fingerprint], model)]
    if of_model and of_model[-1].action == "reject":
        raise GateError(
            f"{model.stage}@{short(model.fingerprint)} was rejected by {of_model[-1].who}: {of_model[-1].why}; run "
            f"with gate.approval=required to be asked again, {_FORCE}"
        )


def _require_current(index: Index, found: Indexed, verdict: Verdict, alias: str, events: Sequence[Event]) -> None:
    """That the verdict compared with the model that would be replaced."""
    reason = _other_champion(index, found, verdict, alias, events)
    if reason:
        raise GateError(f"{reason}; posttrain run of pipeline {found.pipeline} compares anew, {_FORCE}")


def _other_champion(index: Index, found: Indexed, verdict: Verdict, alias: str, events: Sequence[Event]) -> str | None:
    """Why a verdict says nothing of the model that would be replaced: it compared with another one."""
    if not verdict.rests_on_champion:
        return None
    compared = verdict.champion
    # Where nothing was compared yet, the verdict does not say which alias it would have been.
    aliases = [compared.alias] if compared and compared.alias else [alias, CHAMPION]
    own = _made_with(ancestry(index, found.id))
    moves = [each for name in aliases for each in stacks(events).get(name, [])]
    held = [each for each in moves if node_key(each.stage or "", each.fingerprint) not in own]
    now = held[-1] if held else None
    if (now.fingerprint if now else None) == (compared.fingerprint if compared else None):
        return None
    then_name = f"{compared.name}@{short(compared.fingerprint)}" if compared else "no champion"
    now_name = node_key(now.stage or "", now.fingerprint) if now else "no other model"
    name = now.alias if now else alias
    return f"{found.id} compared {verdict.candidate.name} with {then_name}, and alias {name} names {now_name} now"


def _require_pass(index: Index, found: Indexed, verdict: Verdict, events: Sequence[Event]) -> None:
    entry = index.entry(found.id)
    manifest = entry.require_intact()
    if verdict.result == "refuse":
        rules = "\n".join(f"  {line}" for line in verdict.complaints())
        table = entry.output / VERDICT_TABLE
        raise GateError(f"{found.id} refuses {verdict.candidate.name}:\n{rules}\nthe evidence is in {table}; {_FORCE}")
    said = decision(events, manifest.fingerprint, manifest.output_digest)
    if verdict.approval == "required" and (said is None or said.action != "approve"):
        state = f"rejected by {said.who}" if said else "not given yet"
        raise GateError(
            f"{found.id} demands a person's approval, which is {state}; posttrain run of that pipeline asks, {_FORCE}"
        )


def _made_with(graph: Graph) -> set[str]:
    """The stages of the verdict's own plan: all that is reached without passing through a source."""
    found: set[str] = set()
    waiting = [graph.root]
    while waiting:
        node = waiting.pop()
        found.add(node)
        parents = {edge.parent for edge in graph.parents(node) if not edge.parent.startswith(SOURCE)}
        waiting += parents - found
    return found


def outcome(
    plan: Plan, before: str | None, after: str | None, kept: str, error: PipelineError | None
) -> tuple[str, str]:
    """Subject and paragraph.

    Args:
        before, after: who held and who holds the alias that ``retrain`` gives.
        kept: why it did not move.
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
    return "refused" if any(each.refusal() for each in judgements(plan)) else "done"


def _data(plan: Plan) -> Iterator[str]:
    """``New rows: corpus 12 (and 5 replayed).``; where nothing is replayed, all rows count."""
    found = {}
    for planned in plan.stages:
        manifest = plan.entry(planned).manifest() if planned.stage.method.produces in DATA else None
        if manifest and "rows" in manifest.metrics:
            found[planned.name] = manifest.metrics
    new = [name for name, metrics in found.items() if "new_rows" in metrics]
    if new:
        counts = [f"{name} {found[name]['new_rows']:g}{_replayed(found[name]['replayed_rows'])}" for name in new]
        yield f"New rows: {', '.join(counts)}."
    whole = [f"{name} {metrics['rows']:g}" for name, metrics in found.items() if name not in new]
    if whole:
        yield f"Rows: {', '.join(whole)}."


def _replayed(count: float) -> str:
    return f" (and {count:g} replayed)" if count else ""


def _models(plan: Plan) -> Iterator[str]:
    """``New models: cpt, sft, dpo, from dpo@0123456789abcdef.``"""
    made = [each for each in plan.stale if each.stage.method.produces in MODELS and plan.entry(each).is_finished()]
    starts = {
        node_key(given.entry.path.parent.name, given.fingerprint)
        for planned in made
        for given in planned.inputs.values()
        if given.entry and given.source and given.source.kind == Kind.CHECKPOINT
    }
    if made:
        origin = f", from {', '.join(sorted(starts))}" if starts else ""
        yield f"New models: {', '.join(planned.name for planned in made)}{origin}."


def _verdict(judged: Judgement) -> str:
    verdict = judged.verdict
    said = "refuses" if judged.refusal() else "passes"
    model = node_key(verdict.candidate.name, verdict.candidate.fingerprint)
    figures = "; ".join(f"{rule.rule} {rule.outcome}, {interval_text(rule)}" for rule in verdict.rules)
    return f"{judged.gate} {said} {model}: {figures}."


def _champion(alias: str, before: str | None, after: str | None, kept: str) -> str:
    if before != after:
        return f"Alias {alias}: {after}, before it {before or 'nobody'}."
    why = f": {kept}" if kept else ""
    return f"Alias {alias} stays with {after}{why}." if after else f"Nobody has alias {alias} yet{why}."


_ALIAS = re.compile(r"(?!latest$|v\d+$)[A-Za-z0-9_-]+")  # what MLflow accepts too


@dataclass(frozen=True, kw_only=True)
class Moved:
    """What became of an alias.

    Args:
        event: None: the alias names that model already.
        before: the promotion of the holder until now.
    """

    alias: str
    entry: Entry
    manifest: Manifest
    event: Event | None
    before: Event | None


def promote(pipeline: Pipeline, ref: str, alias: str, *, why: str, force: bool) -> Moved:
    """Gives an alias to a model whose newest verdict passes.

    Args:
        force: promotes without such a verdict, and is recorded; no damage and no licence is passed over.

    Raises:
        ConfigError: ``ref`` names no model, or ``alias`` is no name for an alias.
        ArtifactError: the model, or its verdict, is not what was committed.
        GateError: no verdict lets it pass, or a licence forbids it.
    """
    if not _ALIAS.fullmatch(alias):
        raise ConfigError(
            f"--alias {alias}: is no name for an alias; letters, digits, '_' and '-' are accepted, and neither "
            "'latest' nor 'v1'"
        )
    with Index(pipeline.store) as index:
        found = resolve(ref, index)
        if found.entry is None:
            raise ConfigError(f"{ref} is the source {found.node}; an alias names a model that a stage made")
        manifest = found.entry.require_intact()
        if manifest.produces not in (*MODELS, None):  # None: recorded before manifests said what they are of
            raise ConfigError(f"{ref} is {found.node}, which is {manifest.produces}; an alias names a model")
        with locked(pipeline.store):
            if not found.entry.is_finished():  # reading every byte took its time; under this lock nothing is freed
                raise ArtifactError(f"{found.entry.path}: was freed or damaged meanwhile; run its pipeline again")
            events = read_events(pipeline.store)
            commercial = _is_commercial(pipeline, alias, events)
            labels = _permitted(pipeline, index, found.node, alias, commercial=commercial)
            before = next(reversed(stacks(events).get(alias, [])), None)
            if before and _is_of(before, manifest):
                return Moved(alias=alias, entry=found.entry, manifest=manifest, event=None, before=before)
            verdict = require_verdict(index, manifest, alias, events, force=force)
            event = Event(
                action="promote", alias=alias, fingerprint=manifest.fingerprint, digest=manifest.output_digest,
                stage=manifest.stage, who=_who(), why=why, verdict=verdict, forced=force and verdict is None,
                labels=labels, commercial=commercial,
            )  # fmt: skip
            append(pipeline.store, event)
    return Moved(alias=alias, entry=found.entry, manifest=manifest, event=event, before=before)


def roll_back(pipeline: Pipeline, alias: str, *, why: str) -> Moved:
    """Gives an alias back to its holder before.

    Raises:
        ConfigError: there is none.
        ArtifactError: that model is not what was committed.
        GateError: its licence forbids it by now.
    """
    with Index(pipeline.store) as index, locked(pipeline.store):
        events = read_events(pipeline.store)
        stack = stacks(events).get(alias, [])
        if len(stack) < 2:
            found = f"{stack[0].stage}@{short(stack[0].fingerprint)} is its first" if stack else "no model holds it"
            raise ConfigError(f"--alias {alias}: there is no holder to go back to: {found}; see posttrain promote")
        before, back = stack[-1], stack[-2]
        assert back.stage is not None  # a promotion says whose output it is
        entry = Store(pipeline.store).entry(back.stage, back.fingerprint)
        manifest = entry.require_intact()
        commercial = _is_commercial(pipeline, alias, events)
        labels = _permitted(pipeline, index, node_key(back.stage, back.fingerprint), alias, commercial=commercial)
        event = Event(
            action="rollback", alias=alias, fingerprint=manifest.fingerprint, digest=manifest.output_digest,
            stage=manifest.stage, who=_who(), why=why, verdict=back.verdict, forced=back.forced, labels=labels,
            commercial=commercial,
        )  # fmt: skip
        append(pipeline.store, event)
    return Moved(alias=alias, entry=entry, manifest=manifest, event=event, before=before)


def _is_commercial(pipeline: Pipeline, alias: str, events: Sequence[Event]) -> bool:
    """As the configuration states; where it is silent, as at the last move: a mark on one command line stays."""
    if alias in pipeline.aliases:
        return pipeline.aliases[alias].commercial
    moves = [event for event in events if event.alias == alias]
    return bool(moves) and moves[-1].commercial


def _permitted(pipeline: Pipeline, index: Index, node: str, alias: str, *, commercial: bool) -> list[str]:
    """The labels of all that a model was made from, once its licence permits the alias."""
    graph = ancestry(index, node)
    stated = {name: source.labels for name, source in pipeline.sources.items()}
    labels = all_labels(graph, stated)
    if commercial:
        require_commercial(graph, labels, pipeline.non_commercial_labels, alias)
    return sorted(set().union(*labels.values()))


def _is_of(event: Event, manifest: Manifest) -> bool:
    wanted = (manifest.stage, manifest.fingerprint, manifest.output_digest)
    return (event.stage, event.fingerprint, event.digest) == wanted


def _who() -> str:
    return f"{getpass.getuser()}@{socket.gethostname()}"


def all_labels(graph: Graph, stated: Mapping[str, Iterable[str]]) -> dict[str, set[str]]:
    """Node of a source -> its labels: those that any manifest records, and those that are stated now.

    What is stated of a source is so of the same bytes under another name.


    Args:
        stated: name of a source -> its labels in the configuration.
    """
    sources = [node for node in graph.nodes.values() if node.entry is None]
    now: dict[str, set[str]] = {}
    for node in sources:
        now.setdefault(short(node.fingerprint), set()).update(stated.get(node.name.removeprefix(SOURCE), ()))
    return {node.id: node.labels | now[short(node.fingerprint)] for node in sources}


def require_commercial(graph: Graph, labels: Mapping[str, set[str]], patterns: Sequence[str], alias: str) -> None:
    """Refuses a model that was made from anything with a non-commercial label.

    Raises:
        GateError: names the label and the way from the source to the model; or the input that is missing.
    """
    # A champion has the labels of all that it was made from: name where they come from before it.
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
                f"alias {alias} is commercial, and nobody knows what {node.id} was made from: "
                f"{node.entry.path} is not in the store: {way}; restore it, or train the model anew"
            )
