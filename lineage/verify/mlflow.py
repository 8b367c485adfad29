"""Checks MLflow against the store: runs, logged models, registered versions, aliases."""

from collections.abc import Iterator
from pathlib import Path

from lineage.errors import PipelineError
from lineage.graph.places import node_key
from lineage.mlflow.address import shown, sqlite_file, tracking_uri
from lineage.mlflow.registry import Links, links, lost_outputs
from lineage.promotions import PROMOTIONS, read_events, stacks
from lineage.verify.store import Checked, Fault, Finding


def check_mlflow(uri: str | None, store: Path, checked: Checked, *, is_over: bool = False) -> Iterator[Finding]:
    """Checks that MLflow holds what the manifests recorded there.

    Args:
        uri: the setting ``tracking.uri``.
        is_over: no stage is being committed, so that missing parts of open runs are findings too.
    """
    recorded = [manifest for _, _, manifest in checked.items() if manifest.mlflow_run_id]
    pipelines = sorted({manifest.pipeline for _, manifest in checked.all.values()})
    address = tracking_uri(uri)
    file = sqlite_file(address)
    if file and not file.exists():  # a check must not create it
        if recorded:
            yield _finding(Fault.MISSING, "MLflow", f"{file} is gone, which {len(recorded)} manifests were recorded in")
        return
    try:
        found = links(uri, pipelines)
    except PipelineError as error:
        yield _finding(Fault.MISSING, "MLflow", str(error))
        return
    for run_id in sorted(found.dead):
        yield _finding(Fault.CHANGED, "MLflow", f"run {run_id} is open, and its process or its folder is gone")
    for manifest in recorded:
        if manifest.mlflow_run_id in found.live and not is_over:  # committed a moment ago
            continue
        node = node_key(manifest.stage, manifest.fingerprint)
        for what in found.lacking(manifest):
            yield _finding(Fault.MISSING, node, f"MLflow at {shown(address)} has no {what} of it")
    if checked.is_whole:
        yield from _orphans(found, store, checked)
        yield from _aliases(found, store, checked)


def _orphans(found: Links, store: Path, checked: Checked) -> Iterator[Finding]:
    """Runs of artifacts that are no longer in this store: deleted by hand, or lost."""
    held = {(manifest.stage, manifest.fingerprint) for _, manifest in checked.all.values()}
    for key in lost_outputs(found, store, held):
        why = f"MLflow's run {found.runs[key].run_id} made it, and the store no longer has it"
        remedy = "restore it, or record that it was deleted: posttrain rebuild"
        yield Finding(Fault.ORPHANED, node_key(key.stage, key.fingerprint), why, remedy)


def _aliases(found: Links, store: Path, checked: Checked) -> Iterator[Finding]:
    """Checks that each alias in the registry points to the model of ``promotions.jsonl``."""
    pipelines = {(each.stage, each.fingerprint): each.pipeline for _, each in checked.all.values()}
    try:
        held = stacks(read_events(store))
    except PipelineError:  # reported by the check of the promotions
        return
    for alias in sorted(held.keys() | {alias for aliases in found.aliases.values() for alias in aliases}):
        last = held[alias][-1] if held.get(alias) else None
        promoted = (str(last.stage), last.fingerprint) if last else None
        for pipeline, aliases in found.aliases.items():
            named = aliases.get(alias)
            due = promoted if promoted and pipelines.get(promoted) == pipeline else None
            if not due and (named is None or named[:2] not in pipelines):  # set by another store
                continue
            if (named[:2] if named else None) != due:
                shown = node_key(*named[:2]) if named else "no artifact of ours"
                recorded = node_key(*due) if due else "none"
                why = f"registered model {pipeline} has it at {shown}, {PROMOTIONS} at {recorded}"
                remedy = "posttrain rebuild" if due else "take it away in MLflow, or give it with posttrain promote"
                yield Finding(Fault.CHANGED, f"alias {alias}", why, remedy)


def _finding(fault: Fault, what: str, why: str) -> Finding:
    return Finding(fault, what, why, "posttrain rebuild")
