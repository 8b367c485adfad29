"""Checks of merges that need no weights: made with the plan, not after the models are trained."""

from flows.declare.pipeline import Pipeline
from flows.planning.root_model import POLICY, root_config, root_directory, root_json, root_of
from lineage.errors import ConfigError
from lineage.model_source import vocabulary_of
from tasks.chat_template import template_text
from tasks.merge import Merge
from tasks.train.merging import (
    BASE,
    require_same_config,
    require_same_template,
    require_same_vocabulary,
    template_of,
)


def check_merges(pipeline: Pipeline) -> None:
    """That each merge has the models that it combines, and that they are models of one kind, where that is known.

    Raises:
        ConfigError: a slot, a weight or a base is lacking, or a model has another architecture, vocabulary or template.
    """
    for name, stage in pipeline.stages.items():
        if isinstance(stage.method, Merge):
            try:
                stage.method.check_inputs(stage.inputs)
                _check_alike(pipeline, name)
            except ConfigError as error:
                raise ConfigError(f"stages.{name}: {error}") from error


def _check_alike(pipeline: Pipeline, name: str) -> None:
    inputs = pipeline.stages[name].inputs
    policy = inputs[POLICY]
    known = vocabulary_of(root_json(pipeline, policy, "tokenizer.json"))
    for slot, other in inputs.items():
        if slot == POLICY:
            continue
        if root_of(pipeline, other) != root_of(pipeline, policy):
            require_same_config(policy, other, _config(pipeline, policy), _config(pipeline, other))
            vocabulary = vocabulary_of(root_json(pipeline, other, "tokenizer.json"))
            if known and vocabulary:
                require_same_vocabulary(policy, other, known, vocabulary)
        templates = [_template(pipeline, each) for each in (policy, other)]
        if slot != BASE and None not in templates:
            require_same_template(policy, other, *templates)


def _config(pipeline: Pipeline, reference: str) -> dict[str, object]:
    """Of a model that was quantized before, a training saves it dequantized."""
    config = dict(root_config(pipeline, reference))
    if not pipeline.is_source(reference):
        config.pop("quantization_config", None)
    return config


def _template(pipeline: Pipeline, reference: str) -> str | None:
    """The chat template of a model: the last that a stage installs, or that of its first model; None: not known."""
    while not pipeline.is_source(reference):
        stage = pipeline.stages[reference]
        installed = stage.method.recipe().get("chat_template")
        if isinstance(installed, str):
            return template_text(installed)
        if POLICY not in stage.inputs:
            return None
        reference = stage.inputs[POLICY]
    directory = root_directory(pipeline, reference)
    return template_of(directory) if directory else None
