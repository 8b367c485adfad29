"""The champion: a source that is whatever model an alias names, resolved when the plan is made."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from flows.pipeline import Pipeline, Stage
from lineage.artifact import ALIAS, SOURCE, Kind, Source
from lineage.errors import ArtifactError, ConfigError
from lineage.fingerprint import fingerprint
from lineage.manifest import SourceRecord
from lineage.promotions import Event, read_events, stacks
from lineage.sources import Pinned
from lineage.store import Entry, Store


@dataclass(frozen=True, kw_only=True)
class Champion:
    """A source that an alias names: its place in the store, and its identity, which is that of the model."""

    entry: Entry
    pinned: Pinned


@dataclass(frozen=True, kw_only=True)
class Champions:
    """What became of a pipeline's aliases.

    Args:
        pipeline: without the slots that no model fills yet.
        found: name of a source -> the champion that it stands for.
        notes: a line for each alias: which model it is, or what was left out for want of one.
    """

    pipeline: Pipeline
    found: Mapping[str, Champion]
    notes: list[str]


def is_alias(source: Source) -> bool:
    """Whether a source is the model that an alias names."""
    return source.path.startswith(ALIAS)


def resolve_champions(pipeline: Pipeline, pinned: Mapping[str, str]) -> Champions:
    """Finds the model behind each source that an alias names.

    It is the latest holder that is no output of this very plan: else promoting the plan's model would change the plan,
    and have the model compared with itself.

    Args:
        pinned: ``source:NAME`` -> fingerprint, of the other sources.

    Raises:
        ConfigError: there is no such model, and a slot needs one.
        ArtifactError: its output is no longer in the store.
    """
    names = [name for name in pipeline.used_sources() if is_alias(pipeline.sources[name])]
    found: dict[str, Champion] = {}
    notes: list[str] = []
    if not names:
        return Champions(pipeline=pipeline, found=found, notes=notes)
    own = _own_outputs(pipeline, pinned)
    holders = stacks(read_events(pipeline.store))
    for name in names:
        alias = pipeline.sources[name].path.removeprefix(ALIAS)
        held = [event for event in holders.get(alias, []) if (event.stage, event.fingerprint) not in own]
        if held:
            found[name] = _champion(pipeline, name, held[-1])
            notes.append(f"{SOURCE}{name} is {found[name].entry.path} (alias {alias})")
        else:
            pipeline, left_out = _without(pipeline, name)
            why = "names only models of this plan" if holders.get(alias) else "names no model yet"
            notes.append(f"{SOURCE}{name}: alias {alias} {why}; left out: {', '.join(left_out)}")
    return Champions(pipeline=pipeline, found=found, notes=notes)


def _own_outputs(pipeline: Pipeline, pinned: Mapping[str, str]) -> set[tuple[str | None, str]]:
    """Name and fingerprint of the stages that are the same whatever an alias names."""
    known = dict(pinned)
    for name in pipeline.order():
        stage = pipeline.stages[name]
        inputs = {slot: known.get(pipeline.key(ref)) for slot, ref in stage.inputs.items()}
        given = {slot: value for slot, value in inputs.items() if value}
        if len(given) == len(inputs):
            known[name] = fingerprint(stage.method.recipe(), given)
    return {(name, known[name]) for name in pipeline.stages if name in known}


def _champion(pipeline: Pipeline, name: str, event: Event) -> Champion:
    assert event.stage is not None  # a promotion says whose output it is
    entry = Store(pipeline.store).entry(event.stage, event.fingerprint)
    manifest = entry.manifest()
    source = pipeline.sources[name]
    if source.kind != Kind.CHECKPOINT:
        raise ConfigError(f"sources.{name}.kind={source.kind}: an alias names a model; state kind: {Kind.CHECKPOINT}")
    if manifest is None or manifest.missing(entry.output):
        raise ArtifactError(
            f"sources.{name}.path={source.path}: {entry.path} holds that model no longer; restore it, "
            f"or give the alias to another with posttrain promote or posttrain rollback --alias {event.alias}"
        )
    record = SourceRecord(
        path=str(entry.output), kind=source.kind, revision=source.path, split=source.split,
        labels=sorted(source.labels), files={}, dvc=None,
    )  # fmt: skip
    digest = manifest.output_digest
    pinned = Pinned(source=source, fingerprint=manifest.fingerprint, digest=digest, record=record)
    return Champion(entry=entry, pinned=pinned)


def _without(pipeline: Pipeline, name: str) -> tuple[Pipeline, list[str]]:
    """The pipeline without the slots that a source fills, and their names."""
    left_out: list[str] = []
    stages: dict[str, Stage] = {}
    for stage_name, stage in pipeline.stages.items():
        slots = [slot for slot, ref in stage.inputs.items() if pipeline.key(ref) == SOURCE + name]
        left_out += [f"{stage_name}.{slot}" for slot in slots]
        required = [slot for slot in slots if slot in stage.method.consumes and slot not in stage.method.optional]
        if required:
            raise ConfigError(
                f"stages.{stage_name}.inputs.{required[0]}={name}: {pipeline.sources[name].path} names no model that "
                f"could fill it; promote one (posttrain promote REF --alias ...), or give another source"
            )
        stages[stage_name] = replace(stage, inputs={s: ref for s, ref in stage.inputs.items() if s not in slots})
    return replace(pipeline, stages=stages), left_out
