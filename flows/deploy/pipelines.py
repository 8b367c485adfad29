"""Which pipelines there are to deploy."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from flows.declare.config import load_pipeline
from flows.declare.operation import Schedule
from flows.declare.pipeline import Pipeline, nearest
from flows.declared import split_words
from flows.deploy.preset import Preset
from lineage.errors import ConfigError, MissingValueError


@dataclass(frozen=True, kw_only=True)
class Declared:
    """A pipeline that can be deployed.

    Args:
        option: of the group ``pipeline/``: the name of its file.
        name: what it calls itself: the name of the flow.
        pipeline: None where it does not stand without further overrides; then ``problem`` says why.
    """

    option: str
    name: str
    pipeline: Pipeline | None
    problem: str = ""
    lacks_value: bool = False  # the problem is only that a value is left open

    @property
    def schedule(self) -> Schedule | None:
        return self.pipeline.operation.schedule if self.pipeline else None

    @property
    def tags(self) -> list[str]:
        """What it states, and its name."""
        return [*(self.pipeline.operation.tags if self.pipeline else ()), f"pipeline:{self.name}"]


def declared_pipelines(preset: Preset) -> Iterator[Declared | str]:
    """Every pipeline by its file; of one that cannot be deployed, a line that says why."""
    names: dict[str, Path] = {}
    for option, path in preset.files().items():
        try:
            found = declared(option, preset)
        except ConfigError as error:
            yield f"{path}: {error}"
            continue
        first = names.setdefault(found.name, path)
        if first == path:
            yield found
        else:
            yield f"{path}: {found.name} is also the name of {first}; give it a name of its own"


def deployable(preset: Preset) -> list[Declared]:
    """The pipelines that can be deployed; says on stderr what cannot.

    Raises:
        ConfigError: there is none, or what all are given is wrong.
    """
    pipelines = []
    for found in declared_pipelines(preset):
        if isinstance(found, Declared):
            pipelines.append(found)
        else:
            print(f"posttrain: left out: {found}", file=sys.stderr)
    if not pipelines:
        names = list(replace(preset, pipeline=None).files())
        raise ConfigError(
            f"there is no pipeline {preset.pipeline or 'to deploy'}; there are: {', '.join(names)}"
            f"{nearest(preset.pipeline or '', names)}"
        )
    if not any(each.lacks_value or each.pipeline for each in pipelines):
        raise ConfigError("; ".join(dict.fromkeys(str(each.problem) for each in pipelines)))
    return pipelines


def declared(option: str, preset: Preset) -> Declared:
    """One pipeline.

    Raises:
        ConfigError: nothing can be told of it, not even its name.
    """
    if "." in option:  # Prefect finds its flow by an attribute of this name
        raise ConfigError("the name of a pipeline that is deployed has no dot; rename the file")
    try:
        pipeline = load_pipeline(*split_words(preset.words(option)))
    except ConfigError as error:
        name = _stated_name(preset.files()[option], error)
        lacks_value = isinstance(error, MissingValueError)
        return Declared(option=option, name=name, pipeline=None, problem=str(error), lacks_value=lacks_value)
    return Declared(option=option, name=pipeline.name, pipeline=pipeline)


def _stated_name(path: Path, problem: ConfigError) -> str:
    """The name in its file, where all of it cannot be composed."""
    try:
        node = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        raise problem from None
    name = node.get("name") if isinstance(node, dict) else None
    if not isinstance(name, str) or "${" in name:
        raise problem
    return name
