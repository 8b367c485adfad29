"""Checks of a stage's models against each other that load none: made with the plan, not after hours of training."""

from pathlib import Path

from flows.declare.pipeline import Pipeline
from flows.planning.root_model import POLICY, root_json, root_of
from lineage.artifact import ALIAS, MODELS, SOURCE
from lineage.errors import ConfigError
from lineage.model_source import vocabulary_of
from tasks.evaluate.evaluate import Evaluate, agreed_thinking, other_tokens
from tasks.method import REWARD_MODEL, TEACHER, Training
from tasks.train.models import differing_tokens

_THINKING = "thinking"  # of a method that trains on conversations


def check_evaluations(pipeline: Pipeline) -> None:
    """That what an evaluation compares can be compared, and that its rows have a length.

    Raises:
        ConfigError: a model has another tokenizer than the reference, ``max_length`` is unknown or too small, or
            ``thinking`` is not set and the stages that trained the models differ in it.
    """
    for name, stage in pipeline.stages.items():
        if isinstance(stage.method, Evaluate):
            _check_tokenizers(pipeline, name)
            _check_length(pipeline, name, stage.method)
            _check_thinking(pipeline, name, stage.method)


def check_frozen_models(pipeline: Pipeline) -> None:
    """That a teacher or a reward model has the tokens of the policy that is trained beside it, where both are known.

    Raises:
        ConfigError: it has not.
    """
    for name, stage in pipeline.stages.items():
        if not isinstance(stage.method, Training):
            continue
        for slot, role in stage.method.models.items():
            if role not in (TEACHER, REWARD_MODEL) or slot not in stage.inputs:
                continue
            root, other = (root_of(pipeline, stage.inputs[each]) for each in (POLICY, slot))
            own, known = (_vocabulary(pipeline, each) for each in (other, root))
            apart = differing_tokens(own, known) if other != root and own and known else []
            if apart:
                raise ConfigError(
                    f"stages.{name}.inputs: {slot} ({stage.inputs[slot]}) and policy ({stage.inputs[POLICY]}) have "
                    f"different tokenizers: {len(apart)} tokens of the policy are missing in {slot} or have other ids "
                    f"there, such as {apart[0]!r}; a model that has all of them with the same ids is accepted, as one "
                    f"of the same family; set inputs.{slot} to one"
                )


def _check_tokenizers(pipeline: Pipeline, name: str) -> None:
    inputs = pipeline.stages[name].inputs
    reference = root_of(pipeline, inputs["reference"])
    known = _vocabulary(pipeline, reference)
    for slot, ref in _models(pipeline, name).items():
        root = root_of(pipeline, ref)
        own = None if root == reference else _vocabulary(pipeline, root)
        apart = differing_tokens(own, known) if own and known else []
        if apart:
            raise ConfigError(f"stages.{name}.inputs: {other_tokens(slot, ref, inputs['reference'], apart)}")


def _check_length(pipeline: Pipeline, name: str, method: Evaluate) -> None:
    if method.max_length is not None:
        return
    refs = list(_models(pipeline, name).values())
    sources = [pipeline.sources[ref.removeprefix(SOURCE)] for ref in refs if pipeline.is_source(ref)]
    recipes = [pipeline.stages[ref].method.recipe() for ref in refs if not pipeline.is_source(ref)]
    lengths = [length for recipe in recipes if isinstance(length := recipe.get("max_length"), int)]
    if lengths:
        method.lengths(max(lengths))
    elif not any(_has_record(source.path) for source in sources):
        raise ConfigError(
            f"stages.{name}.method.max_length is not set, and none of the models is trained by a stage whose length it "
            f"could follow; a number of tokens is accepted; set stages.{name}.method.max_length=1024"
        )


def _check_thinking(pipeline: Pipeline, name: str, method: Evaluate) -> None:
    if method.thinking is not None:
        return
    refs = [ref for ref in _models(pipeline, name).values() if not pipeline.is_source(ref)]
    methods = {ref: pipeline.stages[ref].method for ref in refs}
    try:
        agreed_thinking({ref: getattr(each, _THINKING) for ref, each in methods.items() if hasattr(each, _THINKING)})
    except ConfigError as error:
        raise ConfigError(f"stages.{name}.method: {error}") from error


def _has_record(path: str) -> bool:
    """Whether what made a source may say how long its rows were."""
    return path.startswith(ALIAS) or Path(path).name == "output"


def _models(pipeline: Pipeline, name: str) -> dict[str, str]:
    """Slot -> what fills it, of every model that is measured."""
    stage = pipeline.stages[name]
    kinds = stage.method.consumes
    return {slot: ref for slot, ref in stage.inputs.items() if kinds.get(slot, kinds["*"]) in MODELS}


def _vocabulary(pipeline: Pipeline, ref: str) -> dict[str, int] | None:
    """Token -> index; None: not known before the model is fetched or trained."""
    return vocabulary_of(root_json(pipeline, ref, "tokenizer.json"))
