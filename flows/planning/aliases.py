"""Sources that are aliases, such as the current champion; resolved when the plan is made."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from flows.declare.pipeline import Pipeline, Stage
from lineage.artifact import ALIAS, SOURCE, Kind, Source
from lineage.errors import ArtifactError, ConfigError
from lineage.fingerprint import fingerprint
from lineage.graph.ancestry import nearest_ancestor
from lineage.graph.places import node_key
from lineage.promotions import Event, read_events, stacks
from lineage.source.source_checks import check_options
from lineage.source.sources import Pinned
from lineage.store import Entry, Manifest, SourceRecord, Store
from tasks.gate.rule import CANDIDATE


@dataclass(frozen=True, kw_only=True)
class ResolvedAlias:
    """A pipeline with one alias resolved to a model, or to none.

    Args:
        found: name of a source -> stage and fingerprint of its artifact.
        instead: name of every other source -> message on what replaces it.
        unread: stages that are left out, because only a fallback would have read them.
    """

    pipeline: Pipeline
    found: Mapping[str, tuple[str, str]]
    instead: Mapping[str, str]
    unread: list[str]


def is_alias(source: Source) -> bool:
    """Whether a source is an alias."""
    return source.path.startswith(ALIAS)


def check_fallbacks(pipeline: Pipeline) -> None:
    """Checks that every fallback can replace its source, even if it is not used now."""
    for name, source in pipeline.sources.items():
        if source.fallback is None:
            continue
        where = f"sources.{name}.fallback={source.fallback}"
        if not is_alias(source):
            raise ConfigError(f"{where}: is for an alias, which may be unset; {source.path} is not one: remove it")
        instead = pipeline.sources.get(source.fallback.removeprefix(SOURCE))
        if instead and is_alias(instead) and pipeline.is_source(source.fallback):
            raise ConfigError(f"{where}: is an alias too, which may be unset; give a stage, or another source")
        try:
            _without(pipeline, name)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error


def artifact(event: Event) -> tuple[str, str]:
    """Stage and fingerprint of a promoted model."""
    assert event.stage is not None
    return event.stage, event.fingerprint


def resolve_alias(pipeline: Pipeline, names: Sequence[str], promotion: Event | None) -> ResolvedAlias:
    """Resolves these sources to a promoted model or its ancestors; None: the alias is unset.

    Raises:
        ConfigError: a source cannot be resolved, and a slot requires it.
    """
    found: dict[str, tuple[str, str]] = {}
    instead: dict[str, str] = {}
    for name in names:
        named = _named(pipeline, name, promotion) if promotion else None
        if named:
            found[name] = named
        else:
            pipeline, instead[name] = _without(pipeline, name)
    stages, unread = _without_unread(pipeline.stages, [pipeline.sources[name].fallback for name in found])
    return ResolvedAlias(pipeline=replace(pipeline, stages=stages), found=found, instead=instead, unread=unread)


def _alias_and_stage(source: Source) -> tuple[str, str]:
    alias, _, stage = source.path.removeprefix(ALIAS).partition("/")
    return alias, stage


def _named(pipeline: Pipeline, name: str, promotion: Event) -> tuple[str, str] | None:
    """The promoted model, or its ancestor of the named stage; None: it has no such ancestor."""
    stage = _alias_and_stage(pipeline.sources[name])[1]
    if not stage:
        return artifact(promotion)
    identity = nearest_ancestor(Store(pipeline.store), *artifact(promotion), stage)
    return (stage, identity) if identity else None


def _without(pipeline: Pipeline, name: str) -> tuple[Pipeline, str]:
    """The pipeline with a source replaced by its fallback or left out, and a message on that."""
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
                f"promote a model (posttrain promote REF --alias ...), set sources.{name}.fallback, or give another "
                "source"
            )
        inputs = {slot: fallback if slot in slots else ref for slot, ref in stage.inputs.items()}
        stages[stage_name] = replace(stage, inputs={slot: ref for slot, ref in inputs.items() if ref})
    done = f"{fallback} in its place" if fallback else "left out"
    return replace(pipeline, stages=stages), f"{done}: {', '.join(changed)}"


def _without_unread(stages: Mapping[str, Stage], spared: Sequence[str | None]) -> tuple[Mapping[str, Stage], list[str]]:
    """The stages without those that only fallbacks would have read, and the names of the left-out stages."""
    read = {ref for stage in stages.values() for ref in stage.inputs.values()}
    unread = [name for name in stages if name in spared and name not in read]
    if not unread:
        return stages, []
    above = [ref for name in unread for ref in stages[name].inputs.values()]
    kept, more = _without_unread({name: stages[name] for name in stages if name not in unread}, above)
    return kept, [*unread, *more]


@dataclass(frozen=True, kw_only=True)
class Champion:
    """The artifact that an alias source resolves to, with its own fingerprint."""

    entry: Entry
    pinned: Pinned


@dataclass(frozen=True, kw_only=True)
class Champions:
    """What the aliases of a pipeline resolve to.

    Args:
        inputs: stage -> its inputs, with fallbacks or empty slots for unresolved sources; stages that only fallbacks
            would have read are not among them.
        found: name of a source -> its artifact.
        notes: a line per source on how it was resolved.
    """

    inputs: Mapping[str, Mapping[str, str]]
    found: Mapping[str, Champion]
    notes: list[str]


def resolve_champions(pipeline: Pipeline, pinned: Callable[[str], str]) -> Champions:
    """Resolves all alias sources of a pipeline.

    Args:
        pinned: name of any other source -> its fingerprint.

    Raises:
        ConfigError: there is no such artifact, and a slot requires one.
        ArtifactError: its output is no longer in the store.
    """
    found: dict[str, Champion] = {}
    notes: list[str] = []
    stacked = stacks(read_events(pipeline.store))
    aliases: dict[str, list[str]] = {}  # alias -> names of the sources that refer to it
    for name in pipeline.used_sources():
        if is_alias(pipeline.sources[name]):
            check_options(name, pipeline.sources[name], is_hub=False, is_url=False)
            aliases.setdefault(_alias_and_stage(pipeline.sources[name])[0], []).append(name)
    for alias, names in aliases.items():
        held = stacked.get(alias, [])
        promotion = _choose(pipeline, names, held, pinned)
        resolved_alias = resolve_alias(pipeline, names, promotion)
        since = "" if not held or promotion is held[-1] else f", before {node_key(*artifact(held[-1]))} of this plan"
        for name, (stage, identity) in resolved_alias.found.items():
            found[name] = _champion(pipeline, name, Store(pipeline.store).entry(stage, identity), alias)
            notes.append(f"{SOURCE}{name} is {found[name].entry.path} (alias {alias}{since})")
        lack = _lack(alias, held, promotion)
        notes += [f"{SOURCE}{name}: {lack}; {done}" for name, done in resolved_alias.instead.items()]
        if resolved_alias.unread:
            notes.append(f"left out, since alias {alias} names a model: {', '.join(resolved_alias.unread)}")
        pipeline = resolved_alias.pipeline
    inputs = {name: stage.inputs for name, stage in pipeline.stages.items()}
    return Champions(inputs=inputs, found=found, notes=notes)


def _choose(
    pipeline: Pipeline, names: Sequence[str], held: Sequence[Event], pinned: Callable[[str], str]
) -> Event | None:
    """The newest model of the alias that this plan can compare its own with, or has started from.

    The candidate of its gate is neither, and without a gate none of its outputs is: promoting it would change the plan,
    which would compare the model with itself, and train it. Another output of the plan is a champion like any other.
    """
    if not held:
        return None
    current = artifact(held[-1])
    for event in [*reversed(held), None]:
        try:
            resolved_alias = resolve_alias(pipeline, names, event)
        except ConfigError:  # a required slot would be empty, so no plan has started from this one
            continue
        made = _outputs(resolved_alias, pinned)
        gates = [stage for stage in pipeline.stages.values() if stage.method.produces == Kind.VERDICT]
        judged = {pipeline.key(stage.inputs[CANDIDATE]) for stage in gates}
        barred = {each for each in made if each[0] in judged} if gates else made
        if current in made and (event is None or artifact(event) not in barred):
            return event
    return held[-1]


def _outputs(resolved_alias: ResolvedAlias, pinned: Callable[[str], str]) -> set[tuple[str, str]]:
    """Name and fingerprint of all stages, except those that depend on another alias."""
    pipeline = resolved_alias.pipeline
    known = {SOURCE + name: identity for name, (_, identity) in resolved_alias.found.items()}
    for name in pipeline.used_sources():
        if not is_alias(pipeline.sources[name]):
            known[SOURCE + name] = pinned(name)
    for name in pipeline.order():
        stage = pipeline.stages[name]
        inputs = {slot: known.get(pipeline.key(ref)) for slot, ref in stage.inputs.items()}
        known_inputs = {slot: value for slot, value in inputs.items() if value}
        if len(known_inputs) == len(inputs):
            known[name] = fingerprint(stage.method.recipe(), stage.method.identity_of(known_inputs))
    return {(name, known[name]) for name in pipeline.stages if name in known}


def _lack(alias: str, held: Sequence[Event], promotion: Event | None) -> str:
    if promotion:
        return f"alias {alias} names {node_key(*artifact(promotion))}, which was made without that stage"
    return f"alias {alias} names only models of this plan" if held else f"alias {alias} names no model yet"


def _champion(pipeline: Pipeline, name: str, entry: Entry, alias: str) -> Champion:
    source = pipeline.sources[name]
    manifest = entry.manifest()
    if manifest is None or manifest.missing(entry.output):
        raise ArtifactError(
            f"sources.{name}.path={source.path}: {entry.path} holds that {source.kind} no longer; restore it, "
            f"or point the alias to another model with posttrain promote or posttrain rollback --alias {alias}"
        )
    if manifest.produces not in (source.kind, None):  # None: an old manifest without the kind
        raise ConfigError(
            f"sources.{name}.kind={source.kind}: {source.path} is {entry.path}, which is {manifest.produces}; set "
            f"kind: {manifest.produces}"
        )
    return artifact_as_source(source, entry, manifest)


def artifact_as_source(source: Source, entry: Entry, manifest: Manifest) -> Champion:
    """An artifact of the store as a source."""
    record = SourceRecord(
        path=str(entry.output), kind=source.kind, revision=source.path if is_alias(source) else None,
        split=source.split, labels=sorted(source.labels), files={}, dvc=None,
    )  # fmt: skip
    digest = manifest.output_digest
    pinned = Pinned(source=source, fingerprint=manifest.fingerprint, digest=digest, record=record)
    return Champion(entry=entry, pinned=pinned)
