"""The champion: sources that are the model an alias names, or what it was made from, found when the plan is made."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from flows.declare.pipeline import Pipeline
from flows.planning.placed import Placed, artifact, is_alias, place, sources_of_aliases
from lineage.artifact import SOURCE
from lineage.errors import ArtifactError, ConfigError
from lineage.fingerprint import fingerprint
from lineage.graph.places import node_key
from lineage.manifest import SourceRecord
from lineage.promotions import Event, read_events, stacks
from lineage.source_checks import check_options
from lineage.sources import Pinned
from lineage.store import Entry, Store


@dataclass(frozen=True, kw_only=True)
class Champion:
    """What a source stands for that an alias names: an artifact in its place in the store, with its own identity."""

    entry: Entry
    pinned: Pinned


@dataclass(frozen=True, kw_only=True)
class Champions:
    """What became of a pipeline's aliases.

    Args:
        pipeline: with what fills the slots that nothing of an alias fills yet, or without them.
        found: name of a source -> the artifact that it stands for.
        notes: a line for each source: which artifact it is, or what is done for want of one.
    """

    pipeline: Pipeline
    found: Mapping[str, Champion]
    notes: list[str]


def resolve_champions(pipeline: Pipeline, pinned: Callable[[str], str]) -> Champions:
    """Finds what each source stands for that an alias names.

    Args:
        pinned: name of any other source -> its fingerprint.

    Raises:
        ConfigError: there is no such artifact, and a slot needs one.
        ArtifactError: its output is no longer in the store.
    """
    found: dict[str, Champion] = {}
    notes: list[str] = []
    stacked = stacks(read_events(pipeline.store))
    for alias, names in sources_of_aliases(pipeline).items():
        held = stacked.get(alias, [])
        holder = _choose(pipeline, names, held, pinned)
        placed = place(pipeline, names, holder)
        since = "" if not held or holder is held[-1] else f", before {node_key(*artifact(held[-1]))} of this plan"
        for name, (stage, identity) in placed.found.items():
            found[name] = _champion(pipeline, name, Store(pipeline.store).entry(stage, identity), alias)
            notes.append(f"{SOURCE}{name} is {found[name].entry.path} (alias {alias}{since})")
        lack = _lack(alias, held, holder)
        notes += [f"{SOURCE}{name}: {lack}; {done}" for name, done in placed.instead.items()]
        if placed.unread:
            notes.append(f"left out, since alias {alias} names a model: {', '.join(placed.unread)}")
        pipeline = placed.pipeline
    return Champions(pipeline=pipeline, found=found, notes=notes)


def _choose(
    pipeline: Pipeline, names: Sequence[str], held: Sequence[Event], pinned: Callable[[str], str]
) -> Event | None:
    """The present holder; where this very plan makes the present holder, the one before it that the plan began from.

    Else promoting a plan's model would change the plan: it would compare the model with itself, and train it on.
    """
    if not held:
        return None
    present = artifact(held[-1])
    for event in [*reversed(held[:-1]), None]:
        try:
            placed = place(pipeline, names, event)
        except ConfigError:  # a slot needs what this one lacks: so no plan has begun from it
            continue
        made = _outputs(placed, pinned)
        if present in made and (event is None or artifact(event) not in made):
            return event
    return held[-1]


def _outputs(placed: Placed, pinned: Callable[[str], str]) -> set[tuple[str, str]]:
    """Name and fingerprint of the stages, but for those that read what another alias names."""
    pipeline = placed.pipeline
    known = {SOURCE + name: identity for name, (_, identity) in placed.found.items()}
    for name in pipeline.used_sources():
        if not is_alias(pipeline.sources[name]):
            known[SOURCE + name] = pinned(name)
    for name in pipeline.order():
        stage = pipeline.stages[name]
        inputs = {slot: known.get(pipeline.key(ref)) for slot, ref in stage.inputs.items()}
        given = {slot: value for slot, value in inputs.items() if value}
        if len(given) == len(inputs):
            known[name] = fingerprint(stage.method.recipe(), given)
    return {(name, known[name]) for name in pipeline.stages if name in known}


def _lack(alias: str, held: Sequence[Event], holder: Event | None) -> str:
    if holder:
        return f"alias {alias} names {node_key(*artifact(holder))}, which was made without that stage"
    return f"alias {alias} names only models of this plan" if held else f"alias {alias} names no model yet"


def _champion(pipeline: Pipeline, name: str, entry: Entry, alias: str) -> Champion:
    source = pipeline.sources[name]
    manifest = entry.manifest()
    if manifest is None or manifest.missing(entry.output):
        raise ArtifactError(
            f"sources.{name}.path={source.path}: {entry.path} holds that {source.kind} no longer; restore it, "
            f"or give the alias to another model with posttrain promote or posttrain rollback --alias {alias}"
        )
    if manifest.produces not in (source.kind, None):  # None: recorded before manifests said what they are of
        raise ConfigError(
            f"sources.{name}.kind={source.kind}: {source.path} is {entry.path}, which is {manifest.produces}; state "
            f"kind: {manifest.produces}"
        )
    check_options(name, source, is_hub=False, is_url=False)
    record = SourceRecord(
        path=str(entry.output), kind=source.kind, revision=source.path, split=source.split,
        labels=sorted(source.labels), files={}, dvc=None,
    )  # fmt: skip
    digest = manifest.output_digest
    pinned = Pinned(source=source, fingerprint=manifest.fingerprint, digest=digest, record=record)
    return Champion(entry=entry, pinned=pinned)
