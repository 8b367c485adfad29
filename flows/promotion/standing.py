"""Whether a model's newest verdict still lets it pass: for its bytes, against today's champion, with its approval."""

from collections.abc import Sequence

from lineage.artifact import SOURCE, Kind
from lineage.errors import GateError
from lineage.fingerprint import short
from lineage.graph.ancestry import Graph, ancestry
from lineage.graph.index import Index
from lineage.graph.index_queries import Indexed
from lineage.graph.places import node_key
from lineage.manifest import Manifest
from lineage.promotions import Event, decision, stacks
from lineage.verdict import CHAMPION, VERDICT_TABLE, Verdict, read_verdict

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
        state = f"rejected by {said.who}" if said else "given by nobody yet"
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
