"""The model that a chain of policies begins with, and what its files say, where they are on this machine."""

from collections.abc import Mapping
from pathlib import Path

from flows.declare.pipeline import Pipeline
from lineage.artifact import SOURCE
from lineage.store import CACHE
from tasks.fetch_model import CONFIG, fetched_model, model_json

POLICY = "policy"


def root_of(pipeline: Pipeline, reference: str) -> str:
    """The source, as ``source:NAME``, or the stage that a model's config and tokenizer come from."""
    while not pipeline.is_source(reference) and POLICY in pipeline.stages[reference].inputs:
        reference = pipeline.stages[reference].inputs[POLICY]
    return pipeline.key(reference)


def root_directory(pipeline: Pipeline, reference: str) -> Path | None:
    """Where the model of ``root_of`` lies; None: a stage makes it, or it is not on this machine yet."""
    root = root_of(pipeline, reference)
    if not pipeline.is_source(root):
        return None
    return fetched_model(pipeline.sources[root.removeprefix(SOURCE)], pipeline.store / CACHE)


def root_config(pipeline: Pipeline, reference: str) -> Mapping[str, object]:
    """Its ``config.json``; empty where that is not known, or cannot be read: the stage that loads it reports that."""
    found = root_json(pipeline, reference, CONFIG)
    return found if isinstance(found, dict) else {}


def root_json(pipeline: Pipeline, reference: str, name: str) -> object:
    """A JSON file of the model of ``root_of``; None where it is not known, or cannot be read."""
    root = root_of(pipeline, reference)
    if not pipeline.is_source(root):
        return None
    return model_json(pipeline.sources[root.removeprefix(SOURCE)], pipeline.store / CACHE, name)
