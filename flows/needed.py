"""What of a store is needed, and by whom: a model with an alias, a view, a run, a sweep's best trial, a pipeline."""

from dataclasses import dataclass, field
from pathlib import Path

import yaml

from flows.declare.config import load_pipeline
from flows.declare.pipeline import Pipeline
from flows.declared import split_words
from flows.deploy.preset import Preset
from flows.planning.plan import make_plan
from flows.progress.run_notes import latest
from flows.sweep.folder import FOLDER, Ledger
from lineage.errors import ConfigError, MissingValueError, PipelineError
from lineage.graph.index import Index
from lineage.graph.places import artifact_at, node_key
from lineage.lease import living_holder
from lineage.promotions import read_events
from lineage.store import MANIFEST, Entry, Store
from lineage.view import VIEWS


@dataclass(frozen=True, kw_only=True)
class Needed:
    """What stays.

    Args:
        by: node -> who needs it, in words; without ancestors.
        pipelines: of which everything stays, because what they need cannot be told; and why.
        unread: a line for each pipeline that stands only with further overrides, which nobody has stated here.
    """

    by: dict[str, str] = field(default_factory=dict)
    pipelines: dict[str, str] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)


def needed(pipeline: Pipeline | None, store: Path, config_dir: Path | None) -> tuple[dict[str, str], Needed]:
    """Node -> who needs it, of every artifact that stays, with all that these were made from.

    Args:
        pipeline: that was stated with the command; None: only those that are declared.

    Raises:
        ArtifactError: a record cannot be read, or MLflow.
    """
    found = Needed()
    with Index(store) as index:
        _add_promoted(index, store, found)
        _add_views(store, found)
        _add_runs(store, found)
        _add_sweeps(store, found)
        if pipeline:
            _add_mlflow_aliases(pipeline, store, found)
            _add_plan(pipeline, "what you stated", found)
        for option in Preset(config_dir=config_dir).files():
            _add_declared(option, store, config_dir, found)
        kept = dict(found.by)
        for stage, entry in Store(store).entries():
            manifest, node = entry.manifest(), node_key(stage, entry.path.name)
            if living_holder(entry.path):
                kept.setdefault(node, "is being made now")
            elif manifest and manifest.pipeline in found.pipelines:
                kept.setdefault(node, found.pipelines[manifest.pipeline])
        for above in index.ancestors(list(kept)):
            kept.setdefault(above.id, "what is needed was made from it")
    return kept, found


def _add_promoted(index: Index, store: Path, found: Needed) -> None:
    """Whatever has or had an alias, and the verdicts behind it: the record of promotions names it for ever."""
    for event in read_events(store):
        for identity in filter(None, (event.fingerprint, event.verdict)):
            for node in index.with_prefix(identity[:16]):
                found.by.setdefault(node, f"{event.action} {event.alias or ''}".strip())


def _add_mlflow_aliases(pipeline: Pipeline, store: Path, found: Needed) -> None:
    """A model to which somebody gave an alias in MLflow alone."""
    from lineage.mlflow.address import sqlite_file, tracking_uri

    file = sqlite_file(tracking_uri(pipeline.tracking.uri))
    if not pipeline.tracking.mlflow or (file and not file.exists()):
        return
    from lineage.mlflow.registry import links

    names = {manifest.pipeline for _, entry in Store(store).entries() if (manifest := entry.manifest())}
    for aliases in links(pipeline.tracking.uri, sorted(names)).aliases.values():
        for alias, key in aliases.items():
            if key:
                found.by.setdefault(node_key(key.stage, key.fingerprint), f"alias {alias} of MLflow")


def _add_views(store: Path, found: Needed) -> None:
    for path in (store / VIEWS).glob(f"*/*/{MANIFEST}"):
        manifest = Entry(path.parent).manifest()
        if manifest:
            view = f"view {path.parents[1].name}/{path.parent.name}"
            found.by.setdefault(node_key(manifest.stage, manifest.fingerprint), view)


def _add_runs(store: Path, found: Needed) -> None:
    """What runs under way make and read; of one that has no plan yet, or makes more as it goes, its pipeline."""
    for note in latest(store):
        if note.is_live(store):
            run = f"run {note.id}"
            found.by.update({node: run for node in note.reads})
            for stage in note.stages.values():
                made = artifact_at(store, stage.directory) if stage.directory else None
                if made:
                    found.by[node_key(*made)] = run
            if note.waits_for or note.sweep:
                found.pipelines[note.pipeline] = run


def _add_sweeps(store: Path, found: Needed) -> None:
    for path in (store / FOLDER).glob("*/best*.yaml"):
        best = yaml.safe_load(path.read_text())["trial"]
        for row in Ledger(path.parent).rows():
            if row.number == best:
                told = f"the best of sweep {path.parent.name}"
                found.by.update({node_key(stage, identity): told for stage, identity in row.fingerprints.items()})


def _add_declared(option: str, store: Path, config_dir: Path | None, found: Needed) -> None:
    words = Preset(config_dir=config_dir, overrides=(f"store={store}",)).words(option)
    try:
        pipeline = load_pipeline(*split_words(words))
    except MissingValueError as error:
        found.unread.append(f"pipeline={option} keeps nothing as it stands: {error}")
        return
    except ConfigError as error:
        found.pipelines[option] = f"pipeline={option} cannot be read: {error}"
        return
    _add_plan(pipeline, f"pipeline {pipeline.name}", found)


def _add_plan(pipeline: Pipeline, who: str, found: Needed) -> None:
    try:
        plan = make_plan(pipeline)
    except (PipelineError, OSError) as error:
        found.pipelines[pipeline.name] = f"{who} cannot be planned: {error}"
        return
    for planned in plan.stages:
        found.by.setdefault(node_key(planned.name, planned.fingerprint), who)
