"""Loads the models of a stage, and saves its output so that it loads alone."""

import copy
import json
import logging
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lineage.artifact import Kind
from lineage.errors import ConfigError, DataError, PipelineError
from lineage.source.model_files import (
    REWARD_MODEL_ADVICE,
    quantization_format,
    read_json,
    weight_places,
    why_no_reward_model,
)
from tasks.context import Metrics
from tasks.data.kinds import TEXT, tokens_of
from tasks.model.adapter_files import (
    ADAPTER_DIR,
    Base,
    Intake,
    base_and_adapters,
    intake,
    plain_config,
    rounding_of_base,
    save_adapter,
)
from tasks.model.fetch_model import require_all_weights
from tasks.model.merging import (
    Golden,
    Merged,
    Places,
    add_weights,
    compared,
    golden_texts_for,
    golden_values,
    merge_adapters,
    names_lost,
    places_of,
    read_tensor,
    require_same_values,
    tolerance_of,
)
from tasks.model.positions import fix_length, no_scores, reads_padding, scale_by_row, why_not_sampled
from tasks.model.remote_code import local_options, trusts
from tasks.model.tokenizers import copy_tokenizer_files, require_ends, tokenizer_of
from tasks.model.vision import see_by_row
from tasks.recipe import Input, TrainingRecipe
from tasks.train.models.freeze import TOWERS, untouched
from tasks.train.models.quantization import FORMATS, options_quantized_before, torch_dtype, why_not_on_quantized
from tasks.train.models.quantized_base import (
    Quantizer,
    detect_quantized_layers,
    fill_dequantized,
    is_quantized,
    keep_layout,
    require_gradient,
    step_in_fp32,
)
from tasks.train.sharding import Shards, is_divided, is_late, read_whole

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

    from tasks.context import TrainContext
    from tasks.data.tokens.tokenize_rows import TokenizedRows
    from tasks.train.kernels.machine import Held

# Fields of a generation config that only sampling reads, or only beam search.
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
_BEAMS = ("early_stopping", "length_penalty")

logger = logging.getLogger(__name__)
_GENERATION = "generation_config.json"
_CAPACITY = 1.2  # memory that a loaded model takes, of the size of its files
_CONFIG = "config.json"
_OF_TRAINERS = ("use_cache", "output_router_logits", "router_aux_loss_coef")  # they set these in a model's config
_LOADED = "_posttrain_settings"  # an attribute: these, as the model was loaded
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The model that a stage starts from, and its tokenizer."""

    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"


def load_config(directory: Path, **options: object) -> "PreTrainedConfig":
    """The config of a model in a directory.

    Raises:
        ConfigError: its class is the model's own code, which no source allows to run, or the file is not a config.
    """
    from transformers import AutoConfig

    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(directory, **local_options(directory), **options)
    except (ValueError, KeyError) as error:
        raise ConfigError(
            f"{directory}: its config.json cannot be loaded ({str(error).strip().partition(chr(10))[0]}); an "
            "architecture of transformers is accepted, or code of its own where the source is a hub id at a commit "
            "with trust_remote_code=true"
        ) from error
    return config


def load_policy(
    method: TrainingRecipe, policy: Input, ctx: "TrainContext", taken: Intake | None = None, held: "Held" = "fp32",
    *, late: bool = False,
) -> Policy:  # fmt: skip
    """A causal language model to train, in fp32, which optimizers need; bf16 is the trainer's autocast.

    Under QLoRA its linear layers, which are frozen, are in few bits.

    Args:
        taken: its ``carried`` adapters are left out; None: all are merged.
        held: how it will be held: see ``whole_model``.
        late: whole on each worker, if it is divided once it has its adapter.
    """
    require_trainable(method, policy, ctx)
    quantizer = Quantizer.of(method.quantization, method.precision, ctx)
    shards = None if late and is_late(method, ctx.resources) else Shards.of(ctx.resources)
    model = whole_model(Kind.CHECKPOINT, policy.path, quantizer=quantizer, taken=taken, held=held, shards=shards)
    _name_experts(model.config.get_text_config())
    if not getattr(type(method), "reads", TEXT).trained:  # it generates
        text = model.config.get_text_config().to_dict()
        if reads_padding(text):
            raise ConfigError(why_not_sampled(text["model_type"]))
        fix_length(model, method.max_length)
    tokenizer = tokenizer_of(policy.path)
    require_ends(tokenizer, policy.name, model.config.get_text_config().vocab_size)
    return Policy(model=model, tokenizer=tokenizer)


def _name_experts(config: "PreTrainedConfig") -> None:
    """Lets TRL count the experts of every mixture, and add no loss of routers to a model that has none.

    Some configs name their number otherwise than TRL reads it (Phi-3.5-MoE, Granite), and have a coefficient of that
    loss where all layers are dense (Granite 4, Doge).
    """
    name = next((each for each in _EXPERTS if getattr(config, each, None) is not None), None)
    if name is None or not getattr(config, name) or not getattr(config, "is_moe", True):
        if getattr(config, "router_aux_loss_coef", None):
            config.router_aux_loss_coef = 0.0
    elif name != _EXPERTS[0]:
        type(config).attribute_map = {**type(config).attribute_map, _EXPERTS[0]: name}


def load_reward_model(
    method: TrainingRecipe, policy: Input, ctx: "TrainContext", held: "Held" = "fp32", *, late: bool = False
) -> Policy:
    """The policy's backbone, as in ``load_policy``, under a new head with one output, initialized from the seed."""
    from transformers import set_seed

    require_trainable(method, policy, ctx)
    tokenizer = tokenizer_of(policy.path)
    config = load_config(policy.path, num_labels=1)
    require_ends(tokenizer, policy.name, config.get_text_config().vocab_size)
    set_seed(method.seed)
    quantizer = Quantizer.of(method.quantization, method.precision, ctx)
    shards = None if late and is_late(method, ctx.resources) else Shards.of(ctx.resources)
    model = whole_model(Kind.REWARD_MODEL, policy.path, config, quantizer=quantizer, held=held, shards=shards)
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    return Policy(model=model, tokenizer=tokenizer)


def load_value_model(method: TrainingRecipe, start: Input, ctx: "TrainContext") -> "PreTrainedModel":
    """A model for ``losses.rewards.token_values``: starts as the reward model, or the policy under a new head."""
    if start.kind == Kind.REWARD_MODEL:
        return whole_model(Kind.REWARD_MODEL, start.path, shards=Shards.of(ctx.resources))
    return load_reward_model(method, start, ctx).model


def repair_generation(model: "PreTrainedModel", policy: Input) -> None:
    """Removes fields without effect from a generation config that is invalid because of them.

    A config of the hub may set a temperature for greedy decoding. transformers refuses to save such a config once it is
    changed, as by a stop token, so the first checkpoint would fail.

    Raises:
        ConfigError: the config is invalid in another way.
    """
    if not model.can_generate():
        return
    config = model.generation_config
    try:
        config.validate(strict=True)
    except ValueError:
        unused = [
            *(_SAMPLING if config.do_sample is not True else ()),
            *(_BEAMS if config.num_beams in (None, 1) else ()),
        ]
        configured = [name for name in unused if getattr(config, name, None) is not None]
        for name in configured:
            setattr(config, name, None)
        logger.warning(
            "model=%s generation_config: removed %s, unused by its decoding", policy.name, ", ".join(configured)
        )
        try:
            config.validate(strict=True)
        except ValueError as error:
            raise ConfigError(
                f"the generation_config.json of {policy.name} is invalid, and could not be saved with the output: "
                f"{error}; fix that file"
            ) from error


def frozen(model: "PreTrainedModel") -> "PreTrainedModel":
    """The model with frozen weights and without dropout."""
    model.requires_grad_(False)
    model.eval()
    return model


def disable_dropout(model: "PreTrainedModel") -> None:
    """Switches off all dropout of a model, before an adapter is added: the adapter keeps its dropout."""
    from torch.nn import Dropout

    for module in model.modules():
        if isinstance(module, Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            # Dropout without a module, as in attention: attention_dropout, attn_dropout_p, resid_pdrop, layerdrop ...
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def load_model(model: Input, held: "Held" = "fp32", shards: Shards | None = None) -> "PreTrainedModel":
    """A finished policy or reward model, for inference.

    Args:
        held: see ``kernels.names_in_bf16``.
        shards: see ``whole_model``.
    """
    from tasks.train.kernels.machine import hold_in

    return hold_in(whole_model(model.kind, model.path, held=held, shards=shards), held)


def load_on_device(model: Input, ctx: "TrainContext") -> "PreTrainedModel":
    """``load_model`` for a stage that trains nothing."""
    return load_model(model, ctx.resources.frozen_dtype(None)).to(ctx.resources.device)


def require_trainable(method: TrainingRecipe, policy: Input, ctx: "TrainContext") -> None:
    """Requires that a policy that was quantized before can be trained as the method does."""
    base, adapters = base_and_adapters(policy.path)
    new = (*policy.source.added_tokens, *policy.source.special_tokens) if policy.source else ()
    if new and (method.adapter or method.freeze):  # of a hub id the plan may not know the tokenizer
        ids, config = tokenizer_of(policy.path).convert_tokens_to_ids(new), load_config(policy.path)
        tied = bool(config.get_text_config().tie_word_embeddings)
        if why := method.why_rows_stay(ids, weight_places(base), tied=tied):
            raise ConfigError(why)
    found = quantization_format(read_json(base, _CONFIG))
    if found is None or adapters:  # they are merged into the dequantized base
        return
    reason = why_not_on_quantized(
        found, adapter=method.adapter is not None, quantization=method.quantization,
        saves_adapter=method.save == "adapter", on_gpu=ctx.resources.gpus_per_worker > 0,
    )  # fmt: skip
    if reason:
        raise ConfigError(f"model={policy.name} is quantized ({found}): {reason}")


def whole_model(
    kind: Kind, directory: Path, config: "PreTrainedConfig | None" = None, *, last: Path | None = None,
    rounding: Mapping[str, object] | None = None, quantizer: Quantizer | None = None, taken: Intake | None = None,
    held: "Held" = "fp32", watch: "Callable[[PeftModel], None] | None" = None, shards: Shards | None = None,
) -> "PreTrainedModel":  # fmt: skip
    """A model in fp32, with every adapter merged; one without adapters that was quantized before stays so.

    Args:
        kind: a policy, or a reward model; of a policy's directory a reward model is its backbone under a new head.
        config: used in place of the directory's.
        last: one more adapter, merged after those of the directory.
        rounding: of the base of ``last`` (``Quantization.rounding``); None: the base is in full precision.
        quantizer: how its linear layers are rounded after the merge.
        taken: the base and the adapters, in place of those of the directory.
        held: weights are read into bf16 one by one, so that there is no copy in fp32: what ``kernels.hold_in`` would
            make of them. Adapters are merged in fp32 all the same, and weights are rounded from fp32.
        watch: called with the model before its last adapter is merged.
        shards: how workers divide it; None: each has all of it.

    Raises:
        ArtifactError: the base of an adapter is missing, or another model now.
    """
    from transformers import GenerationConfig

    base, merged = (taken.base, taken.merged) if taken else base_and_adapters(directory)
    merges = [(adapter, rounding_of_base(adapter)) for adapter in merged]
    merges += [(last, rounding)] if last else []
    if kind == Kind.REWARD_MODEL and config is None:
        why = why_no_reward_model(read_json(directory, _CONFIG), {directory, base, *(each for each, _ in merges)})
        if why:
            raise ConfigError(f"{directory} is no reward model: {why}; {REWARD_MODEL_ADVICE}")
        config = load_config(directory, num_labels=1)  # where the head is of an adapter, the base's says nothing of it
    config = config or load_config(directory)
    local = local_options(directory)
    in_parts = shards.reading() if shards and not (merges or quantizer) else nullcontext(dict[str, object]())
    read_whole()
    with _read_as("fp32" if merges or quantizer else held), in_parts as options:
        model = _full_model(kind, base, config, quantizer if not merges else None, {**local, **options})
    if merges and is_quantized(model):  # before; no format can hold the sum of its weights and an adapter's
        model = _dequantized(model)
    for number, (adapter, rounded) in enumerate(merges, start=1):
        if rounded:
            of_base = Quantizer.like(rounded)
            model = fill_dequantized(model, of_base.finish(of_base.applied(model)))
        adapted = _adapted(model, adapter)
        if watch and number == len(merges):
            watch(adapted)
        model = merge_adapters(adapted, golden_texts_for(model, (directory, base)), str(adapter)).model
        model.requires_grad_(True)  # PEFT froze the base
    if (merges or base != directory) and (directory / _GENERATION).exists() and model.can_generate():
        model.generation_config = GenerationConfig.from_pretrained(directory)
    if quantizer:
        model = quantizer.finish(quantizer.applied(model) if merges else model)
    return shards.divide(model) if shards and not is_divided(model) else model


@contextmanager
def _read_as(held: "Held") -> Iterator[None]:
    """Has transformers cast each weight as it reads it, where ``kernels.hold_in`` would.

    ``dtype=`` would cast buffers too, such as the factor of Gemma's embeddings.
    """
    import torch
    from transformers import PreTrainedModel

    from tasks.train.kernels.machine import names_in_bf16

    plain = PreTrainedModel._get_dtype_plan

    def plan(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
        if "quantization_config" in model.config:
            return plain(model, dtype)  # type: ignore[no-any-return]
        return {f"^{re.escape(name)}$": torch.bfloat16 for name in names_in_bf16(model, held)}

    PreTrainedModel._get_dtype_plan = plan
    try:
        yield
    finally:
        PreTrainedModel._get_dtype_plan = plain


def _class_for(kind: Kind, config: "PreTrainedConfig") -> "type[_BaseAutoModelClass]":
    """The auto class that loads all of a model.

    Of a model of text and images transformers has no causal class, or one of its text part alone, which would lose the
    rest: then it is the class that also reads images, and rows of text use its text part.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSequenceClassification
    from transformers.models.auto import modeling_auto

    known, is_policy = type(config), kind == Kind.CHECKPOINT
    causal, scored = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING, modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    is_composite = config.get_text_config() is not config and not getattr(config, "auto_map", None)
    if is_composite and not is_policy and known not in scored:
        _give_scores(config)
    found: type[_BaseAutoModelClass] = AutoModelForCausalLM if is_policy else AutoModelForSequenceClassification
    is_whole = known in causal and not (is_composite and causal[known].config_class is not known)
    if is_policy and not is_whole and known in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        found = AutoModelForImageTextToText
    elif is_policy and known not in causal and not getattr(config, "auto_map", None):
        raise ConfigError(
            f"transformers has no class of type {config.model_type} that predicts the next token; a causal language "
            "model is accepted, such as llama or qwen3; start from one"
        )
    return found


def _give_scores(config: "PreTrainedConfig") -> None:
    """Gives a type of models that read images a class with a head for scores, made as transformers makes it for others.

    Raises:
        ConfigError: transformers has no such type.
    """
    from transformers import AutoModelForSequenceClassification
    from transformers import conversion_mapping as conversion
    from transformers.modeling_layers import GenericForSequenceClassification
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    if (known := type(config)) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        raise ConfigError(no_scores(config.model_type))
    whole = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[known]
    base = next(each for each in whole.__mro__ if each.__name__.endswith("PreTrainedModel"))
    name = whole.__name__.partition("For")[0] + "ForSequenceClassification"
    # Of another module, transformers would not rename the weights of published files.
    own = {"__module__": whole.__module__, "config_class": known}
    if (names := conversion.get_checkpoint_conversion_mapping(whole.__name__)) is not None:
        conversion.register_checkpoint_conversion_mapping(name, names, overwrite=True)
    scored = type(name, (GenericForSequenceClassification, base), own)
    AutoModelForSequenceClassification.register(known, scored, exist_ok=True)  # else it takes no config of its own


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What the end of a training needs of its input's files, which may change meanwhile.

    Args:
        directory: copies of the tokenizer's and the processor's files.
        weights: the files of the tensors of the model that was loaded.
    """

    directory: Path
    weights: Places

    @classmethod
    def of(cls, policy: Path, work_dir: Path) -> "Kept":
        directory = work_dir / "kept"
        directory.mkdir(parents=True, exist_ok=True)
        copy_tokenizer(policy, directory)
        return cls(directory=directory, weights=places_of(base_and_adapters(policy)[0]))

    def write(self, output: Path) -> None:
        """Copies the tokenizer's and the processor's files."""
        shutil.copytree(self.directory, output, dirs_exist_ok=True)


def require_base(ctx: "TrainContext") -> None:
    """Requires that weights which are read again at the end of a stage are those that it loaded.

    Raises:
        PipelineError: they are not; the last step of a training is saved as a checkpoint then.
    """
    if changed := ctx.changed_models():
        raise PipelineError(
            f"{next(iter(changed.values()))} has changed since the stage loaded it, and the output needs weights of it "
            "again; the last step of a training is kept as a checkpoint: restore the files, and run again, which "
            "resumes from there"
        )


def save_whole(
    model: "PreTrainedModel", base: Path, output: Path, before: Places | None = None,
    require: Callable[[], None] = lambda: None, *, own: bool = False,
) -> dict[str, float]:  # fmt: skip
    """Saves a model with all weights of the one that it was made from: those that were not trained, byte for byte.

    A class may ignore weights of its model's files, as a head for several tokens at once (``mtp.*``), and text does not
    reach a vision tower: both are copied. What a reward model has no place for, as the head over the vocabulary, is
    logged and counted.

    Args:
        base: the directory that the model was loaded from.
        before: the files of its tensors then; None: as they are now.
        require: is called before weights of the base are read.
        own: all weights of the model are saved, a vision tower too: an adapter or a cast may have changed it.

    Returns:
        The number of weights that are left out, as a metric.

    Raises:
        PipelineError: a weight of the base is neither in the output nor logged as left out.
    """
    unread = set[str]() if own else untouched(model)
    if (
        model.get_output_embeddings() is None
    ):  # of the language model, no name says what a reward model has no place for
        unread = {name for name in unread if any(word in name for word in TOWERS)}
    places = {each.data_ptr() for name, each in model.named_parameters() if name in unread} - {0}  # of a tied head too
    state = (
        {
            name: each
            for name, each in model.state_dict().items()
            if name not in unread and each.data_ptr() not in places
        }
        if unread
        else None
    )
    _restore_settings(model)
    model.save_pretrained(output, safe_serialization=True, state_dict=state)
    before, after = before or places_of(base), places_of(output)
    lost, dropped = names_lost(before, after, model), set[str]()
    if model.get_output_embeddings() is None:
        dropped = {name for name in lost if not any(_in_file(each, name, model) for each in unread)}
        if dropped:
            logger.warning("reward_model=%s left_out=%s", output, ", ".join(sorted(dropped)))
        _forget_heads(output, dropped)
        lost -= dropped
    if lost:
        require()
        logger.info("copied=%d weights that were not trained: %s", len(lost), ", ".join(sorted(lost)[:8]))
        add_weights(output, {name: read_tensor(before, name) for name in sorted(lost)})
    still = names_lost(before, places_of(output), model) - dropped
    if still:
        raise PipelineError(f"{output} lacks weights of {base}: {', '.join(sorted(still)[:8])}")
    return {"weights_left_out": float(len(dropped))} if dropped else {}


def _in_file(parameter: str, name: str, model: "PreTrainedModel") -> bool:
    """Whether a parameter is that of a file's name: files may name a part without or under the model's prefix."""
    prefix = f"{model.base_model_prefix}."
    return parameter == name or parameter.removeprefix(prefix) == name.removeprefix(prefix)


def _restore_settings(model: "PreTrainedModel") -> None:
    """Gives the config the settings that it was loaded with, in place of those of the training."""
    for config, name, value in vars(model).get(_LOADED, ()):
        setattr(config, name, value)


def _forget_heads(output: Path, dropped: "set[str]") -> None:
    """Makes a config true whose model has no head for several tokens at once any more."""
    if any(name.startswith("mtp.") for name in dropped):
        config = read_json(output, _CONFIG)
        assert isinstance(config, dict)
        for part in (config, config.get("text_config")):
            if isinstance(part, dict) and "mtp_num_hidden_layers" in part:
                part["mtp_num_hidden_layers"] = 0
        (output / _CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _full_model(
    kind: Kind, directory: Path, config: "PreTrainedConfig", quantizer: Quantizer | None, local: Mapping[str, object]
) -> "PreTrainedModel":
    import torch
    from trl.trainer.reward_trainer import suppress_seqcls_warning

    auto = _class_for(kind, config)
    options: dict[str, object] = {}
    found = quantization_format(read_json(directory, _CONFIG))
    if found:
        config = copy.deepcopy(config)
        config.quantization_config = load_config(directory).quantization_config
        options = options_quantized_before(found)
    elif quantizer:
        with torch.device("meta"):
            empty = auto.from_config(config, trust_remote_code=local["trust_remote_code"])
        options = quantizer.options(quantizer.kept(empty))
    with suppress_seqcls_warning():  # a new reward model is expected to have a new head
        loaded: tuple[PreTrainedModel, Mapping[str, Iterable[str]]] = auto.from_pretrained(
            directory, config=config, dtype=torch.float32, use_safetensors=True, output_loading_info=True, **local,
            **options,
        )  # fmt: skip
    model, info = loaded
    require_all_weights(directory, model, info["missing_keys"], has_head=kind == Kind.CHECKPOINT)
    if kind == Kind.REWARD_MODEL and not isinstance(getattr(model, "score", None), torch.nn.Linear):
        raise ConfigError(
            f"{directory}: {type(model).__name__} scores rows by more than one linear layer; a model whose class of "
            "transformers has such a head alone is accepted, such as llama or qwen3; start from one"
        )
    for name in ("distributed_config", "hf_device_map"):  # transformers' own sharding, which is not ours
        vars(model).pop(name, None)
        vars(model.config).pop(name, None)
    if found:
        keep_layout(model)
        require_gradient(model)
    if model.base_model is model and hasattr(
        model, "model"
    ):  # Llama 4 names its backbone otherwise than its class says
        model.base_model_prefix = "model"
    configs = (model.config, model.config.get_text_config())
    vars(model)[_LOADED] = [
        (each, name, getattr(each, name)) for each in configs for name in _OF_TRAINERS if hasattr(each, name)
    ]
    scale_by_row(model)
    see_by_row(model)
    if not getattr(model, "accepts_loss_kwargs", True):
        # Classes that also read images say so of their older forward; theirs hands the number of tokens of the step
        # to the loss. Without it, micro batches of few tokens would count as much as those of many.
        model.accepts_loss_kwargs = True
    return model


def _dequantized(model: "PreTrainedModel") -> "PreTrainedModel":
    """The same model in fp32."""
    import torch
    from transformers.initialization import no_init_weights

    with torch.random.fork_rng(devices=[]), no_init_weights():
        plain = type(model)(plain_config(model)).to(torch.float32)
    plain.tie_weights()
    plain.name_or_path = plain.config.name_or_path = model.name_or_path
    if plain.can_generate():
        plain.generation_config = model.generation_config
    return fill_dequantized(plain, model)


def _adapted(model: "PreTrainedModel", adapter: Path) -> "PeftModel":
    from peft import PeftConfig, PeftModel

    detect_quantized_layers(False)
    config = PeftConfig.from_pretrained(adapter)
    config.task_type = None  # also merges a policy's adapter into its backbone under a reward model's head
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Found missing adapter keys")
            adapted = PeftModel.from_pretrained(model, adapter, config=config, is_trainable=True)
            step_in_fp32(adapted)  # PEFT copies modules in the dtype of the base, and rounds the saved weights to it
            loaded = adapted.load_adapter(str(adapter), "default")  # `from_pretrained` only warns of missing weights
    except (RuntimeError, ValueError) as error:  # of torch: shapes that differ; of PEFT: no such layers
        raise _misfit(model, adapter, " ".join(str(error).split())[:300]) from error
    # A policy's adapter may be on the head, which its backbone under a reward model's head does not have.
    apart = [*loaded.missing_keys, *(loaded.unexpected_keys if model.get_output_embeddings() is not None else ())]
    if apart:
        raise _misfit(model, adapter, f"{len(apart)} weights are in one of the two alone, such as {apart[0]}")
    return adapted


def _misfit(model: "PreTrainedModel", adapter: Path, cause: str) -> ConfigError:
    return ConfigError(
        f"{adapter} does not fit the model {model.name_or_path}: {cause}; the base that it was trained on is accepted; "
        "set sources.base.base_model=<that model>"
    )


def save_output(
    method: TrainingRecipe, model: "PreTrainedModel | PeftModel", policy: Input, ctx: "TrainContext", kept: Kept,
    start: "Mapping[str, Tensor] | None" = None, prompts: Golden = (),
) -> Metrics:  # fmt: skip
    """Writes the trained model, with the tokenizer and chat template of its input; rank 0 only.

    A LoRA is merged into the weights, and also saved alone in ``adapter/``; with ``save=adapter`` only the adapter is
    written, and it names its base. An adapter that was trained on a base in few bits is merged into the input base in
    full precision, and then differs from the model in training by the quantization error of the base; or, with
    ``quantization.merge=dequantized``, into the weights that it was trained on. Both ways of saving are the same model
    for the next stage and for serving.

    Args:
        kept: the files of its input as they were loaded.
        start: weights of an adapter before the first step, where its initialization changed the base.
        prompts: golden ones, which are compared before and after a merge.

    Returns:
        Golden values before and after a merge, and the number of weights that are left out, as metrics.

    Raises:
        PipelineError: what was merged, or what a user would load, is another model than the trained one.
    """
    from peft import PeftModel

    from tasks.train.kernels.machine import hold_in

    fix_length(model, None)  # as a user loads it
    merged = None
    if isinstance(model, PeftModel):
        base, alone = intake(method, policy).beneath or Base.of(policy), method.save == "adapter"
        directory = ctx.output_dir if alone else ctx.output_dir / ADAPTER_DIR
        if alone:
            base = replace(base, rounding=method.quantization.rounding() if method.quantization else None)
        save_adapter(model, directory, base, start)
        if alone:
            base.write(directory)
            whole = model.get_base_model()
            _restore_settings(whole)
            plain_config(whole).save_pretrained(directory)
            if whole.can_generate():
                whole.generation_config.save_pretrained(directory)
        require_adapter_loads(method, model, policy, ctx, directory, prompts)
        if alone:
            kept.write(directory)
            return {}
        merged = _merge(method, model, policy, ctx, prompts)
        saved = merged.model
    else:
        saved = hold_in(model, method.optimizer.weights) if method.optimizer.weights else model
    trained_from = base_and_adapters(policy.path)[0]
    metrics = save_whole(saved, trained_from, ctx.output_dir, kept.weights, partial(require_base, ctx))
    kept.write(ctx.output_dir)
    require_output_loads(method.produces, saved, ctx.output_dir, prompts, may_run=trusts(policy.path))
    if merged:
        is_reward_model = method.produces == Kind.REWARD_MODEL
        metrics |= compared(merged.before, merged.after, is_reward_model=is_reward_model)
    return metrics


def _merge(
    method: TrainingRecipe, model: "PeftModel", policy: Input, ctx: "TrainContext", prompts: Golden
) -> Merged:  # fmt: skip
    """The model to write, in the dtype that it is written in."""
    from tasks.train.kernels.machine import hold_in

    base, adapter = model.get_base_model(), ctx.output_dir / ADAPTER_DIR
    dtype = ctx.resources.frozen_dtype(method.precision)
    if not is_quantized(base):
        found = merge_adapters(model, prompts, str(adapter))
        return found._replace(model=hold_in(found.model, dtype))
    before = golden_values(model, prompts)
    require_base(ctx)
    taken = intake(method, policy) if method.adapter_in == "continue" else None
    setting = method.quantization
    rounding = setting.rounding() if setting else None
    whole = whole_model(method.produces, policy.path, plain_config(base), last=adapter, rounding=rounding, taken=taken)
    if base.can_generate():
        whole.generation_config = base.generation_config
    whole = hold_in(whole, dtype)
    after = golden_values(whole, prompts)
    # Else the merged model differs by the rounding of the base in training, or of what its layers read.
    if setting and rounding and not FORMATS[setting.format].rounds_inputs:
        remedy = "the adapter is saved beside it: set quantization.merge=original, or save=adapter"
        require_same_values(before, after, tolerance_of(model, before, prompts), f"merging {adapter}", remedy)
    return Merged(whole, before, after)


def require_output_loads(
    kind: Kind, model: "PreTrainedModel", directory: Path, prompts: Golden, *, may_run: bool = False
) -> None:
    """Loads a whole model as a user would, and requires the golden values of the one that was written.

    Args:
        model: in memory, in the dtype that it was written in.
        may_run: whether it may run code of its own.

    Raises:
        PipelineError: it is another model.
    """
    if not _has_capacity(directory):
        return
    model.set_attn_implementation("eager")  # every model and device has it
    loaded, info = _class_for(kind, model.config).from_pretrained(
        directory, use_safetensors=True, trust_remote_code=may_run, output_loading_info=True,
        attn_implementation="eager",
    )  # fmt: skip
    scale_by_row(loaded)  # else dynamic NTK reads a row by the longest one before
    lost = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
    if lost:
        raise PipelineError(
            f"{directory} was written and does not load as it was trained: {len(lost)} weights are not in its files or "
            f"have another shape, such as {lost[0]}; every weight of the trained model is accepted; report its "
            "config.json"
        )
    written = dict(model.named_parameters())
    apart = [name for name, each in loaded.named_parameters() if name in written and _differ(each, written[name])]
    if apart:
        raise PipelineError(
            f"{directory} loads with other weights than it was written with: {len(apart)} differ, such as {apart[0]}; "
            f"equal bits are accepted; {_LOADS_ELSE}"
        )
    before = golden_values(model, prompts)
    _require_same(before, golden_values(_placed(loaded, model, directory), prompts), model, directory)


def _differ(loaded: "Tensor", written: "Tensor") -> bool:
    """Whether weights of one dtype are not equal to the bit; a model of two dtypes loads in one."""
    import torch

    return loaded.dtype == written.dtype and not torch.equal(loaded, written.to(loaded.device))


def require_adapter_loads(
    method: TrainingRecipe, model: "PeftModel", policy: Input, ctx: "TrainContext", adapter: Path, prompts: Golden
) -> None:
    """Loads an adapter on its base, and requires the golden values of the model that was trained.

    A base that was rounded to few bits in training is in full precision here, as in a user's program. Then the adapter
    must move each golden value as it does in training.

    Raises:
        PipelineError: it is another model.
    """
    from transformers import set_seed

    if changed := ctx.changed_models():
        logger.warning(
            "adapter=%s state=not loaded to check it: %s has changed since it was loaded", adapter,
            next(iter(changed.values())),
        )  # fmt: skip
        return
    if not _has_capacity(policy.path):
        return
    trained = model.get_base_model()
    trained.set_attn_implementation("eager")
    taken = intake(method, policy)
    dtype = "fp32" if is_quantized(trained) else ctx.resources.frozen_dtype(method.precision)
    is_plain = not taken.merged and not quantization_format(read_json(taken.base, _CONFIG))
    if method.produces == Kind.CHECKPOINT and is_plain and method.adapter_in != "stack":
        base: PreTrainedModel = _class_for(method.produces, load_config(taken.base)).from_pretrained(
            taken.base, use_safetensors=True, dtype=torch_dtype(dtype), **local_options(policy.path)
        )
    else:
        config = load_config(policy.path, num_labels=1) if method.produces == Kind.REWARD_MODEL else None
        set_seed(method.seed)  # of the head below that of the adapter
        continued = taken if method.adapter_in == "continue" else None
        base = whole_model(method.produces, policy.path, config, taken=continued, held=dtype)
    if method.produces == Kind.REWARD_MODEL:  # the base's own config may say that the score is read elsewhere
        base.config.get_text_config().pad_token_id = trained.config.get_text_config().pad_token_id
    base.set_attn_implementation("eager")
    loaded = _adapted(_placed(base, trained, policy.path), adapter)
    _require_same_adapter(model, loaded, adapter)
    before, after = golden_values(model, prompts), golden_values(loaded, prompts)
    if not is_quantized(trained):
        most = tolerance_of(model, before, prompts)
        require_same_values(before, after, most, f"saving and loading {adapter}", _LOADS_ELSE)
        return
    with model.disable_adapter(), loaded.disable_adapter():
        without = golden_values(model, prompts), golden_values(loaded, prompts)
    moved = [
        [one - two for one, two in zip(*each, strict=True)] for each in ((before, without[0]), (after, without[1]))
    ]
    most = max(tolerance_of(trained, before), max(map(abs, moved[0])) / 2)
    require_same_values(moved[0], moved[1], most, f"loading {adapter} without the rounding of its base", _LOADS_ELSE)


def _require_same_adapter(trained: "PeftModel", loaded: "PeftModel", place: Path) -> None:
    """Requires that a loaded adapter has the weights of the trained one, however little they change the model.

    One whose initialization changed the base is saved with the rows of its start behind its own.
    """
    from peft import get_peft_model_state_dict

    ours, theirs = (get_peft_model_state_dict(each, adapter_name="default") for each in (trained, loaded))
    for name, weight in ours.items():
        found = theirs.get(name)
        part = None if found is None else found[tuple(map(slice, weight.shape))].to(weight)
        if part is None or part.shape != weight.shape or not part.equal(weight):
            raise PipelineError(
                f"{place} was written and loads with another {name} than was trained; equal bits are accepted; "
                f"{_LOADS_ELSE}"
            )


_LOADS_ELSE = "nothing is committed: run the stage again, or report the config.json and adapter_config.json"


def _require_same(before: "Sequence[float]", after: "Sequence[float]", model: "PreTrainedModel", place: Path) -> None:
    require_same_values(before, after, tolerance_of(model, before), f"saving and loading {place}", _LOADS_ELSE)


def _placed(loaded: "PreTrainedModel", like: "PreTrainedModel", directory: Path) -> "PreTrainedModel":
    """On the device of another model, where it has the memory for both."""
    import torch

    device = like.device
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < _CAPACITY * _size(directory):
        return loaded
    return loaded.to(device)


def _has_capacity(directory: Path) -> bool:
    """Whether the memory holds a model once more; else its output is not loaded, which is logged."""
    import psutil

    need, free = _CAPACITY * _size(directory), psutil.virtual_memory().available
    if need > free:
        logger.warning(
            "output=unproven: %s takes %.1f GiB to load and %.1f GiB are free, so it is not loaded and compared",
            directory, need / 2**30, free / 2**30,
        )  # fmt: skip
    return need <= free


def _size(directory: Path) -> int:
    """Bytes of a model's weights."""
    base, _ = base_and_adapters(directory)
    return sum(path.stat().st_size for path in base.glob("*.safetensors"))


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copies all files of the tokenizer and its chat template, with its code where that may run."""
    copy_tokenizer_files(source, target)
    if trusts(source):
        for path in source.glob("*.py"):
            shutil.copyfile(path, target / path.name)


def require_embeddings(
    rows: "TokenizedRows", model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", spelled: Sequence[str] = ()
) -> None:
    """Requires that the model has an embedding for each token of the rows.

    Args:
        spelled: control tokens in the rows' texts; empty where ``control_tokens`` is set.
    """
    num_embeddings = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) <= num_embeddings:
        return
    for token in spelled:
        if tokenizer.convert_tokens_to_ids(token) >= num_embeddings:
            raise DataError(
                f"rows spell the token {token!r} (id {tokenizer.convert_tokens_to_ids(token)}), and the model has "
                f"{num_embeddings} embeddings; tokens that it has embeddings for are accepted; give it "
                f"one (sources.base.special_tokens=[{token!r}]), leave the token out of the rows, or set "
                "method.control_tokens=text, which trains its characters"
            )
    for number, row in enumerate(rows.examples):
        highest = max(tokens_of(row), default=0)
        if highest >= num_embeddings:
            token = str(tokenizer.convert_ids_to_tokens(highest))
            raise DataError(
                f"row {number} has the token {token!r} (id {highest}), and the model has {num_embeddings} embeddings; "
                f"tokens that it has embeddings for are accepted; give it one (sources.base.added_tokens=[{token!r}]), "
                "or leave the token out of the rows"
            )
