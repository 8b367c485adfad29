"""Sources that are aliases, such as the current champion: resolved when the plan is made."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from flows.declare.pipeline import Pipeline, Stage
from lineage.artifact import ALIAS, SOURCE, Source
from lineage.errors import ArtifactError, ConfigError
from lineage.fingerprint import fingerprint
from lineage.graph.ancestry import nearest_ancestor
from lineage.graph.places import node_key
from lineage.manifest import Manifest, SourceRecord
from lineage.promotions import Event, read_events, stacks
from lineage.source_checks import check_options
from lineage.sources import Pinned
from lineage.store import Entry, Store


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A pipeline whose alias is a certain model, or none.

    Args:
        found: name of a source -> stage and fingerprint of the artifact that it stands for.
        instead: name of each other source -> what is done for want of one, in words.
        unread: stages that are left out, because what the alias names is read in their place.
    """

    pipeline: Pipeline
    found: Mapping[str, tuple[str, str]]
    instead: Mapping[str, str]
    unread: list[str]


def is_alias(source: Source) -> bool:
    """Whether a source is what an alias names."""
    return source.path.startswith(ALIAS)


def check_fallbacks(pipeline: Pipeline) -> None:
    """That every fallback can stand where its source does: also while nothing makes use of it.

    Raises:
        ConfigError: names what is wrong with it.
    """
    for name, source in pipeline.sources.items():
        if source.fallback is None:
            continue
        where = f"sources.{name}.fallback={source.fallback}"
        if not is_alias(source):
            raise ConfigError(f"{where}: is for an alias, which may name nothing yet; {source.path} is none: remove it")
        instead = pipeline.sources.get(source.fallback.removeprefix(SOURCE))
        if instead and is_alias(instead) and pipeline.is_source(source.fallback):
            raise ConfigError(f"{where}: is an alias too, and may name nothing; give a stage, or another source")
        try:
            _without(pipeline, name)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error


def sources_of_aliases(pipeline: Pipeline) -> dict[str, list[str]]:
    """Alias -> the names of the sources that stages read by it."""
    aliases: dict[str, list[str]] = {}
    for name in pipeline.used_sources():
        if is_alias(pipeline.sources[name]):
            aliases.setdefault(_alias_and_stage(pipeline.sources[name])[0], []).append(name)
    return aliases


def artifact(event: Event) -> tuple[str, str]:
    """Stage and fingerprint of the model that a promotion is of."""
    assert event.stage is not None  # a promotion says whose output it is
    return event.stage, event.fingerprint


def place(pipeline: Pipeline, names: Sequence[str], holder: Event | None) -> Placed:
    """Puts one holder of the alias behind these sources, or none.

    Raises:
        ConfigError: a source is nothing then, and a slot needs it.
    """
    found: dict[str, tuple[str, str]] = {}
    instead: dict[str, str] = {}
    for name in names:
        named = _named(pipeline, name, holder) if holder else None
        if named:
            found[name] = named
        else:
            pipeline, instead[name] = _without(pipeline, name)
    stages, unread = _without_unread(pipeline.stages, [pipeline.sources[name].fallback for name in found])
    return Placed(pipeline=replace(pipeline, stages=stages), found=found, instead=instead, unread=unread)


def _alias_and_stage(source: Source) -> tuple[str, str]:
    alias, _, stage = source.path.removeprefix(ALIAS).partition("/")
    return alias, stage


def _named(pipeline: Pipeline, name: str, holder: Event) -> tuple[str, str] | None:
    """The holder itself, or the output of a stage that it was made from; None: it was made without that stage."""
    stage = _alias_and_stage(pipeline.sources[name])[1]
    if not stage:
        return artifact(holder)
    identity = nearest_ancestor(Store(pipeline.store), *artifact(holder), stage)
    return (stage, identity) if identity else None


def _without(pipeline: Pipeline, name: str) -> tuple[Pipeline, str]:
    """The pipeline whose slots that a source fills take its fallback, or stay empty; and what was done, in words."""
    source = pipeline.sources[name]
    fallback = source.fallback
    changed: list[str] = []
    stages: dict[str, Stage] = {}
    for stage_name, stage in pipeline.stages.items():
        slots = {slot for slot, ref in stage.inputs.items() if pipeline.key(ref) == SOURCE + name}
        changed += [f"{stage_name}.{slot}" for slot in stage.inputs if slot in slots]
        required = sorted(slots & stage.method.consumes.keys() - stage.method.optional)
        if required and not fallback:
            raise ConfigError(
                f"stages.{stage_name}.inputs.{required[0]}={name}: {source.path} names nothing that could fill it; "
                f"promote a model (posttrain promote REF --alias ...), state sources.{name}.fallback, or give another "
                "source"
            )
        inputs = {slot: fallback if slot in slots else ref for slot, ref in stage.inputs.items()}
        stages[stage_name] = replace(stage, inputs={slot: ref for slot, ref in inputs.items() if ref})
    done = f"{fallback} in its place" if fallback else "left out"
    return replace(pipeline, stages=stages), f"{done}: {', '.join(changed)}"


def _without_unread(stages: Mapping[str, Stage], spared: Sequence[str | None]) -> tuple[Mapping[str, Stage], list[str]]:
    """The stages but for those that only a fallback would have read, or another that is left out; and their names."""
    read = {ref for stage in stages.values() for ref in stage.inputs.values()}
    unread = [name for name in stages if name in spared and name not in read]
    if not unread:
        return stages, []
    above = [ref for name in unread for ref in stages[name].inputs.values()]
    kept, more = _without_unread({name: stages[name] for name in stages if name not in unread}, above)
    return kept, [*unread, *more]


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
    return placed_artifact(source, entry, manifest)


def placed_artifact(source: Source, entry: Entry, manifest: Manifest) -> Champion:
    """An artifact of the store in the place of a source."""
    record = SourceRecord(
        path=str(entry.output), kind=source.kind, revision=source.path if is_alias(source) else None,
        split=source.split, labels=sorted(source.labels), files={}, dvc=None,
    )  # fmt: skip
    digest = manifest.output_digest
    pinned = Pinned(source=source, fingerprint=manifest.fingerprint, digest=digest, record=record)
    return Champion(entry=entry, pinned=pinned)
