"""Loading what a stage starts from, and saving what it made so that it loads alone."""

import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lineage.artifact import Kind
from lineage.errors import ConfigError
from tasks.recipe import Input, TrainingRecipe
from tasks.train.adapters import Base, base_and_adapters, plain_config, save_adapter
from tasks.train.quantization import FourBit, is_quantized, keep_layout, look_for_quantized, quantize_experts

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from tasks.context import TrainContext

# Copied byte for byte from a stage's input: a tokenizer that was used saves other bytes than it was loaded from.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates",
)
CHAT_TEMPLATE_FILE = "chat_template.jinja"
ADAPTER_DIR = "adapter"
# Architectures with a table of positions, learned or computed once; all others compute a position when they need it.
_FIRST_POSITION_IS_0 = (
    "bart", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "biogpt", "blenderbot", "blenderbot-small",
    "codegen", "ctrl", "electra", "ernie", "git", "gpt2", "gpt_bigcode", "gpt_neo", "gptj", "marian", "mbart",
    "megatron-bert", "mpt", "mvp", "openai-gpt", "opt", "pegasus", "plbart", "rembert", "roc_bert", "roformer", "trocr",
    "xlm",
)  # fmt: skip
# These begin to count behind the pad token's id, which is this one where a config states none.
_FIRST_POSITION_IS_BEHIND = {
    "camembert": 1, "data2vec-text": 1, "roberta": 1, "roberta-prelayernorm": 1, "xlm-roberta": 1,
    "xlm-roberta-xl": 1, "xmod": 1,
}  # fmt: skip
LEARNED_POSITIONS = frozenset({*_FIRST_POSITION_IS_0, *_FIRST_POSITION_IS_BEHIND})
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")
# Of a generation config: what only sampling reads, and what only beams do.
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
_BEAMS = ("early_stopping", "length_penalty")

logger = logging.getLogger(__name__)
_LOCAL = {"trust_remote_code": False, "local_files_only": True}
_GENERATION = "generation_config.json"


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A model and its tokenizer, as a stage starts from them."""

    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"


def load_tokenizer(policy: Input) -> "PreTrainedTokenizerBase":
    """The tokenizer of a model; a missing pad token is filled in memory only, padding is never trained."""
    return tokenizer_of(policy.path)


def tokenizer_of(directory: Path) -> "PreTrainedTokenizerBase":
    """As ``load_tokenizer``, of a directory that holds one."""
    from transformers import AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # of weights that are loaded and written: it fills logs, and says nothing
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        directory, trust_remote_code=False, local_files_only=True
    )
    if tokenizer.pad_token is None:
        rarest = tokenizer.convert_ids_to_tokens(max(tokenizer.get_vocab().values()))
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token or rarest
    return tokenizer


def load_policy(method: TrainingRecipe, policy: Input, ctx: "TrainContext") -> Policy:
    """A causal language model to train, in fp32: what optimizers step; bf16 is the trainer's autocast.

    Under QLoRA its linear layers, which are not trained, are in 4 bits.
    """
    model = whole_model(Kind.CHECKPOINT, policy.path, four_bit=FourBit.of(method, ctx))
    return Policy(model=model, tokenizer=load_tokenizer(policy))


def load_reward_model(method: TrainingRecipe, policy: Input, ctx: "TrainContext") -> Policy:
    """The policy's backbone, as ``load_policy`` has it, under a new head with one output, drawn from the seed."""
    from transformers import AutoConfig, set_seed

    tokenizer = load_tokenizer(policy)
    config = AutoConfig.from_pretrained(policy.path, num_labels=1, trust_remote_code=False, local_files_only=True)
    set_seed(method.seed)
    model = whole_model(Kind.REWARD_MODEL, policy.path, config, four_bit=FourBit.of(method, ctx))
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    return Policy(model=model, tokenizer=tokenizer)


def load_value_model(method: TrainingRecipe, start: Input, ctx: "TrainContext") -> "PreTrainedModel":
    """What ``tasks.train.rewards.token_values`` reads: begun as a reward model, or as a policy under a new head."""
    if start.kind == Kind.REWARD_MODEL:
        return whole_model(Kind.REWARD_MODEL, start.path)
    return load_reward_model(method, start, ctx).model


def repair_generation(model: "PreTrainedModel", given: Input) -> None:
    """Takes from a generation config what has no effect, where that keeps it from being saved.

    A config of the hub may state a temperature for greedy decoding. transformers refuses to save one that was changed,
    as by a stop token, and so would the first checkpoint.

    Raises:
        ConfigError: it is invalid in another way.
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
        stated = [name for name in unused if getattr(config, name, None) is not None]
        for name in stated:
            setattr(config, name, None)
        logger.warning("model=%s generation_config: removed %s, unused by its decoding", given.name, ", ".join(stated))
        try:
            config.validate(strict=True)
        except ValueError as error:
            raise ConfigError(
                f"the generation_config.json of {given.name} is invalid, and could not be saved with the output: "
                f"{error}; mend that file"
            ) from error


def require_positions(config: "PreTrainedConfig", max_length: int) -> None:
    """That a model has a position for every token of a row, where it looks positions up in a table.

    Raises:
        ConfigError: it has fewer, and would end with an IndexError at the first long row.
    """
    text = config.get_text_config()
    positions = learned_positions(text.to_dict())
    if positions is not None and max_length > positions:
        raise ConfigError(too_few_positions(max_length, positions, text.model_type))


def learned_positions(config: Mapping[str, object]) -> int | None:
    """How many tokens a model of such a ``config.json`` takes; None: no table limits it, or it states no size."""
    architecture = str(config.get("model_type"))
    found = next((config[name] for name in _POSITIONS if name in config), None)
    if architecture not in LEARNED_POSITIONS or not isinstance(found, int):
        return None
    if architecture not in _FIRST_POSITION_IS_BEHIND:
        return found
    pad = config.get("pad_token_id", _FIRST_POSITION_IS_BEHIND[architecture])
    return found - pad - 1 if isinstance(pad, int) else found


def too_few_positions(max_length: int, positions: int, model_type: str) -> str:
    """What is wrong, and what to do."""
    return (
        f"max_length={max_length}: the model ({model_type}) has a table of {positions} positions, and a longer row "
        f"would end its training; set max_length={positions} or less"
    )


def frozen(model: "PreTrainedModel") -> "PreTrainedModel":
    """The model, of which nothing is trained and no dropout is drawn."""
    model.requires_grad_(False)
    model.eval()
    return model


def disable_dropout(model: "PreTrainedModel") -> None:
    """Switches off all dropout of a model that has no adapter yet: that of an adapter stays."""
    from torch.nn import Dropout

    for module in model.modules():
        if isinstance(module, Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            # Of attention, which has no module for it: attention_dropout, attn_dropout_p, resid_pdrop, layerdrop ...
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def require_same_tokens(policy: Input, other: Input) -> None:
    """That another model reads the policy's tokens as the policy does.

    Raises:
        ConfigError: their tokenizers differ, naming a token.
    """
    ours, theirs = (load_tokenizer(each).get_vocab() for each in (policy, other))
    apart = differing_tokens(theirs, ours)
    if apart:
        raise ConfigError(
            f"{policy.name} and {other.name} have different tokenizers: {len(apart)} tokens differ, such as "
            f"{apart[0]!r} ({ours.get(apart[0])} and {theirs.get(apart[0])}); give a model that was trained from the "
            f"same base as {policy.name}"
        )


def differing_tokens(vocabulary: Mapping[str, int], known: Mapping[str, int]) -> list[str]:
    """The tokens of ``known`` that are missing in a vocabulary or have another id there, sorted.

    A model that has further tokens reads rows of ``known`` tokens as they are meant.
    """
    return sorted(token for token, index in known.items() if vocabulary.get(token) != index)


def load_model(given: Input) -> "PreTrainedModel":
    """A finished policy or reward model in fp32, to be asked."""
    return whole_model(given.kind, given.path)


def whole_model(
    kind: Kind,
    directory: Path,
    config: "PreTrainedConfig | None" = None,
    *,
    last: Path | None = None,
    four_bit: FourBit | None = None,
) -> "PreTrainedModel":
    """A model in fp32, with every adapter merged.

    Args:
        kind: a policy, or a reward model: of a policy's directory, its backbone under a head that is drawn now.
        config: where it is not that of the directory.
        last: one more adapter, that goes upon it.
        four_bit: how its linear layers are rounded once all is merged.

    Raises:
        ArtifactError: the base of an adapter is missing, or another model now.
    """
    from transformers import AutoConfig, GenerationConfig

    base, adapters = base_and_adapters(directory)
    adapters += [last] if last else []
    config = config or AutoConfig.from_pretrained(directory, **_LOCAL)
    model = _full_model(kind, base, config, four_bit if not adapters else None)
    for adapter in adapters:
        model = _merged(model, adapter)
    if adapters and (directory / _GENERATION).exists() and model.can_generate():
        model.generation_config = GenerationConfig.from_pretrained(directory)
    if four_bit:
        model = four_bit.applied(model) if adapters else model
        keep_layout(model)
        quantize_experts(model)
    return model


def _full_model(kind: Kind, directory: Path, config: "PreTrainedConfig", four_bit: FourBit | None) -> "PreTrainedModel":
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    from trl.trainer.reward_trainer import suppress_seqcls_warning

    auto = AutoModelForCausalLM if kind == Kind.CHECKPOINT else AutoModelForSequenceClassification
    with suppress_seqcls_warning():  # that the head of a new reward model is new
        model: PreTrainedModel = auto.from_pretrained(
            directory, config=config, dtype=torch.float32, use_safetensors=True, **_LOCAL,
            **(four_bit.options() if four_bit else {}),
        )  # fmt: skip
    return model


def _merged(model: "PreTrainedModel", adapter: Path) -> "PreTrainedModel":
    from peft import PeftConfig, PeftModel

    look_for_quantized(False)
    config = PeftConfig.from_pretrained(adapter)
    config.task_type = None  # a policy's adapter goes into its backbone also where that is under a reward model's head
    merged: PreTrainedModel = PeftModel.from_pretrained(model, adapter, config=config).merge_and_unload()
    return merged


def save_output(
    method: TrainingRecipe, model: "PreTrainedModel | PeftModel", policy: Input, ctx: "TrainContext"
) -> None:
    """Writes what was trained, with the tokenizer and chat template of its input; rank 0 only.

    A LoRA is merged into the weights, and kept by itself in ``adapter/``; with ``save=adapter`` it is all that is
    written, and its base is named. One that was trained on a base in 4 bits is merged into the base as it was given,
    not as it was rounded: so both ways of saving are the same model, and the next stage and whoever serves the adapter
    on its base start from it. What the adapter was trained against is then a little off, by the rounding.
    """
    from peft import PeftModel

    if ctx.rank != 0:
        return
    if not isinstance(model, PeftModel):
        model.save_pretrained(ctx.output_dir, safe_serialization=True)
    elif method.save == "adapter":
        _save_adapter_alone(model, policy, ctx.output_dir)
    else:
        save_adapter(model, ctx.output_dir / ADAPTER_DIR, policy)
        _merge(method, model, policy, ctx.output_dir / ADAPTER_DIR).save_pretrained(
            ctx.output_dir, safe_serialization=True
        )
    copy_tokenizer(policy.path, ctx.output_dir)


def _save_adapter_alone(model: "PeftModel", policy: Input, directory: Path) -> None:
    save_adapter(model, directory, policy)
    Base.of(policy).write(directory)
    base = model.get_base_model()
    plain_config(base).save_pretrained(directory)
    if base.can_generate():
        base.generation_config.save_pretrained(directory)


def _merge(method: TrainingRecipe, model: "PeftModel", policy: Input, adapter: Path) -> "PreTrainedModel":
    base = model.get_base_model()
    if not is_quantized(base):
        whole: PreTrainedModel = model.merge_and_unload()
        return whole
    whole = whole_model(method.produces, policy.path, plain_config(base), last=adapter)
    if base.can_generate():
        whole.generation_config = base.generation_config
    return whole


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copies every file that makes the tokenizer and its chat template."""
    for name in TOKENIZER_FILES:
        path = source / name
        if path.is_dir():
            shutil.copytree(path, target / name, dirs_exist_ok=True)
        elif path.exists():
            shutil.copyfile(path, target / name)
