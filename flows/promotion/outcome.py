"""How a run ended, in a subject and one paragraph: what data is new, what was trained, the verdict, the champion."""

from collections.abc import Iterator

from flows.planning.plan import Plan
from flows.planning.verdicts import Judgement, judgements
from lineage.artifact import DATA, MODELS, Kind
from lineage.errors import PipelineError
from lineage.graph.places import node_key
from lineage.verdict import interval_text


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
