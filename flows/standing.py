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
from lineage.verdict import VERDICT_TABLE, Verdict, read_verdict

_FORCE = "or promote with --force, which is recorded"


def require_verdict(index: Index, model: Manifest, alias: str, events: Sequence[Event], *, force: bool) -> str | None:
    """Fingerprint of the passing verdict that a promotion rests on; None: there is none, and it is forced.

    Raises:
        GateError: there is none, and it is not forced.
        ArtifactError: the verdict is not what was committed.
    """
    try:
        found = _newest(index, model, alias, events)
        _require_pass(index, found, events)
    except GateError:
        if force:
            return None
        raise
    return found.fingerprint


def _newest(index: Index, model: Manifest, alias: str, events: Sequence[Event]) -> Indexed:
    """The verdict of these bytes against today's champion that was given last."""
    given = _verdicts(index, model)
    name = f"{model.stage}@{short(model.fingerprint)}"
    if not given:
        raise GateError(
            f"{name}: no gate has judged it as it is now; run a pipeline whose gate has it as candidate "
            f"(posttrain run pipeline=cpt-sft-dpo-gated), {_FORCE}"
        )
    stale = [_other_champion(index, found, verdict, alias, events) for found, verdict in given]
    current = next((found for (found, _), reason in zip(given, stale, strict=True) if reason is None), None)
    if current is None:
        raise GateError(f"{stale[0]}; posttrain run of that pipeline compares anew, {_FORCE}")
    return current


def _verdicts(index: Index, model: Manifest) -> list[tuple[Indexed, Verdict]]:
    """Every verdict of these bytes, the newest first."""
    children = {child for node in index.with_prefix(short(model.fingerprint)) for child, _ in index.children(node)}
    found = [each for each in map(index.artifact, children) if each and each.kind == Kind.VERDICT]
    given = [(each, read_verdict(index.entry(each.id).output)) for each in found]
    of_model = [
        (each, verdict)
        for each, verdict in given
        if (verdict.candidate.fingerprint, verdict.candidate.digest) == (model.fingerprint, model.output_digest)
    ]
    return sorted(of_model, key=lambda pair: pair[0].end, reverse=True)


def _other_champion(index: Index, found: Indexed, verdict: Verdict, alias: str, events: Sequence[Event]) -> str | None:
    """Why a verdict says nothing of the model that would be replaced: it compared with another one."""
    if not verdict.rests_on_champion:
        return None
    compared = verdict.champion
    alias = compared.alias if compared and compared.alias else alias
    own = _made_with(ancestry(index, found.id))
    held = [each for each in stacks(events).get(alias, []) if node_key(each.stage or "", each.fingerprint) not in own]
    now = held[-1] if held else None
    if (now.fingerprint if now else None) == (compared.fingerprint if compared else None):
        return None
    then_name = f"{compared.name}@{short(compared.fingerprint)}" if compared else "no champion"
    now_name = node_key(now.stage or "", now.fingerprint) if now else "no other model"
    return f"{found.id} compared {verdict.candidate.name} with {then_name}, and alias {alias} names {now_name} now"


def _require_pass(index: Index, found: Indexed, events: Sequence[Event]) -> None:
    entry = index.entry(found.id)
    manifest = entry.require_intact()
    verdict = read_verdict(entry.output)
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
