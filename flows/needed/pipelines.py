"""What pipelines need: those that are declared, and the one that a command states."""

from dataclasses import replace
from pathlib import Path

import yaml

from flows.declare.config import load_pipeline
from flows.declare.pipeline import Pipeline
from flows.declared import split_words
from flows.deploy.preset import Preset
from flows.needed.found import Needed
from flows.planning.plan import make_plan
from flows.planning.reads import reads
from lineage.errors import ConfigError, MissingValueError, PipelineError
from tasks.method import Training

_NAME_IT = "state its --config-dir or its overrides, or --older-than, which frees what was not used for so long"


def add_plan(pipeline: Pipeline, who: str, found: Needed) -> None:
    """What a pipeline would make or reuse, also where a run of it refuses to go on from what is unfinished."""
    begins_again = tuple(name for name, stage in pipeline.stages.items() if isinstance(stage.method, Training))
    try:
        plan = make_plan(replace(pipeline, restart=begins_again, code_drift="warn"))
    except (PipelineError, OSError) as error:
        found.pipelines[pipeline.name] = f"{who} cannot be planned: {error}"
        return
    found.planned.add(pipeline.name)
    for node in reads(plan):
        found.by.setdefault(node, who)


def add_declared(store: Path, config_dir: Path | None, found: Needed) -> None:
    """What the shipped pipelines and those of a folder of groups would make or reuse, as they are declared."""
    for option, file in Preset(config_dir=config_dir).files().items():
        words = Preset(config_dir=config_dir, overrides=(f"store={store}",)).words(option)
        try:
            pipeline = load_pipeline(*split_words(words))
        except MissingValueError as error:
            found.unplanned.update({name: f"pipeline={option} lacks {error}" for name in _names(file) or {option}})
        except ConfigError as error:
            why = f"pipeline={option} cannot be read: {error}"
            found.pipelines.update({name: why for name in _names(file)})
            if not _names(file):
                found.everything.append(f"{why}; mend {file}, or move it away: it does not even say its name")
        else:
            add_plan(pipeline, f"pipeline {pipeline.name}", found)


def add_unseen(made: set[str], found: Needed) -> None:
    """All of the pipelines that nobody here can ask what they need.

    Args:
        made: names of the pipelines that have outputs.
    """
    for name in sorted(made - found.planned - found.pipelines.keys()):
        found.pipelines[name] = f"{found.unplanned.get(name, 'it is not declared here')}; {_NAME_IT}"


def _names(file: Path) -> set[str]:
    """What a pipeline may be called whose file does not compose: as its file, or as that says; empty: unknown."""
    try:
        told = yaml.safe_load(file.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return set()
    name = told.get("name") if isinstance(told, dict) else None
    return {file.stem, name} if isinstance(name, str) and "${" not in name else set()
