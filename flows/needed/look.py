"""Looks at who needs what: a model with an alias, a view, a run, a sweep's best trial, a pipeline."""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path

from flows.declare.pipeline import Pipeline
from flows.needed.found import Needed
from flows.needed.pipelines import add_declared, add_plan, add_unseen
from flows.needed.registries import Registries
from flows.progress.run_notes import latest
from flows.sweep.files import read_best
from flows.sweep.folder import FOLDER, Ledger
from lineage.errors import ConfigError
from lineage.garbage import TOKENS
from lineage.graph.index import Index
from lineage.graph.index_queries import ARTIFACT
from lineage.graph.places import artifact_at, node_key
from lineage.lease import living_holder
from lineage.promotions import Event, read_events
from lineage.store import MANIFEST, Entry, Store
from lineage.view import VIEWS


def needed(
    pipeline: Pipeline, store: Path, config_dir: Path | None, registries: Registries, *, unseen: bool
) -> tuple[dict[str, str], list[str]]:
    """Key -> who needs it, of all that stays, artifacts with all that they were made from; and lines for people.

    Args:
        pipeline: that was stated with the command.
        unseen: keeps all of the pipelines that are not declared here, and lack what nobody has stated.

    Raises:
        ArtifactError: a record cannot be read, or MLflow.
    """
    found = Needed()
    _add_runs(store, found)  # before what a run leaves when it ends: so it is seen here or there
    add_plan(pipeline, "what you stated", found)
    add_declared(store, config_dir, found)
    with Index(store) as index:
        _add_promoted(index, found)
        registries.add_aliased(found)
        _add_sweeps(store, found)
        _add_views(store, found)
        _add_leased(store, found)
        made = {pipeline for pipeline, _ in index.places()}
        lines = (
            [] if unseen else [f"{found.unplanned[name]}: it keeps nothing" for name in made & found.unplanned.keys()]
        )
        if unseen:
            add_unseen(made, found)
        stay = {name: why for name, why in found.pipelines.items() if name in made}
        lines += [f"all of {name} stays: {why}" for name, why in stay.items()]
        nothing = [f"nothing goes: {why}" for why in found.everything]
        return _with_ancestors(index, found), [*nothing, *lines, *found.lines]


def last_look(store: Path, before: Mapping[str, str], registries: Registries) -> Callable[[], Collection[str]]:
    """Asks the registries now, over the network; what it gives looks at the store alone, for who keeps others waiting.

    That gives the keys of all that stays, with what has come to be needed since ``needed`` has looked. What is being
    made is not among them: its lease protects it, and ours would protect what we are about to free.

    Raises:
        ConfigError, ArtifactError: MLflow cannot be asked; or, from what it gives, a record cannot be read.
    """
    found = Needed(by=dict(before))
    registries.add_aliased(found)
    return partial(_needed_now, store, found.by)


def _needed_now(store: Path, before: Mapping[str, str]) -> Collection[str]:
    found = Needed(by=dict(before))
    _add_runs(store, found)
    with Index(store) as index:
        _add_promoted(index, found)
        _add_views(store, found)
        return _with_ancestors(index, found)


def _with_ancestors(index: Index, found: Needed) -> dict[str, str]:
    kept = dict(found.by)
    for name, why in found.pipelines.items():
        for made in index.artifacts(f"{ARTIFACT} WHERE pipeline = ?", name):
            kept.setdefault(made.id, why)
    for stage, entry in Store(index.store).entries() if found.everything else ():
        kept.setdefault(node_key(stage, entry.path.name), found.everything[0])
    for above in index.ancestors(list(kept)):
        kept.setdefault(above.id, "what is needed was made from it")
    return kept


def _add_promoted(index: Index, found: Needed) -> None:
    """Whatever has or had an alias, and the verdicts behind it: the record of promotions names it for ever."""
    for event in read_events(index.store):
        lost = _lost(event, index, found)
        if lost:
            found.everything.append(lost)
        for identity in filter(None, (event.fingerprint, event.verdict)):
            for node in index.with_prefix(identity[:16]):
                found.by[node] = f"{event.action} {event.alias or ''}".strip()


def _lost(event: Event, index: Index, found: Needed) -> str:
    """Why nobody knows what a promoted model was made from, unless a plan that makes it again says so."""
    node = node_key(event.stage or "", event.fingerprint)
    if not (event.alias and event.stage) or node in found.by or index.artifact(node):
        return ""
    if not index.entry(node).path.exists() and node not in index.aliases.values():
        return ""  # somebody has deleted a model of the past
    return (
        f"{node}, which alias {event.alias} names or has named, has no {MANIFEST}, so that nobody knows what it was "
        f"made from; restore {index.entry(node).path}, run its pipeline again, or state the overrides that make it"
    )


def _add_views(store: Path, found: Needed) -> None:
    for path in (store / VIEWS).glob(f"*/*/{MANIFEST}"):
        manifest = Entry(path.parent).manifest()
        if manifest:
            view = f"view {path.parents[1].name}/{path.parent.name}"
            found.by[node_key(manifest.stage, manifest.fingerprint)] = view


def _add_runs(store: Path, found: Needed) -> None:
    """What runs under way make and read; of one that has no plan yet, or makes more as it goes, its pipeline."""
    for note in latest(store):
        if note.is_live(store):
            run = f"run {note.id}"
            found.by.update({key: run for key in (*note.reads, TOKENS)})
            for stage in note.stages.values():
                made = artifact_at(store, stage.directory) if stage.directory else None
                if made:
                    found.by[node_key(*made)] = run
            if note.waits_for or note.sweep:
                found.pipelines[note.pipeline] = run


def _add_leased(store: Path, found: Needed) -> None:
    for stage, entry in Store(store).entries():
        if living_holder(entry.path):
            found.by.setdefault(node_key(stage, entry.path.name), "is being made now")


def _add_sweeps(store: Path, found: Needed) -> None:
    """The best trials of sweeps; all of a sweep that does not say which it is."""
    for path in (store / FOLDER).glob("*/best*.yaml"):
        told = f"the best of sweep {path.parent.name}"
        try:
            best = set(read_best(path)[0])
        except ConfigError:
            best, told = set(), f"sweep {path.parent.name}, of which {path.name} tells no best trial"
        for row in Ledger(path.parent).rows():
            if not best or {f"{field}={value}" for field, value in row.params.items()} <= best:
                found.by.update({node_key(stage, identity): told for stage, identity in row.fingerprints.items()})
