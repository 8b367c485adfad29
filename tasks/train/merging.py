"""Merged models: what must agree, where weights are, how two tensors are interpolated, and the golden prompts.

A base in few bits is merged in full precision, which is another model by the quantization error of the base. Golden
prompts are a few fixed rows, whose values before and after a merge are recorded with the stage.
"""

import hashlib
import json
import logging
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from lineage.errors import ConfigError
from lineage.model_files import quantization_format, read_json
from lineage.model_source import vocabulary_of
from tasks.data.kinds import tokens_of

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from tasks.data.tokens.cache import TokenizedRows
    from tasks.recipe import Input, Inputs

POLICY, BASE = "policy", "base"  # slots
CONFIG, _GENERATION = "config.json", "generation_config.json"
_WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_ADAPTER = "adapter_config.json"
_NEARLY_PARALLEL = 1e-6  # sine of the angle between two tensors, below which their interpolation is linear
# Settings of config.json that two models must share: if they differ, the same weights define another function.
_SHARED = (
    "model_type", "vocab_size", "hidden_size", "n_embd", "num_hidden_layers", "n_layer", "num_attention_heads",
    "n_head",
    "num_key_value_heads", "head_dim", "intermediate_size", "n_inner", "moe_intermediate_size", "num_experts",
    "num_local_experts", "num_experts_per_tok", "hidden_act", "activation_function", "rms_norm_eps",
    "tie_word_embeddings", "rope_parameters", "sliding_window", "attn_logit_softcapping", "final_logit_softcapping",
)  # fmt: skip

_LEFT_OUT = (  # by PEFT's ``add_weighted_adapter``
    "use_dora", "modules_to_save", "target_parameters", "rank_pattern", "alpha_pattern", "trainable_token_indices",
    "lora_bias",
)  # fmt: skip

NUM_PROMPTS = 4
_TEXTS = (  # where a stage reads no rows
    "The capital of France is Paris, and the river that flows through it is the Seine.",
    "def add(left: int, right: int) -> int:\n    return left + right\n",
    "Question: a train leaves at 9:40 and arrives at 11:05. How long does it take?\nAnswer: 1 hour and 25 minutes.",
    "Water boils at a lower temperature on a mountain, because the pressure of the air is lower there.",
)
_MAX_TOKENS = 256

logger = logging.getLogger(__name__)

Golden = Sequence[Sequence[int]]
Places = Mapping[str, Path]  # name of a tensor -> its file


def config_difference(ours: Mapping[str, object], theirs: Mapping[str, object]) -> str | None:
    """The first setting by which two ``config.json`` describe different models, with both values; None: none."""
    for name in _SHARED:
        found = [each.get(name) for each in (ours, theirs)]
        if None not in found and found[0] != found[1]:
            return f"{name} {found[0]} and {found[1]}"
    text, other = ours.get("text_config"), theirs.get("text_config")
    return config_difference(text, other) if isinstance(text, Mapping) and isinstance(other, Mapping) else None


def require_same_config(name: str, other: str, ours: Mapping[str, object], theirs: Mapping[str, object]) -> None:
    """Requires that two models have one architecture and size.

    Raises:
        ConfigError: they differ, or one is quantized.
    """
    for label, config in ((name, ours), (other, theirs)):
        found = quantization_format(config)
        if found:
            raise ConfigError(
                f"{label} is quantized ({found}), and weights in few bits cannot be combined; models in 16 or 32 bits "
                "are accepted; merge the model that it was quantized from"
            )
    apart = config_difference(ours, theirs)
    if apart:
        raise ConfigError(
            f"{name} and {other} are different models: {apart}; models that were trained from one base are accepted; "
            f"leave {other} out"
        )


def require_same_vocabulary(name: str, other: str, ours: Mapping[str, int], theirs: Mapping[str, int]) -> None:
    """Requires that two models have the same tokens under the same ids.

    Raises:
        ConfigError: they differ, naming a token.
    """
    apart = sorted(token for token in {*ours, *theirs} if ours.get(token) != theirs.get(token))
    if apart:
        raise ConfigError(
            f"{name} and {other} have different tokenizers: {len(apart)} tokens differ, such as {apart[0]!r} "
            f"({ours.get(apart[0])} and {theirs.get(apart[0])}); models that were trained from one base are accepted; "
            f"leave {other} out"
        )


def require_same_template(name: str, other: str, ours: str | None, theirs: str | None) -> None:
    """Requires that another model has the policy's chat template, or none: a model before fine-tuning has none.

    Raises:
        ConfigError: it has a different one.
    """
    if theirs is None or ours == theirs:
        return
    if ours is None:
        raise ConfigError(
            f"{name} has no chat template, and {other} has one, which the output would lose; put {other} into the slot "
            f"{POLICY}, and {name} into another"
        )
    raise ConfigError(
        f"{name} and {other} have different chat templates, so a message is other tokens to each; models with one "
        f"template are accepted; set the same chat_template where they are trained, or leave {other} out"
    )


def template_of(directory: Path) -> str | None:
    """The chat template of a model in a directory, as it is stored; None: it has none."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    config = read_json(directory, "tokenizer_config.json")
    template = config.get("chat_template") if isinstance(config, dict) else None
    return template if template is None or isinstance(template, str) else json.dumps(template, sort_keys=True)


def require_alike(inputs: "Inputs") -> None:
    """Requires that all models have the policy's architecture, vocabulary and chat template.

    Raises:
        ConfigError: one differs; names both models.
    """
    from tasks.train.models import load_config

    policy = inputs[POLICY]
    ours = load_config(policy.path).to_dict()
    known = vocabulary_of(read_json(policy.path, "tokenizer.json"))
    for slot, other in inputs.items():
        if slot == POLICY:
            continue
        require_same_config(policy.name, other.name, ours, load_config(other.path).to_dict())
        vocabulary = vocabulary_of(read_json(other.path, "tokenizer.json"))
        if known and vocabulary:
            require_same_vocabulary(policy.name, other.name, known, vocabulary)
        if slot != BASE:
            require_same_template(policy.name, other.name, template_of(policy.path), template_of(other.path))


def whole_weights(inputs: "Inputs", work: Path) -> dict[str, Places]:
    """Where the weights of each slot are: in its own files, or in ``work`` if an adapter has to be merged first.

    Raises:
        ConfigError: the models have different weights.
    """
    places = {slot: _places(_merged_directory(slot, each, work)) for slot, each in inputs.items()}
    if len({frozenset(each) for each in places.values()}) > 1:  # the same weights may have other names on the hub
        places = {slot: _places(_merged_directory(slot, each, work, again=True)) for slot, each in inputs.items()}
    ours = places[POLICY]
    for slot, theirs in places.items():
        apart = sorted(ours.keys() ^ theirs.keys()) or [
            name for name in ours if _shape(ours, name) != _shape(theirs, name)
        ]
        if apart:
            raise ConfigError(
                f"{inputs[POLICY].name} and {inputs[slot].name} have different weights: {len(apart)} differ, such as "
                f"{apart[0]}; models that were trained from one base are accepted; leave {inputs[slot].name} out"
            )
    return places


def _merged_directory(slot: str, given: "Input", work: Path, *, again: bool = False) -> Path:
    """The directory with a model's whole weights; written to ``work`` where it has adapters. One model is in memory."""
    from tasks.train.adapter_files import base_and_adapters
    from tasks.train.models import whole_model

    base, adapters = base_and_adapters(given.path)
    if not adapters and not again:
        return base
    if not (work / slot).is_dir():
        whole_model(given.kind, given.path).save_pretrained(work / slot, safe_serialization=True)
    return work / slot


def _places(directory: Path) -> Places:
    index = read_json(directory, INDEX)
    if isinstance(index, dict):
        return {name: directory / file for name, file in index["weight_map"].items()}
    from safetensors import safe_open

    path = directory / _WHOLE
    if not path.is_file():
        raise ConfigError(f"{directory}: no {_WHOLE} and no {INDEX}; a model as save_pretrained writes it is accepted")
    with safe_open(path, framework="pt") as file:
        return dict.fromkeys(file.keys(), path)


def _shape(places: Places, name: str) -> tuple[int, ...]:
    from safetensors import safe_open

    with safe_open(places[name], framework="pt") as file:
        return tuple(file.get_slice(name).get_shape())


def read_tensor(places: Places, name: str) -> "Tensor":
    """One tensor, without the rest of its file."""
    from safetensors import safe_open

    with safe_open(places[name], framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor


def write_config(source: Path, target: Path, dtype: str | None) -> None:
    """The config of a model with another dtype, and its settings of generation."""
    config = read_json(source, CONFIG)
    assert isinstance(config, dict)
    config = {name: value for name, value in config.items() if name not in ("torch_dtype", "quantization_config")}
    config |= {"dtype": dtype} if dtype else {}
    (target / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    if (source / _GENERATION).exists():
        shutil.copyfile(source / _GENERATION, target / _GENERATION)


def slerp(left: "Tensor", right: "Tensor", share: float) -> "Tensor":
    """The point at ``share`` of the arc from one tensor to another, as vectors: Shoemake 1985, section 3.3.

    sin((1 - t) a) / sin(a) left + sin(t a) / sin(a) right, with a the angle between them. Where a is nearly 0 or pi, or
    a tensor is 0, the arc is not defined, and the result is on the line between them.
    """
    lengths = float(left.norm() * right.norm())
    cosine = max(-1.0, min(1.0, float((left * right).sum()) / lengths)) if lengths else 1.0
    angle = math.acos(cosine)
    if math.sin(angle) < _NEARLY_PARALLEL:
        return (1 - share) * left + share * right
    parts = math.sin((1 - share) * angle), math.sin(share * angle)
    return (parts[0] * left + parts[1] * right) / math.sin(angle)


@contextmanager
def drawn(seed: int, name: str) -> Iterator[None]:
    """Seeds torch's global generator, from which PEFT draws, with a seed and a tensor's name."""
    import torch

    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int.from_bytes(digest[:8], "big"))
        yield


def adapters_on_one_base(inputs: "Inputs") -> tuple[Path, Sequence[Path], dict[str, Path]]:
    """The base of all models, the adapters below the last one of each, and the last adapter by slot.

    Raises:
        ConfigError: one has no adapter, or another base, or an adapter whose matrices cannot be combined.
    """
    from tasks.train.adapter_files import base_and_kept_adapters, rounding_of_base

    found = {slot: base_and_kept_adapters(inputs[slot].path)[:2] for slot in sorted(inputs)}
    for slot, (_, adapters) in found.items():
        if not adapters or rounding_of_base(adapters[-1]):
            what = "lies on a dequantized base (quantization.merge=dequantized)" if adapters else "has no adapter"
            raise ConfigError(
                f"space=adapters: {inputs[slot].name} {what}; LoRAs on one base are accepted; set space=weights"
            )
    base, adapters = found[POLICY]
    for slot, (other, theirs) in found.items():
        if (other.resolve(), *theirs[:-1]) != (base.resolve(), *adapters[:-1]):
            raise ConfigError(
                f"space=adapters: the adapters of {inputs[POLICY].name} and {inputs[slot].name} lie on different "
                f"models ({base} and {other}); LoRAs on one base are accepted; set space=weights"
            )
    return base, adapters[:-1], {slot: each[-1] for slot, (_, each) in found.items()}


def plain_lora(label: str, adapter: Path, target: Path) -> Path:
    """A copy of a LoRA that PEFT combines rightly: scaled by alpha / rank, and started from nothing.

    ``add_weighted_adapter`` copies the settings of the first adapter: ``use_rslora`` would scale the result again, and
    an initialization such as pissa would change the base. What it leaves out, as DoRA's magnitudes, is refused.

    Raises:
        ConfigError: the adapter is not a plain LoRA.
    """
    config = read_json(adapter, _ADAPTER)
    assert isinstance(config, dict)
    left_out = [f"{name}={config[name]}" for name in _LEFT_OUT if config.get(name)]
    left_out += [f"bias={config['bias']}"] if config.get("bias", "none") != "none" else []
    left_out += [f"peft_type={config['peft_type']}"] if config.get("peft_type") != "LORA" else []
    if left_out:
        raise ConfigError(
            f"space=adapters: the adapter of {label} has {', '.join(left_out)}, which PEFT leaves out when it "
            "combines; plain LoRAs are accepted; set space=weights"
        )
    if config.get("use_rslora"):
        config |= {"use_rslora": False, "lora_alpha": config["lora_alpha"] * math.sqrt(config["r"])}
    config |= {"init_lora_weights": True, "task_type": None}
    target.mkdir(parents=True, exist_ok=True)
    for path in adapter.glob("adapter_model.*"):
        shutil.copyfile(path, target / path.name)
    (target / _ADAPTER).write_text(json.dumps(config))
    return target


def golden_prompts(rows: "TokenizedRows") -> Golden:
    """The tokens of a stage's first rows: each a prompt with its answer, or with its chosen answer."""
    first = rows.examples.select(range(min(NUM_PROMPTS, len(rows))))
    return [tokens_of(row)[:_MAX_TOKENS] for row in first]


def golden_texts(tokenizer: "PreTrainedTokenizerBase") -> Golden:
    """The tokens of fixed texts."""
    return [tokenizer(text)["input_ids"][:_MAX_TOKENS] for text in _TEXTS]


def golden_values(model: "PreTrainedModel | PeftModel", prompts: Golden) -> list[float]:
    """The mean log-probability of each row's tokens, in nats; for a reward model, each row's score."""
    import torch
    from peft import PeftModel

    base = model.get_base_model() if isinstance(model, PeftModel) else model
    is_training = base.training
    base.eval()
    found = []
    dtypes = {each.dtype for each in base.parameters() if each.is_floating_point()}
    # Where the frozen part is in bf16 and the trained one in fp32, layers of both meet only under autocast.
    is_mixed = {torch.bfloat16, torch.float32} <= dtypes
    with torch.no_grad(), torch.autocast(base.device.type, torch.bfloat16, enabled=is_mixed):
        for prompt in prompts:
            ids_BT = torch.tensor([prompt], device=base.device)
            # The class's forward: that of a model in training reads batches without padding.
            logits = type(base).forward(base, input_ids=ids_BT, attention_mask=torch.ones_like(ids_BT)).logits.float()
            if base.get_output_embeddings() is None:
                found.append(float(logits))
                continue
            logps_BT = logits[:, :-1].log_softmax(-1).gather(-1, ids_BT[:, 1:, None])
            found.append(float(logps_BT.mean()))
    base.train(is_training)
    return found


def compared(before: Sequence[float], after: Sequence[float], *, is_reward_model: bool) -> dict[str, float]:
    """Metrics of a merge, which are logged too: means before and after it, and the largest difference of one row."""
    name = "scores" if is_reward_model else "logps"
    apart = max(abs(left - right) for left, right in zip(before, after, strict=True))
    logger.info(
        "merge golden_prompts=%d %s_before=%s %s_after=%s max_difference=%.3g", len(before), name, _shown(before), name,
        _shown(after), apart,
    )  # fmt: skip
    return {
        f"merge/{name}_before": sum(before) / len(before),
        f"merge/{name}_after": sum(after) / len(after),
        f"merge/{name}_difference": apart,
    }


def _shown(values: Sequence[float]) -> str:
    return ",".join(f"{value:.4f}" for value in values)
