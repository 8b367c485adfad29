"""A pipeline with one holder of an alias in it, or with none: what its slots are filled with, and what is left out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from flows.declare.pipeline import Pipeline, Stage
from lineage.artifact import ALIAS, SOURCE, Source
from lineage.errors import ConfigError
from lineage.graph.nearest import nearest_ancestor
from lineage.promotions import Event
from lineage.store import Store


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
