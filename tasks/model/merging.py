"""Merged models: what must agree, where weights are, how two tensors are interpolated, and the golden prompts.

A base in few bits is merged in full precision, which is another model by the quantization error of the base. Golden
prompts are a few fixed rows, whose values before and after a merge are recorded with the stage.
"""

import copy
import hashlib
import json
import logging
import math
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lineage.errors import ConfigError, PipelineError
from lineage.source.model_files import INDEX, WHOLE, quantization_format, read_json, weight_places
from lineage.source.model_source import has_tokenizer
from tasks.data.kinds import tokens_of
from tasks.model.positions import learned_positions

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import Tensor, dtype
    from torch.nn import Module
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from tasks.data.tokens.tokenize_rows import TokenizedRows
    from tasks.recipe import Inputs

POLICY, BASE = "policy", "base"  # slots
CONFIG, _GENERATION = "config.json", "generation_config.json"
_ADAPTER = "adapter_config.json"
# Buffers that older files store and classes compute.
_COMPUTED = re.compile(
    r"rotary_emb\.inv_freq$|(^|\.)position_ids$|\.attn\.(masked_)?bias$|\.attention\.(masked_)?bias$"
)
_IN_FEW_BITS = re.compile(  # what stands for a weight, or beside it, in a quantized file
    r"\.weight\.(absmax|quant_map|nested_\w+|quant_state\.\w+)$|_scale(_inv)?$|_(blocks|scales)$"
    r"|\.(SCB|weight_format|qweight|qzeros|scales|g_idx|codes|codebooks)$"
)
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
_FEW_TOKENS = 64
# By how much a golden value may move where the same model is computed in another way: nats per token.
EXACT = 1e-3  # in fp32
ROUNDED = 0.05  # with weights or products of 8 bits
_NOISE = 0.1  # of these: what an adapter must move a golden value by to be seen in it
_SHARE = 0.5  # of what an adapter changes, by which its merged form may differ
_INPUTS = 4  # random ones of each layer

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
    """Requires that two models have one architecture and size."""
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
    """Requires that two models have the same tokens under the same ids."""
    apart = sorted(token for token in {*ours, *theirs} if ours.get(token) != theirs.get(token))
    if apart:
        raise ConfigError(
            f"{name} and {other} have different tokenizers: {len(apart)} tokens differ, such as {apart[0]!r} "
            f"({ours.get(apart[0])} and {theirs.get(apart[0])}); models that were trained from one base are accepted; "
            f"leave {other} out"
        )


def require_same_template(name: str, other: str, ours: str | None, theirs: str | None) -> None:
    """Requires that another model has the policy's chat template, or none: a model before fine-tuning has none."""
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


def places_of(directory: Path) -> Places:
    """The file of each tensor of a model's directory (ConfigError: there are no weights)."""
    found = weight_places(directory)
    if not found:
        raise ConfigError(f"{directory}: no {WHOLE} and no {INDEX}; a model as save_pretrained writes it is accepted")
    return found


def shape_of(places: Places, name: str) -> tuple[int, ...]:
    """The shape of a tensor."""
    from safetensors import safe_open

    with safe_open(places[name], framework="pt") as file:
        return tuple(file.get_slice(name).get_shape())


def names_lost(before: Places, after: Places, model: "PreTrainedModel") -> set[str]:
    """The weights of a model's files that those of another one written from it lack.

    No loss are a name without the prefix of the backbone or with it, buffers that classes no longer store, the second
    name of a matrix that head and embedding share, and what formats of few bits store beside a weight.
    """
    prefix = f"{model.base_model_prefix}."
    kept = {name.removeprefix(prefix) for name in after}
    tied = {name.removeprefix(prefix) for name in model.all_tied_weights_keys}
    tied |= kept
    return {
        name for name in before
        if name.removeprefix(prefix) not in tied and not _COMPUTED.search(name) and not _IN_FEW_BITS.search(name)
    }  # fmt: skip


def add_weights(directory: Path, tensors: "Mapping[str, Tensor]") -> None:
    """Adds weights to a model's directory: to its only file, or as one more file that its index names."""
    from safetensors.torch import load_file, save_file

    index = read_json(directory, INDEX)
    if not isinstance(index, dict):
        draft = directory / f"{WHOLE}.draft"
        save_file({**load_file(directory / WHOLE), **tensors}, draft, metadata={"format": "pt"})
        draft.replace(directory / WHOLE)
        return
    last = "model-of-weights-that-were-not-trained.safetensors"
    save_file(dict(tensors), directory / last, metadata={"format": "pt"})
    places = {**index["weight_map"], **dict.fromkeys(tensors, last)}
    size = sum(each.nbytes for each in tensors.values()) + index["metadata"].get("total_size", 0)
    content = {"metadata": {**index["metadata"], "total_size": size}, "weight_map": places}
    (directory / INDEX).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


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
    from tasks.model.adapter_files import base_and_kept_adapters, rounding_of_base

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


def golden_texts_for(model: "PreTrainedModel", directories: Iterable[Path]) -> Golden:
    """``golden_texts`` by the first tokenizer in a list of a model's directories, as far as the model reads them.

    Without a tokenizer: the first ids of the vocabulary.
    """
    from tasks.model.tokenizers import tokenizer_of

    place = next(filter(has_tokenizer, directories), None)
    num_tokens = model.get_input_embeddings().weight.shape[0]
    prompts = golden_texts(tokenizer_of(place)) if place else [range(min(num_tokens, _FEW_TOKENS))]
    positions = learned_positions(model.config.get_text_config().to_dict())
    return [[token for token in prompt if token < num_tokens][:positions] for prompt in prompts]


def golden_values(model: "PreTrainedModel | PeftModel", prompts: Golden) -> list[float]:
    """The mean log-probability of each row's tokens, in nats; for a reward model, each row's score."""
    import torch
    from peft import PeftModel

    base = model.get_base_model() if isinstance(model, PeftModel) else model
    is_training = base.training
    base.eval()
    found = []
    autocast = torch.autocast(base.device.type, torch.bfloat16, enabled=_is_mixed(base))
    with torch.no_grad(), autocast, torch.compiler.set_stance("force_eager"):  # not compiled again for a few rows
        for prompt in prompts:
            ids_BT = torch.tensor([prompt], device=base.device)
            # The class's forward: that of a model in training reads batches without padding.
            logits = type(base).forward(base, input_ids=ids_BT, attention_mask=torch.ones_like(ids_BT)).logits.float()
            if base.get_output_embeddings() is None:
                found.append(float(logits))
                continue
            ids_BT = ids_BT.clamp(max=logits.shape[-1] - 1)  # that of an image of Llama 3.2 Vision has no logit
            logps_BT = logits[:, :-1].log_softmax(-1).gather(-1, ids_BT[:, 1:, None])
            found.append(float(logps_BT.mean()))
    base.train(is_training)
    return found


def _dtypes(model: "PreTrainedModel") -> "set[dtype]":
    return {each.dtype for each in model.parameters() if each.is_floating_point()}


def _is_mixed(model: "PreTrainedModel") -> bool:
    """Whether the frozen part is in bf16 and the trained one in fp32: layers of both meet only under autocast."""
    import torch

    return {torch.bfloat16, torch.float32} <= _dtypes(model)


def tolerance_of(model: "PreTrainedModel | PeftModel", values: Sequence[float], prompts: Golden = ()) -> float:
    """The most by which these golden values may move where the model is computed in another order.

    Args:
        prompts: of an adapted model: less than half of what its adapter makes of them, so that one which got lost
            shows; but at least the noise of another order.
    """
    import torch
    from peft import PeftModel

    if prompts and isinstance(model, PeftModel):
        flags = [(each, each.requires_grad) for each in model.parameters()]
        with model.disable_adapter():
            moved = largest_difference(values, golden_values(model, prompts))
        for parameter, is_trained in flags:
            if parameter.requires_grad != is_trained:  # PEFT lets all active adapters be trained, frozen ones too
                parameter.requires_grad_(is_trained)
        most = tolerance_of(model, values)
        return min(most, max(most * _NOISE, _SHARE * moved))

    base = model.get_base_model() if isinstance(model, PeftModel) else model
    is_exact = _dtypes(base) <= {torch.float32, torch.float64} and "quantization_config" not in base.config
    is_exact &= not any(type(each).__module__.startswith("torchao") for each in base.modules())  # products in fp8
    is_score = base.get_output_embeddings() is None  # which has no scale of its own
    return (EXACT if is_exact else ROUNDED) * (max(1.0, *map(abs, values)) if is_score else 1.0)


def largest_difference(before: Sequence[float], after: Sequence[float]) -> float:
    """Of one golden value; nan or infinite if a value is."""
    found = [abs(left - right) for left, right in zip(before, after, strict=True)]
    return math.nan if any(map(math.isnan, found)) else max(found)


def require_same_values(
    before: Sequence[float], after: Sequence[float], tolerance: float, what: str, remedy: str,
    error: type[PipelineError] = PipelineError, setting: str = "",
) -> None:  # fmt: skip
    """Requires that a model which went from one form to another is still the same model.

    Args:
        before, after: ``golden_values``.
        tolerance: of each value: nats per token, or of a score.
        what: the hand-over, such as ``merging``.
        error: the class of what is raised.
        setting: the one that states the tolerance; empty: none does.
    """
    apart = largest_difference(before, after)
    if not apart <= tolerance:  # nan is not either
        raise error(
            f"{what} moved a golden prompt by {apart:.3g}, in mean log-probability or score (before {_shown(before)}; "
            f"after {_shown(after)}); {setting and f'{setting}='}{tolerance:g} is accepted; {remedy}"
        )


def compared(before: Sequence[float], after: Sequence[float], *, is_reward_model: bool) -> dict[str, float]:
    """Metrics of a merge, which are logged too: means before and after it, and the largest difference of one row."""
    name = "scores" if is_reward_model else "logps"
    apart = largest_difference(before, after)
    logger.info(
        "merge golden_prompts=%d %s_before=%s %s_after=%s max_difference=%.3g", len(before), name, _shown(before), name,
        _shown(after), apart,
    )  # fmt: skip
    return {
        f"merge/{name}_before": sum(before) / len(before),
        f"merge/{name}_after": sum(after) / len(after),
        f"merge/{name}_difference": apart,
    }


def cast_weights(model: "PreTrainedModel", dtype: "dtype") -> None:
    """Casts what a model's files hold; not its further buffers, such as those of rotary positions."""
    for each in model.state_dict(keep_vars=True).values():
        if each.is_floating_point():
            each.data = each.data.to(dtype)


def golden_summary(before: Sequence[float], after: Sequence[float]) -> dict[str, float]:
    """Means of golden values before and after a hand-over, and the largest difference of one."""
    return {
        "before": sum(before) / len(before), "after": sum(after) / len(after),
        "difference": largest_difference(before, after),
    }  # fmt: skip


def _shown(values: Sequence[float]) -> str:
    return ",".join(f"{value:.4f}" for value in values)


_MERGE_ELSEWHERE = (
    "adapter and base are unchanged: merge them with the program that trained the adapter, and compare its "
    "log-probabilities before and after; or report the adapter's adapter_config.json"
)


class Merged(NamedTuple):
    """A model after its adapter was merged, and its golden values before and after."""

    model: "PreTrainedModel"
    before: list[float]
    after: list[float]


def merge_adapters(adapted: "PeftModel", prompts: Golden, name: str) -> Merged:
    """Merges the active adapters of a model into its weights, and compares golden prompts before and after.

    PEFT changes the matrix of an adapted embedding or head in place, also where both share it, and an adapter may be on
    one of the two: they are separate while it is merged, and share a matrix again if both are equal afterwards.

    Args:
        name: of the adapter, for messages.

    Raises:
        ConfigError: PEFT does not merge it.
        PipelineError: the merged model is another one.
    """
    before = golden_values(adapted, prompts)
    base = adapted.get_base_model()
    tolerance, layers = tolerance_of(adapted, before, prompts), _layers(base)
    is_tied = _separate_head(base)
    with warnings.catch_warnings():
        for known in ("Model with `tie_word_embeddings=True`", "Input and output embeddings are no longer tied"):
            warnings.filterwarnings("ignore", known)
        try:
            model: PreTrainedModel = adapted.merge_and_unload()
        except (RuntimeError, ValueError, NotImplementedError) as error:  # such as a bias for layers that have none
            raise ConfigError(
                f"{name}: PEFT cannot merge this adapter ({str(error).partition(chr(10))[0]}); one that its "
                "merge_and_unload merges is accepted; merge it with the program that trained it, and give that model"
            ) from error
    _unwrap(model)
    if is_tied:
        _share_or_separate_head(model)
    after = golden_values(model, prompts)
    require_same_values(
        before, after, tolerance, f"merging the adapter {name}",
        _MERGE_ELSEWHERE,
    )  # fmt: skip
    _require_layers(layers, model, name)
    return Merged(model, before, after)


class _Layer(NamedTuple):
    """What a layer makes of random inputs (N), without its adapter and with it, in float64.

    Args:
        name: in the merged model.
        parameter: the one that the adapter is on, of experts; None: the layer is called.
    """

    name: str
    parameter: str | None
    inputs_N: "Tensor"
    without_N: "Tensor"
    adapted_N: "Tensor"


def _layers(base: "PreTrainedModel") -> list[_Layer]:
    """The layers with an active adapter, or with a copy that is trained in full."""
    import torch
    from peft.tuners.lora.layer import ParamWrapper
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    found, inside = list[_Layer](), tuple[str, ...]()
    for path, layer in base.named_modules():
        is_tuner = isinstance(layer, BaseTunerLayer)
        if not (is_tuner or isinstance(layer, AuxiliaryTrainingWrapper)) or path.startswith(inside or ("\0",)):
            continue
        name = path.removesuffix(".base_layer")
        if isinstance(layer, ParamWrapper):
            weight = layer.get_param().detach().double()
            inputs = _drawn_inputs(weight.shape[-1], weight)
            active = [each for each in layer.active_adapters if each in layer.lora_A]
            delta = sum((layer.get_delta_weight(each).double() for each in active), torch.zeros_like(weight))
            computed = weight @ inputs.T, (weight + delta) @ inputs.T
            found.append(_Layer(name, layer.parameter_name, inputs.T, *computed))
            continue
        inside += (f"{path}.",)
        plain = layer.get_base_layer() if is_tuner else layer.original_module
        inputs = _inputs_of(plain, layer)
        if inputs is not None:
            found.append(_Layer(name, None, inputs, _computed(plain, inputs), _computed(layer, inputs)))
    return found


def _inputs_of(plain: "Module", layer: "Module") -> "Tensor | None":
    """Random inputs of a layer: of an embedding, the tokens that are trained; None: its form is not known."""
    import torch
    from transformers.pytorch_utils import Conv1D

    weight = getattr(plain, "weight", None)
    if not isinstance(weight, torch.Tensor) or not weight.is_floating_point():
        return None
    if isinstance(plain, torch.nn.Embedding):
        trained = getattr(getattr(layer, "token_adapter", None), "token_indices", None)
        rows = [row for each in trained.values() for row in each] if trained else range(min(len(weight), _FEW_TOKENS))
        return torch.tensor(list(rows), device=weight.device)
    return _drawn_inputs(weight.shape[0] if isinstance(plain, Conv1D) else weight.shape[-1], weight)


def _drawn_inputs(size: int, like: "Tensor") -> "Tensor":
    import torch

    drawn = torch.randn(_INPUTS, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return drawn.to(like.device)


def _computed(module: "Module", inputs: "Tensor") -> "Tensor":
    """The output of a layer in float64 and without dropout; kernels of ours are left out."""
    import torch

    with torch.no_grad():
        try:
            exact = copy.deepcopy(module).double().eval()
        except RuntimeError:  # a weight is computed from another, as of a tied head: in its own precision
            exact, dtype = module, next(module.parameters()).dtype
            inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
        found: Tensor = type(exact).forward(exact, inputs)
    return found.double()


def _require_layers(layers: Sequence[_Layer], model: "PreTrainedModel", name: str) -> None:
    """Requires that each merged layer has the change of its adapter, however small: once, and not twice.

    Where rounding to the weights' dtype takes it away, it is logged: no weights of that dtype have it.
    """
    import torch

    lost, rounded = list[str](), list[str]()
    for each in layers:
        module = model.get_submodule(each.name)
        weight = getattr(module, each.parameter or "weight").detach()
        after_N = weight.double() @ each.inputs_N if each.parameter else _computed(module, each.inputs_N)
        moved_N = each.adapted_N - each.without_N
        size = float(moved_N.norm())
        if not size or abs(float(((after_N - each.without_N) * moved_N).sum()) / size**2 - 1) <= _SHARE:
            continue
        is_noise = size <= torch.finfo(weight.dtype).eps * float(each.without_N.norm())
        (rounded if is_noise else lost).append(each.name)
    if lost:
        raise PipelineError(
            f"merging the adapter {name}: {len(lost)} layers lack its change or have another, such as {lost[0]}; "
            f"layers with at least half of it, and at most half more, are accepted; {_MERGE_ELSEWHERE}"
        )
    if rounded:
        logger.warning(
            "merge=%s: the adapter changes %d layers by less than their dtype can hold, such as %s; save=adapter keeps "
            "it", name, len(rounded), rounded[0],
        )  # fmt: skip


def _unwrap(model: "PreTrainedModel") -> None:
    """Replaces the modules trained beside an adapter that PEFT leaves wrapped: ``ln_tuning`` merges norms alone."""
    from peft.utils.other import AuxiliaryTrainingWrapper

    for name, wrapper in list(model.named_modules()):
        if isinstance(wrapper, AuxiliaryTrainingWrapper):
            trained = wrapper.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
            model.set_submodule(name, trained)


def _separate_head(model: "PreTrainedModel") -> bool:
    """Gives the head a matrix of its own where it shares that of the embedding and an adapter is on one of them.

    Returns:
        Whether the model's config says that they share one.
    """
    import torch
    from peft.tuners.tuners_utils import BaseTunerLayer

    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if any(isinstance(each, BaseTunerLayer) for each in (embedding, head)):
        layers = [each.get_base_layer() if isinstance(each, BaseTunerLayer) else each for each in (embedding, head)]
        if layers[1].weight is layers[0].weight:
            layers[1].weight = torch.nn.Parameter(layers[0].weight.detach().clone(), requires_grad=False)
    return head is not None and bool(getattr(model.config, "tie_word_embeddings", False))


def _share_or_separate_head(model: "PreTrainedModel") -> None:
    """Makes the config of a model whose head and embedding shared a matrix agree with their weights."""
    import torch

    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = torch.equal(head.weight, embedding.weight)
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = is_tied
    model.tie_weights()
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)
    if not is_tied:
        logger.info("model=%s head=separate: its adapter made head and embedding differ", model.name_or_path)
