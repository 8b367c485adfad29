"""Checks of the models of a pipeline: files, chat templates, adapters, quantization and merges, without torch."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from flows.declare.pipeline import Pipeline, listed
from flows.planning.adapter_choice import local_model
from flows.planning.aliases import Champion
from lineage.artifact import ALIAS, QUICKSTART, SOURCE, Kind, Source
from lineage.errors import ConfigError
from lineage.filesystem.lock import unreliable_locks
from lineage.source.model_files import (
    REWARD_MODEL_ADVICE,
    awaits_weights,
    quantization_format,
    read_json,
    weight_places,
    why_no_reward_model,
)
from lineage.source.model_source import (
    OWN_TEMPLATES,
    ends_beyond,
    has_tokenizer,
    no_embedding,
    tokens_beyond,
    tokens_in_rows,
    vocabulary_of,
)
from lineage.source.peft_adapter import ADAPTER_CONFIG, base_source, is_peft
from lineage.source.sources import local_paths
from lineage.store import CACHE, Entry
from tasks.judgement.estimate import architecture
from tasks.merge import Merge
from tasks.method import Training
from tasks.model.adapter_files import ADAPTER_DIR
from tasks.model.chat_template import template_text
from tasks.model.fetch_model import CONFIG, checked_config, fetched_model, model_json
from tasks.model.merging import BASE, require_same_config, require_same_template, require_same_vocabulary, template_of
from tasks.quickstart import ROWS as QUICKSTART_ROWS
from tasks.recipe import without_verdict
from tasks.train.compatibility import check_compatible
from tasks.train.models.adapters import STACKED, why_not_stacked
from tasks.train.models.quantization import require_available, why_not_on_quantized

POLICY = "policy"


def root_of(pipeline: Pipeline, reference: str) -> str:
    """The source (``source:NAME``) or stage that a model's config and tokenizer come from."""
    return pipeline.model_roots.get(reference) or pipeline.key(reference)


def root_directory(pipeline: Pipeline, reference: str) -> Path | None:
    """Directory of the model of ``root_of``; None: a stage creates it, or it is not on this machine yet."""
    root = root_of(pipeline, reference)
    if not pipeline.is_source(root):
        return None
    return fetched_model(pipeline.sources[root.removeprefix(SOURCE)], pipeline.store / CACHE)


def root_config(pipeline: Pipeline, reference: str) -> Mapping[str, object]:
    """``config.json`` of the model of ``root_of``; empty: unknown or unreadable, which the stage reports."""
    found = root_json(pipeline, reference, CONFIG)
    return found if isinstance(found, dict) else {}


def root_json(pipeline: Pipeline, reference: str, name: str) -> object:
    """A JSON file of the model of ``root_of``; None: unknown or unreadable."""
    root = root_of(pipeline, reference)
    if not pipeline.is_source(root):
        return None
    return model_json(pipeline.sources[root.removeprefix(SOURCE)], pipeline.store / CACHE, name)


_SPLIT = ("held_out", "seed")  # fields that determine the split of a row


def check_store(pipeline: Pipeline) -> None:
    """Refuses a store without locks across hosts, since two hosts could write one output.

    Raises:
        ConfigError: hosts that share the store do not see each other's locks.
    """
    why = unreliable_locks(pipeline.store)
    if why:
        raise ConfigError(
            f"store={pipeline.store}: hosts that share it do not see each other's locks ({why}); put it on NFSv4 "
            "without that option, on Lustre or CephFS, or on a local disk"
        )


def check_models(pipeline: Pipeline) -> None:
    """Follows each model through the graph: checks that it is valid, that it has a chat template where one is needed,
    and that each training works on it.
    """
    has_template = {}
    for name in pipeline.used_sources():
        source = pipeline.sources[name]
        if source.kind == Kind.CHECKPOINT:
            has_template[SOURCE + name] = _source_has_template(name, source, pipeline.store / CACHE)
            _check_embeddings(name, source, pipeline.store / CACHE)
        elif source.kind == Kind.REWARD_MODEL:
            _check_reward_model(name, source)
        elif source.path.startswith(QUICKSTART) and source.path.removeprefix(QUICKSTART) not in QUICKSTART_ROWS:
            accepted = listed(source.path, [QUICKSTART + each for each in QUICKSTART_ROWS])
            raise ConfigError(f"sources.{name}.path={source.path}: no such rows; accepted: {accepted}")
    for name in pipeline.order():
        stage = pipeline.stages[name]
        installs = bool(getattr(stage.method, "chat_template", None))
        config = _policy_config(pipeline, name)
        _check_new_rows(pipeline, name, config)
        if config:
            check_compatible(f"stages.{name}", stage.method, stage.resources, config)
        check_quantization(name, pipeline, config)
        _check_adapter_in(name, pipeline)
        slot = stage.method.needs_template(stage.inputs)
        if slot and not has_template[pipeline.key(stage.inputs[slot])] and not installs:
            root = root_of(pipeline, stage.inputs[slot])
            _require_tokenizer(root.removeprefix(SOURCE), pipeline.sources.get(root.removeprefix(SOURCE)))
            root = root.replace(SOURCE, "sources.", 1)
            fields = [root, *([f"stages.{name}.method"] if hasattr(stage.method, "chat_template") else [])]
            raise ConfigError(
                f"stages.{name}.inputs.{slot}={stage.inputs[slot]}: that model comes from one without a chat template; "
                f"set {' or '.join(f'{field}.chat_template=chatml' for field in fields)}, "
                "or start from a model that has one"
            )
        policy_has = "policy" not in stage.inputs or has_template[pipeline.key(stage.inputs["policy"])]
        has_template[name] = policy_has or installs


def _check_reward_model(name: str, source: Source) -> None:
    """Checks a reward model on this machine; one on the hub is checked when it is loaded."""
    paths = local_paths(source.path)
    if not paths:
        return
    require_model_files(name, source, paths[0])
    why = None if is_peft(paths[0]) else why_no_reward_model(read_json(paths[0], CONFIG), paths[:1])
    if why:
        raise ConfigError(f"sources.{name}.path={source.path}: no reward model: {why}; {REWARD_MODEL_ADVICE}")


def _policy_config(pipeline: Pipeline, name: str) -> Mapping[str, object]:
    """Config of the model that a stage starts from; empty: unknown.

    Only the first stage sees a source's quantization: it saves a dequantized model.
    """
    config = root_config(pipeline, name)
    policy = pipeline.stages[name].inputs.get(POLICY)
    if policy is None or pipeline.is_source(policy):
        return config
    return {key: value for key, value in config.items() if key != "quantization_config"}


def _check_embeddings(name: str, source: Source, cache: Path) -> None:
    """Checks that the model has an embedding for each token that its template, or every row, has.

    A stage checks the other tokens of its rows before its first step.
    """
    config = model_json(source, cache, CONFIG)
    known = vocabulary_of(model_json(source, cache, "tokenizer.json"))
    for field, token in ends_beyond(source, known, model_json(source, cache, "tokenizer_config.json"), config).items():
        raise ConfigError(no_embedding(f"sources.{name}.path={source.path}", field, token, f"sources.{name}"))
    beyond = tokens_beyond(known, config)
    template = template_text(source.chat_template) if source.chat_template in OWN_TEMPLATES else None
    used = [token for token in beyond if token in tokens_in_rows(fetched_model(source, cache), template)]
    if used:
        raise ConfigError(
            f"sources.{name}.path={source.path}: its rows have the token {used[0]!r}, and the model has no embedding "
            "for it; a tokenizer with the model's tokens is accepted; give it a row "
            f"(sources.{name}.added_tokens=[{used[0]!r}]), or give the tokenizer that the model was trained with"
        )


def _check_new_rows(pipeline: Pipeline, name: str, config: Mapping[str, object]) -> None:
    """Checks that the rows of tokens which a source adds are trained: by this stage, or by one before it."""
    root, found = root_of(pipeline, name), architecture(config)
    if not pipeline.is_source(root):
        return
    source = pipeline.sources[root.removeprefix(SOURCE)]
    new = (*source.added_tokens, *source.special_tokens)
    known = vocabulary_of(root_json(pipeline, name, "tokenizer.json")) if new else None
    directory = local_model(source) if new else None
    weights = weight_places(directory) if directory else {}
    why, at = None, name
    while known and found and not pipeline.is_source(at):
        method = pipeline.stages[at].method
        if isinstance(method, Training):
            own = method.why_rows_stay([known[each] for each in new], weights, tied=found.tied)
            if own is None:
                return
            why = why or (own if at == name else None)
        at = pipeline.stages[at].inputs.get(POLICY, root)
    if why:
        for field in ("adapter", "freeze=null"):
            why = why.replace(field, f"stages.{name}.method.{field}")
        raise ConfigError(f"stages.{name}: {why}")


def _check_adapter_in(name: str, pipeline: Pipeline) -> None:
    """Checks that a stage that keeps its input's adapter gets one."""
    method = pipeline.stages[name].method
    kept = method.adapter_in if isinstance(method, Training) else None
    if not isinstance(method, Training) or kept not in ("continue", "stack"):
        return
    parent = pipeline.stages[name].inputs[POLICY]
    if pipeline.is_source(parent):
        _check_kept_source(name, parent.removeprefix(SOURCE), pipeline, method)
        return
    before = pipeline.stages[parent].method
    if isinstance(before, Training) and before.adapter is None:
        raise ConfigError(
            f"stages.{name}.method.adapter_in={kept}: stages.{parent} trains every weight, so that its output has no "
            f"adapter that could be kept; set stages.{name}.method.adapter_in=merge, or "
            f"stages.{parent}.method.adapter.type=lora"
        )
    if isinstance(before, Training) and before.adapter and kept == "stack" and before.adapter.type not in STACKED:
        raise ConfigError(
            f"stages.{name}.method.adapter_in=stack: stages.{parent} trains an adapter of type {before.adapter.type}, "
            f"and only a LoRA can stay under another one; set stages.{name}.method.adapter_in=merge"
        )
    if isinstance(before, Training) and before.adapter and kept == "stack" and before.adapter.trainable_token_indices:
        raise ConfigError(
            f"stages.{name}.method.adapter_in=stack: stages.{parent} trains rows of the embedding "
            "(adapter.trainable_token_indices), which PEFT keeps for the adapter in training alone; set "
            f"stages.{name}.method.adapter_in=merge"
        )


def _check_kept_source(name: str, source: str, pipeline: Pipeline, method: Training) -> None:
    """Checks a source whose adapter a stage keeps, where it is on this machine."""
    found = pipeline.sources[source]
    directory = fetched_model(found, pipeline.store / CACHE)
    if directory is None or found.path.startswith(ALIAS):
        return
    kept, where = method.adapter_in, f"stages.{name}.method.adapter_in"
    own = directory if (directory / ADAPTER_CONFIG).exists() else directory / ADAPTER_DIR
    config = read_json(own, ADAPTER_CONFIG)
    if not isinstance(config, dict):
        raise ConfigError(
            f"{where}={kept}: sources.{source}.path={found.path} has no adapter that could be kept; an adapter of "
            f"PEFT, or an output of a stage with an adapter, is accepted; set {where}=merge"
        )
    reason = why_not_stacked(config) if kept == "stack" else None
    if reason:
        raise ConfigError(
            f"{where}=stack: the adapter of sources.{source}.path={found.path} {reason}; set {where}=merge"
        )
    if kept == "continue" and method.save == "adapter" and is_peft(directory):
        raise ConfigError(
            f"{where}=continue with save=adapter: sources.{source}.path={found.path} is an adapter of PEFT, and its "
            f"base is no artifact that the output could name; set stages.{name}.method.save=null, or {where}=merge"
        )


def check_quantization(name: str, pipeline: Pipeline, config: Mapping[str, object]) -> None:
    """Checks that the packages for a quantized base are installed and its format is supported."""
    method, resources = pipeline.stages[name].method, pipeline.stages[name].resources
    if not isinstance(method, Training):
        return
    on_gpu = resources.gpus_per_worker > 0
    if method.quantization:
        require_available(method.quantization, on_gpu=on_gpu)
    found = quantization_format(config)
    reason = found and why_not_on_quantized(
        found, adapter=method.adapter is not None, quantization=method.quantization,
        saves_adapter=method.save == "adapter", on_gpu=on_gpu,
    )  # fmt: skip
    if reason:
        raise ConfigError(f"stages.{name}: its model is quantized ({found}): {reason}")


def check_replay(pipeline: Pipeline) -> None:
    """Checks that ``replay_share`` and the slot ``replay`` are either both set or both unset."""
    for name, stage in pipeline.stages.items():
        if "replay" not in stage.method.consumes:
            continue
        share, parent = stage.method.recipe().get("replay_share"), stage.inputs.get("replay")
        if share is not None and parent is None:
            raise ConfigError(
                f"stages.{name}.method.replay_share={share}: there are no old rows to replay; set "
                f"stages.{name}.inputs.replay=<a source with path alias:NAME/{name}>, or replay_share=null"
            )
        if parent is not None and share is None:
            raise ConfigError(
                f"stages.{name}.inputs.replay={parent}: nothing says how much of it is replayed; set "
                f"stages.{name}.method.replay_share=0.3, or remove the slot with ~stages.{name}.inputs.replay"
            )


def check_same_split(pipeline: Pipeline, champions: Mapping[str, Champion]) -> None:
    """Checks that replayed rows have the split settings of the new ones; else groups could be in both splits.

    Args:
        pipeline: with resolved aliases.
    """
    for name, stage in pipeline.stages.items():
        parent = stage.inputs.get("replay")
        if parent is None:
            continue
        old, new = _recipe_behind(name, parent, pipeline, champions), stage.method.recipe()
        if any(old.get(field) != new.get(field) for field in _SPLIT):
            before, now = (" and ".join(f"{field}={recipe.get(field)}" for field in _SPLIT) for recipe in (old, new))
            raise ConfigError(
                f"stages.{name}.inputs.replay={parent}: the old rows were split with {before}, the new ones would be "
                f"with {now}: rows of one prompt or group could be trained on and measured; set the old values as "
                f"stages.{name}.method.{_SPLIT[0]} and {_SPLIT[1]}, or start from base with the whole data"
            )


def _recipe_behind(
    name: str, parent: str, pipeline: Pipeline, champions: Mapping[str, Champion]
) -> Mapping[str, object]:
    """The recipe of the data stage that prepared the replayed rows."""
    if not pipeline.is_source(parent):
        return pipeline.stages[parent].method.recipe()
    source = parent.removeprefix(SOURCE)
    path = pipeline.sources[source].path
    entry = champions[source].entry if source in champions else Entry(Path(path).expanduser().parent)
    manifest = entry.manifest()
    if manifest is None:
        raise ConfigError(
            f"stages.{name}.inputs.replay={parent}: nothing says how the rows in {path} were split; "
            f"give alias:NAME/{name}, or the output/ of a data stage in its place in a store"
        )
    return manifest.recipe


def _source_has_template(name: str, source: Source, cache: Path) -> bool:
    """Whether a model source has a chat template; True for a hub id, which is checked after it is fetched."""
    if source.model_kwargs:
        config = model_json(replace(source, model_kwargs={}), cache, CONFIG)
        if isinstance(config, dict):
            checked_config(name, config, source.model_kwargs)
    paths = local_paths(source.path)
    if paths:
        require_model_files(name, source, paths[0])
    if source.chat_template is not None:
        return True
    if source.tokenizer is not None:
        paths = local_paths(source.tokenizer)
    elif paths and is_peft(paths[0]) and not has_tokenizer(paths[0]):
        return _source_has_template(name, base_source(name, source, paths[0]), cache)
    return not paths or _has_template(paths[0])


def require_model_files(name: str, source: Source, directory: Path) -> None:
    """Requires that a directory holds a model, or one whose weights come later, or an adapter (ConfigError)."""
    if is_peft(directory) or awaits_weights(directory):
        return
    for pattern, what in ((CONFIG, "no config.json"), ("*.safetensors", "no weights in safetensors")):
        if not any(directory.glob(pattern)):
            raise ConfigError(
                f"sources.{name}.path={source.path}: {what} in it; "
                "a model is a directory as model.save_pretrained and tokenizer.save_pretrained write it, "
                "or an adapter as PEFT saves it"
            )


def awaited_weights(pipeline: Pipeline, stages: Collection[str]) -> list[str]:
    """A line for each model that stages read and that has no weights yet: a plan needs none."""
    read = {pipeline.key(ref) for name in stages for ref in pipeline.stages[name].inputs.values()}
    sources = {name: each for name, each in pipeline.sources.items() if SOURCE + name in read}
    return [
        f"sources.{name}.path={each.path}: no weights yet in {directory.name}: the plan is by its config.json, and a "
        "run needs them (*.safetensors); download them into it"
        for name, each in sources.items()
        if each.kind == Kind.CHECKPOINT and (directory := local_model(each)) and awaits_weights(directory)
    ]


def _require_tokenizer(name: str, source: Source | None) -> None:
    """Says of a model on this machine that it has no tokenizer, and not that this has no template."""
    paths = local_paths(source.path) if source and source.tokenizer is None else []
    if source and paths and not is_peft(paths[0]) and not has_tokenizer(paths[0]):
        raise ConfigError(
            f"sources.{name}.path={source.path}: no tokenizer in it, such as tokenizer.json; copy it there, as "
            f"tokenizer.save_pretrained writes it, or set sources.{name}.tokenizer=DIRECTORY, or a hub id"
        )


def _has_template(directory: Path) -> bool:
    if (directory / "chat_template.jinja").exists():
        return True
    config = read_json(directory, "tokenizer_config.json")
    return isinstance(config, dict) and bool(config.get("chat_template"))


def check_merges(pipeline: Pipeline) -> None:
    """Checks that each merge has its models, and that they are compatible as far as known.

    Raises:
        ConfigError: a slot, a weight, a base or an adapter is missing, or architectures, vocabularies or templates
            differ.
    """
    for name, stage in pipeline.stages.items():
        if isinstance(stage.method, Merge):
            try:
                models = without_verdict(stage.inputs)
                stage.method.check_inputs(models)
                _require_adapters(pipeline, stage.method, models)
                _check_alike(pipeline, models)
            except ConfigError as error:
                raise ConfigError(f"stages.{name}: {error}") from error


def _require_adapters(pipeline: Pipeline, method: Merge, inputs: Mapping[str, str]) -> None:
    """Checks that stages whose outputs are merged as adapters save adapters."""
    merges_own = method.combination is None and method.dtype is None
    if not merges_own and method.space != "adapters":
        return
    for slot, parent in inputs.items():
        made = None if pipeline.is_source(parent) else pipeline.stages[parent].method
        if isinstance(made, Training) and made.save is None:
            what = "combination=null merges an adapter into its base" if merges_own else "space=adapters"
            instead = "method.dtype=bf16 to convert a whole model" if merges_own else "method.space=weights"
            raise ConfigError(
                f"inputs.{slot}={parent}: {what}, and {parent} gives a whole model; set stages.{parent}.method.save="
                f"adapter, which needs an adapter (adapter=lora), or {instead}"
            )


def _check_alike(pipeline: Pipeline, inputs: Mapping[str, str]) -> None:
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
    """Config of a model; a trained model is dequantized."""
    config = dict(root_config(pipeline, reference))
    if not pipeline.is_source(reference):
        config.pop("quantization_config", None)
    return config


def _template(pipeline: Pipeline, reference: str) -> str | None:
    """The chat template of a model: the last one that a stage installs, or the source's; None: unknown."""
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
