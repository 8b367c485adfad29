"""Checks of a pipeline's models that need no GPU and no torch: made with the plan, before anything is paid."""

from collections.abc import Mapping
from pathlib import Path

from flows.pipeline import SOURCE, Pipeline
from lineage.artifact import Kind, Source
from lineage.digest import local_paths
from lineage.errors import ConfigError


def check_models(pipeline: Pipeline) -> None:
    """Follows each model through the graph: is it one, and will it have a chat template where one is needed?

    Raises:
        ConfigError: names the source or stage, and what to do.
    """
    has_template = {
        SOURCE + name: _source_has_template(name, source)
        for name, source in pipeline.sources.items()
        if source.kind == Kind.CHECKPOINT
    }
    for name in pipeline.order():
        stage = pipeline.stages[name]
        recipe = stage.method.recipe()
        slot = stage.method.chat_slot
        if slot and not _given(pipeline, stage.inputs, slot, has_template) and not recipe.get("chat_template"):
            raise ConfigError(
                f"stages.{name}.inputs.{slot}={stage.inputs[slot]}: that model comes from one without a chat template; "
                "set chat_template=chatml on the first SFT stage (stages.sft.method.chat_template=chatml), "
                "or start from a model that has one"
            )
        policy_has = "policy" not in stage.inputs or _given(pipeline, stage.inputs, "policy", has_template)
        has_template[name] = policy_has or bool(recipe.get("chat_template"))


def _given(pipeline: Pipeline, inputs: Mapping[str, str], slot: str, has_template: Mapping[str, bool]) -> bool:
    reference = inputs[slot]
    key = SOURCE + reference.removeprefix(SOURCE) if pipeline.is_source(reference) else reference
    return has_template[key]


def _source_has_template(name: str, source: Source) -> bool:
    """Of a hub id nothing is known before it is fetched; its stage checks again."""
    paths = local_paths(source.path)
    if not paths:
        return True
    directory = paths[0]
    for pattern, what in (("config.json", "no config.json"), ("*.safetensors", "no weights in safetensors")):
        if not any(directory.glob(pattern)):
            raise ConfigError(
                f"sources.{name}.path={source.path}: {what} in it; "
                "a model is a directory as model.save_pretrained and tokenizer.save_pretrained write it"
            )
    return _has_template(directory)


def _has_template(directory: Path) -> bool:
    config = directory / "tokenizer_config.json"
    return (directory / "chat_template.jinja").exists() or (
        config.exists() and '"chat_template"' in config.read_text(encoding="utf-8")
    )
