"""Which pipelines there are to deploy."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from flows.config import load_pipeline
from flows.declared import split_words
from flows.deploy.preset import Preset
from flows.pipeline import Pipeline
from lineage.errors import ConfigError


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

    @property
    def tags(self) -> list[str]:
        """What it states, and its name."""
        return [*(self.pipeline.operation.tags if self.pipeline else ()), f"pipeline:{self.name}"]


def declared_pipelines(preset: Preset) -> Iterator[Declared | str]:
    """Every pipeline by its file; of one that cannot be deployed, a line that says why."""
    for option, path in preset.files().items():
        try:
            yield declared(option, preset)
        except ConfigError as error:
            yield f"{path}: {error}"


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
        return Declared(option=option, name=name, pipeline=None, problem=str(error))
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
