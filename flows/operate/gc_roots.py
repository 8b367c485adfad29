"""GC roots: the outputs that aliases, views, best trials of sweeps, runs and ``--keep`` refer to."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from flows.declare.pipeline import Pipeline
from flows.planning.plan import make_plan
from flows.planning.reads import reads
from flows.progress.run_record import latest
from flows.progress.tracking import recorded_uri
from flows.sweep.folder import FOLDER, read_best, trial_results
from lineage.dvc import VIEWS
from lineage.errors import ArtifactError
from lineage.gc import TOKENS
from lineage.graph.index import ARTIFACT, Index
from lineage.graph.places import artifact_at, node_key
from lineage.graph.refs import resolve
from lineage.mlflow.address import sqlite_file, tracking_uri
from lineage.promotions import read_events
from lineage.store import MANIFEST, Entry
from tasks.method import Training


def find_roots(store: Path, pipeline: Pipeline, keep: Sequence[str]) -> dict[str, str]:
    """Node -> why it is kept, for all roots and their ancestors.

    Args:
        pipeline: the configured pipeline, whose current outputs are kept.
        keep: REFs to keep.

    Raises:
        PipelineError: the pipeline cannot be planned, a record or MLflow cannot be read, or a REF names nothing.
    """
    restart = tuple(name for name, stage in pipeline.stages.items() if isinstance(stage.method, Training))
    planned = reads(make_plan(replace(pipeline, restart=restart, code_drift="warn", advice="off")))
    found = dict.fromkeys(planned, "the pipeline of this command")
    with Index(store) as index:
        found |= {resolve(ref, index).node: f"--keep {ref}" for ref in keep}
        pipelines = sorted({name for name, _ in index.places()})
    for path in (store / FOLDER).glob("*/best*.yaml"):
        best = set(read_best(path)[0])
        for trial in trial_results(path.parent):
            if {f"{field}={value}" for field, value in trial.params.items()} <= best:
                nodes = (node_key(*each) for each in trial.fingerprints.items())
                found |= dict.fromkeys(nodes, f"the best of sweep {path.parent.name}")
    return add_present(store, found | _mlflow(pipeline, pipelines))


def add_present(store: Path, before: dict[str, str]) -> dict[str, str]:
    """Adds the current roots by runs, views and aliases of the store; queries no server.

    Raises:
        ArtifactError: a record cannot be read.
    """
    found = dict(before)
    with Index(store) as index:
        for run in filter(lambda run: run.is_live(store), latest(store)):  # first: a run that ends moves its views
            places = [artifact_at(store, each.directory) for each in run.stages.values() if each.directory]
            nodes = {TOKENS, *run.reads, *(node_key(*place) for place in places if place)}
            if run.waits_for or run.sweep:  # its plan is not known yet, or grows
                nodes |= {made.id for made in index.artifacts(f"{ARTIFACT} WHERE pipeline = ?", run.pipeline)}
            found |= dict.fromkeys(nodes, f"run {run.id}")
        for path in (store / VIEWS).glob(f"*/*/{MANIFEST}"):
            if manifest := Entry(path.parent).manifest():
                view = f"view {path.parents[1].name}/{path.parent.name}"
                found[node_key(manifest.stage, manifest.fingerprint)] = view
        found |= _promoted(index)
        return {each.id: "an ancestor of what is kept" for each in index.ancestors(list(found))} | found


def _promoted(index: Index) -> dict[str, str]:
    """All models that have or had an alias, and their verdicts: the record of promotions refers to them for ever."""
    found: dict[str, str] = {}
    for event in read_events(index.store):
        for identity in filter(None, (event.fingerprint, event.verdict)):
            found |= dict.fromkeys(index.with_prefix(identity[:16]), f"{event.action} {event.alias or ''}".strip())
        node = node_key(event.stage or "", event.fingerprint)
        if event.alias and event.stage and not index.artifact(node):
            path = index.entry(node).path
            if path.exists() or node in index.aliases.values():  # else it was deleted long ago
                raise ArtifactError(
                    f"{node}, which alias {event.alias} names or has named, has no {MANIFEST}: its ancestors are "
                    f"unknown, so nothing is deleted; restore {path}, or run its pipeline again"
                )
    return found


def _mlflow(pipeline: Pipeline, pipelines: Sequence[str]) -> dict[str, str]:
    """Models with an alias in MLflow's registry, where people may set aliases by hand."""
    uri = recorded_uri(pipeline)
    file = sqlite_file(tracking_uri(uri)) if pipeline.tracking.mlflow else None
    if not pipeline.tracking.mlflow or (file and not file.exists()):  # nothing was recorded yet
        return {}
    from lineage.mlflow.registry import aliases  # imports mlflow, which takes a second

    return {node_key(*place): f"alias {alias} of MLflow" for place, alias in aliases(uri, pipelines).items()}
