"""Adapters on models, through PEFT: a new one, the input's adapter trained further, or a new one on top of it."""

import copy
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import peft
import torch
from datasets import Dataset
from peft import PeftConfig, PeftModel, PeftType, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import transformers_weight_conversion as conversion
from peft.utils.other import TrainableTokensWrapper
from transformers import TrainerCallback
from transformers.integrations.neftune import neftune_post_forward_hook
from transformers.pytorch_utils import Conv1D

from lineage.errors import ConfigError
from tasks.data.kinds import tokens_of
from tasks.evaluate.scoring import padded
from tasks.train.kernels.machine import plain
from tasks.train.models.adapters import (
    ADALORA_STEPS,
    ADAPTERS,
    ALL_LINEAR,
    ON_HEAD,
    XAVIER,
    Adapter,
    is_plain,
    no_module,
    osf_rank,
    require_sizes,
    targets,
    why_not_on_experts,
    why_not_on_parameters,
    why_not_stacked,
)
from tasks.train.models.quantized_base import are_experts, detect_quantized_layers, is_quantized, step_in_fp32

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, Trainer
    from transformers import TrainerControl as Control
    from transformers import TrainerState as State
    from transformers import TrainingArguments as Args

    Logs = dict[str, float]

logger = logging.getLogger(__name__)

DEFAULT, REFERENCE = "default", "ref"  # names of PEFT and TRL: the adapter in training, and its frozen copy
_INIT_ROWS, _INIT_BATCH = 32, 8  # for initializations that read data; fixed, so that execution settings have no effect
_WARMUP, _FINAL = 0.1, 0.5  # of the steps of AdaLoRA: before ranks are pruned, and after

Batches = list[dict[str, "Tensor"]]


def peft_config(adapter: Adapter, model: "PreTrainedModel", num_steps: int) -> PeftConfig:
    """An adapter as PEFT's configuration; the new head of a reward model is trained and saved in full.

    Args:
        num_steps: optimizer steps of the training, over which AdaLoRA plans its ranks.

    Raises:
        ConfigError: the model has no module of such a name, or the type cannot be put on it.
    """
    detect_quantized_layers(is_quantized(model))
    row = ADAPTERS[adapter.type]
    is_reward_model = model.get_output_embeddings() is None
    saved = [*(["score"] if is_reward_model else []), *_saved(adapter, model)]
    configured: dict[str, object] = {
        "task_type": "SEQ_CLS" if is_reward_model else "CAUSAL_LM", "modules_to_save": saved or None, **row.fixed,
        **_own(adapter, model, num_steps),
    }  # fmt: skip
    config_class = getattr(peft, row.config)
    if is_plain(adapter):
        names = ALL_LINEAR if adapter.target_modules == ALL_LINEAR else _found(adapter, model)
        config: PeftConfig = config_class(**configured, target_modules=names)
        if names != ALL_LINEAR and _taken_for_experts(config, adapter, model):
            return _by_full_names(adapter, config, model)
        layers = _layers_beside_experts(config, model)
        if layers is None:
            _warn_of_experts(adapter, model)
        elif is_quantized(model):
            logger.warning("quantization: the experts of a mixture are frozen; adapted: %s", layers)
            config = config_class(**configured, target_modules=layers)
        else:
            _require_on_experts(adapter, layers)
        return _with_weights(adapter, config, model)
    _warn_of_experts(adapter, model)
    return _by_full_names(adapter, config_class(**configured), model)


def _by_full_names(adapter: Adapter, config: PeftConfig, model: "PreTrainedModel") -> PeftConfig:
    """The config for linear layers alone, without the experts of a mixture."""
    config.target_modules = {name for name, _, _ in _targets(adapter, model)}
    config.target_modules -= set(_taken_for_experts(config, adapter, model))
    return _with_weights(adapter, config, model)


def _with_weights(adapter: Adapter, config: PeftConfig, model: "PreTrainedModel") -> PeftConfig:
    """Also adapts the linear layers that PEFT takes for experts, by the names of their weights, which it leaves.

    Raises:
        ConfigError: PEFT cannot put the adapter on weights.
    """
    lost = _taken_for_experts(config, adapter, model)
    lacking = "quantization" if is_quantized(model) else why_not_on_parameters(adapter)
    if lost and lacking:
        raise ConfigError(
            f"adapter.target_modules={adapter.target_modules}: PEFT takes {len(lost)} linear layers of this mixture, "
            f"such as {lost[0]}, for those of its experts, so that the adapter is put on their weights, as parameters, "
            f"which does not go with {lacking}; set adapter.target_modules=attention"
        )
    if lost:
        config.target_parameters = [f"{name}.weight" for name in lost]
    return config


def _taken_for_experts(config: PeftConfig, adapter: Adapter, model: "PreTrainedModel") -> list[str]:
    """The targets that PEFT would replace by parameters of the experts: dense and shared layers of a mixture.

    It does so with all names that end in ``gate_proj`` and the like (its issue 3711).
    """
    kind = conversion._MODEL_TO_CONVERSION_PATTERN.get(model.config.model_type)
    if config.peft_type != PeftType.LORA or not conversion._MOE_FUSED_TARGETS.get(kind):
        return []
    ends = conversion._MOE_TARGET_MODULE_MAPPING[kind]
    return sorted(
        name for name, _, _ in _targets(adapter, model) if any(f".{name}".endswith(f".{end}") for end in ends)
    )


def _own(adapter: Adapter, model: "PreTrainedModel", num_steps: int) -> dict[str, object]:
    """The arguments of PEFT's configuration, from the fields of the adapter."""
    row = ADAPTERS[adapter.type]
    found: dict[str, object] = {}
    for name, argument in row.reads.items():
        value = adapter.value(name) if name in row.defaults or name == "target_rank" else getattr(adapter, name)
        if value is not None and argument and value not in XAVIER:
            found[argument] = list(value) if isinstance(value, tuple) else value
    _require_fit(adapter, model)
    if adapter.init == "eva":
        found["eva_config"] = peft.EvaConfig(rho=1.0)  # equal ranks: the adapter has the size that the plan counts
    if adapter.init == "lora_ga":
        found["lora_ga_config"] = peft.LoraGAConfig()
    if adapter.type == "adalora":
        if num_steps < ADALORA_STEPS:  # of num_epochs: the plan does not know the rows
            raise ConfigError(
                f"adapter.type=adalora with {num_steps} steps: it scores ranks before it prunes them, which takes at "
                f"least {ADALORA_STEPS}; set num_steps={ADALORA_STEPS} or more, or adapter.type=lora"
            )
        found |= {"total_step": num_steps, "tinit": max(2, int(_WARMUP * num_steps)), "tfinal": int(_FINAL * num_steps)}
    if adapter.type == "osf":
        found["rank_pattern"] = {
            f"^{name.replace('.', '[.]')}$": min(outputs, inputs) - osf_rank(adapter, outputs, inputs)
            for name, outputs, inputs in _targets(adapter, model)
        }
    return found


def _require_fit(adapter: Adapter, model: "PreTrainedModel") -> None:
    """Refuses a field that PEFT would ignore or change on this model."""
    if adapter.bias is not None and not any(name.endswith(".bias") for name, _ in model.named_parameters()):
        raise ConfigError(
            f"adapter.bias={adapter.bias}: this model ({model.config.model_type}) has no biases to train; set "
            "adapter.bias=null"
        )
    require_sizes(adapter, _targets(adapter, model))


def _require_on_experts(adapter: Adapter, layers: Sequence[str]) -> None:
    lacking = why_not_on_experts(adapter)
    if lacking:
        default = {"type": "lora", "init": "null", "dropout": "0"}[lacking.partition("=")[0]]
        raise ConfigError(
            f"adapter.{lacking}: the adapter is put on the experts of a mixture, which are parameters: PEFT cannot do "
            f"that for them; set adapter.{lacking.partition('=')[0]}={default}, or adapter.target_modules="
            f"{','.join(sorted({name.rpartition('.')[2] for name in layers}))}"
        )


def _warn_of_experts(adapter: Adapter, model: "PreTrainedModel") -> None:
    """Logs the experts that ``all-linear`` leaves frozen, because they are parameters."""
    experts = [name for name, each in model.named_parameters() if are_experts(each)]
    if experts and ALL_LINEAR in adapter.target_names and adapter.type != "ln_tuning":
        logger.warning(
            "adapter.type=%s target_modules=%s: the experts of a mixture get no adapter and stay frozen, because they "
            "are no linear layers; a LoRA on all layers is put on them: %s",
            adapter.type, adapter.target_modules, ",".join(experts),
        )  # fmt: skip


def _saved(adapter: Adapter, model: "PreTrainedModel") -> list[str]:
    """The full names of the modules that are trained in full; PEFT ignores a name that matches nothing."""
    names = [name for name, _ in model.named_modules()]
    found: list[str] = []
    for wanted in adapter.saved_names:
        matched = [name for name in names if name == wanted or name.endswith(f".{wanted}")]
        found += matched
        if not matched:
            raise no_module(adapter, wanted, names)
        tied = getattr(model.config, "tie_word_embeddings", False)
        embeddings = (model.get_input_embeddings(), model.get_output_embeddings())
        if tied and None not in embeddings and any(model.get_submodule(name) in embeddings for name in matched):
            raise ConfigError(
                f"adapter.modules_to_save={adapter.modules_to_save}: embedding and head of this model are one matrix, "
                "and PEFT would train two, of which one is saved; remove it, train single rows with "
                "adapter.trainable_token_indices, or all weights with adapter=full"
            )
    return found  # PEFT would match "norm" with every name that ends in it, such as input_layernorm


def _layers_beside_experts(config: PeftConfig, model: "PreTrainedModel") -> list[str] | None:
    """The linear layers among a config's targets in a mixture whose experts are parameters; None: it has no experts."""
    converted = copy.deepcopy(config)
    if not hasattr(converted, "target_parameters"):
        return None
    conversion.convert_peft_config_for_transformers(converted, model=model, conversions=None)
    return sorted(converted.target_modules) if converted.target_parameters else None


def _found(adapter: Adapter, model: "PreTrainedModel") -> list[str]:
    targets(adapter, [name for name, _, _ in _modules(adapter, model)])
    return adapter.target_names


def _targets(adapter: Adapter, model: "PreTrainedModel") -> list[tuple[str, int, int]]:
    """The modules that get the adapter: full name, outputs, inputs."""
    modules = _modules(adapter, model)
    chosen = set(targets(adapter, [name for name, _, _ in modules]))
    return [module for module in modules if module[0] in chosen]


def _modules(adapter: Adapter, model: "PreTrainedModel") -> list[tuple[str, int, int]]:
    """The modules that could get an adapter: linear layers, of which the head only if it is named, or the norms."""
    head = model.get_output_embeddings()
    found = []
    for name, module in model.named_modules():
        if adapter.type == "ln_tuning":
            if type(module).__name__.endswith("Norm"):
                found.append((name, module.weight.numel(), 1))
        elif isinstance(module, Conv1D):
            found.append((name, module.nf, module.nx))
        elif isinstance(module, torch.nn.Linear) and (module is not head or adapter.head) and name != "score":
            found.append((name, module.out_features, module.in_features))
    return found


def new_adapter(
    model: "PreTrainedModel", adapter: Adapter, config: PeftConfig, rows: Callable[[], "Dataset"], pad: int
) -> PeftModel:
    """The model with a new adapter; an initialization that needs data reads the first rows of the training.

    Args:
        pad: id of the padding token.

    Raises:
        ConfigError: PEFT refuses the adapter for this model.
    """
    if adapter.init == "lora_ga":
        config.target_modules = sorted(name for name, _, _ in _targets(adapter, model))  # PEFT asks for a list
        peft.preprocess_loraga(model, config, partial(_accumulate, model, _batches(rows(), pad, model.device)))
    try:
        with warnings.catch_warnings():
            # Of an adapter on a tied head, which is merged into a matrix of its own.
            warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")
            adapted = get_peft_model(model, config)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ConfigError(
            f"adapter.type={adapter.type}: PEFT refuses it for this model: {error}; set other adapter.target_modules, "
            "or another adapter.type, such as lora"
        ) from error
    if adapter.init == "eva":
        batches = _batches(rows(), pad, model.device)
        peft.initialize_lora_eva_weights(
            adapted, batches, gather_distributed_inputs=False, show_progress_bar=False
        )  # fmt: skip
    if adapter.init:
        # A copy of the adapter, as the reference of DPO, would be initialized again, and take its product off the base.
        config.init_lora_weights = True
    return adapted


XAVIER_DRAWS = dict(zip(XAVIER, (torch.nn.init.xavier_normal_, torch.nn.init.xavier_uniform_), strict=True))


class _OnOutput(torch.nn.Dropout):
    """Dropout of what a LoRA adds: PEFT calls it on the input, which it leaves, and B's hook on the output."""

    def forward(self, input: "Tensor") -> "Tensor":
        return input

    def drop(self, _module: torch.nn.Module, _inputs: object, output: "Tensor") -> "Tensor":
        return torch.nn.functional.dropout(output, self.p, self.training)


def finish_adapter(model: torch.nn.Module, adapter: Adapter | None, seed: int) -> None:
    """Does what PEFT cannot for a new LoRA: an initialization of A, and dropout of its output."""
    if adapter is None:
        return
    layers = [each for each in model.modules() if isinstance(each, LoraLayer) and DEFAULT in each.lora_A]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for layer in layers if adapter.init in XAVIER else ():
            weight = torch.empty(layer.lora_A[DEFAULT].weight.shape)  # on the CPU, so that devices draw the same
            layer.lora_A[DEFAULT].weight.data.copy_(XAVIER_DRAWS[str(adapter.init)](weight))
    for layer in layers if adapter.dropout_position == "post" else ():
        moved = _OnOutput(layer.lora_dropout[DEFAULT].p)
        layer.lora_dropout[DEFAULT] = moved
        layer.lora_B[DEFAULT].register_forward_hook(moved.drop)


def _accumulate(model: "PreTrainedModel", batches: "Batches") -> None:
    for batch in batches:
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        model(**batch, labels=labels, use_cache=False).loss.backward()


def _batches(rows: "Dataset", pad: int, device: torch.device) -> "Batches":
    """The first rows of the training."""
    sequences = [tokens_of(rows[index]) for index in range(min(_INIT_ROWS, len(rows)))]
    parts = [sequences[start : start + _INIT_BATCH] for start in range(0, len(sequences), _INIT_BATCH)]
    names = ("input_ids", "attention_mask")
    return [dict(zip(names, padded(part, device, left=False, pad=pad), strict=True)) for part in parts]


def continued(model: "PreTrainedModel", adapter: Adapter, config: PeftConfig, directory: Path) -> PeftModel:
    """The model with a saved adapter, to be trained further.

    Args:
        config: the adapter in the recipe: except for dropout, it must be equal to the saved one.

    Raises:
        ConfigError: they differ.
    """
    saved = PeftConfig.from_pretrained(directory)
    require_same(adapter, config, saved, model)
    dropout = ADAPTERS[adapter.type].reads.get("dropout")
    if dropout:
        setattr(saved, dropout, adapter.dropout)
    saved.task_type = config.task_type
    adapted = PeftModel.from_pretrained(model, directory, config=saved, is_trainable=True)
    step_in_fp32(adapted)  # PEFT copies modules in the dtype of the base, and rounds the saved weights to it
    adapted.load_adapter(str(directory), DEFAULT, is_trainable=True)
    return adapted


def require_same(adapter: Adapter, wanted: PeftConfig, saved: PeftConfig, model: "PreTrainedModel") -> None:
    """Requires that a saved adapter is the one that the recipe sets."""
    reads = ADAPTERS[adapter.type].reads
    compared = {name: argument for name, argument in reads.items() if argument and name not in ("dropout", "init")}
    pairs: dict[str, tuple[object, object]] = {"type": (wanted.peft_type.value.lower(), saved.peft_type.value.lower())}
    if wanted.peft_type == saved.peft_type:
        pairs |= {name: (getattr(wanted, each), getattr(saved, each)) for name, each in compared.items()}
        if "trainable_token_indices" in pairs:
            ours_rows, theirs_rows = pairs["trainable_token_indices"]
            pairs["trainable_token_indices"] = _rows(ours_rows), _rows(theirs_rows)
        every = [name for name, _ in model.named_modules()]
        whole = (sorted(name for name in every if _is_saved(each, name)) for each in (wanted, saved))
        pairs["modules_to_save"] = next(whole), next(whole)
        names = [name for name, _, _ in _modules(adapter, model)]
        ours, theirs = ({name for name in names if _is_target(each, name)} for each in (wanted, saved))
        pairs["target_modules"] = sorted(ours - theirs), sorted(theirs - ours)
        if adapter.type in ("lora", "dora"):
            pairs["type"] = (("lora", "dora")[wanted.use_dora], ("lora", "dora")[saved.use_dora])
    for name, (ours_value, theirs_value) in pairs.items():
        if ours_value != theirs_value:
            raise ConfigError(
                f"adapter_in=continue: adapter.{name} is {ours_value} here, and {theirs_value} of the adapter that is "
                f"trained further; set it as there, or adapter_in=merge for a new adapter"
            )


def _is_saved(config: PeftConfig, name: str) -> bool:
    """Whether a module is trained in full; PEFT takes its full name, or the end of it."""
    return any(name == each or name.endswith(f".{each}") for each in config.modules_to_save or ())


def _rows(indices: object) -> object:
    """The trained rows of the embedding, which PEFT also writes under the embedding's name; None: none."""
    found = [*indices.values()] if isinstance(indices, dict) else [indices]
    rows = found[0] if len(found) == 1 else indices
    return sorted(rows) if isinstance(rows, list | tuple) and rows else rows or None


def _is_target(config: PeftConfig, name: str) -> bool:
    from peft.tuners.tuners_utils import check_target_module_exists

    return config.target_modules == ALL_LINEAR or bool(check_target_module_exists(config, name))


def stacked(model: "PreTrainedModel", directories: Sequence[Path]) -> PeftModel:
    """The model with saved adapters, all of them active and frozen.

    Raises:
        ConfigError: one is not a LoRA that PEFT adds up.
    """
    adapted: PeftModel | None = None
    for index, directory in enumerate(directories):
        config, name = PeftConfig.from_pretrained(directory), f"stacked{index}"
        reason = why_not_stacked(config.to_dict())
        if reason:
            raise ConfigError(f"adapter_in=stack: the adapter of the input {reason}; set adapter_in=merge")
        if adapted is None:
            adapted = PeftModel.from_pretrained(model, directory, adapter_name=name, config=config, is_trainable=True)
        else:
            adapted.load_adapter(directory, name, is_trainable=True)
        step_in_fp32(adapted)  # as in ``continued``: modules that are copied from a base in bf16 were trained in fp32
        adapted.load_adapter(directory, name, is_trainable=True)
    assert adapted is not None
    adapted.requires_grad_(False)
    if isinstance(model.get_output_embeddings(), BaseTunerLayer):
        raise ConfigError(f"adapter_in=stack: the adapter of the input {ON_HEAD}; set adapter_in=merge")
    for name, module in adapted.named_modules():
        if ".lora_dropout." in name and isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # dropout of a finished training
    activate(adapted)
    return adapted


def upon(adapted: PeftModel, config: PeftConfig) -> PeftModel:
    """Adds a new adapter on top of frozen ones.

    Raises:
        ConfigError: both it and one of these have modules that are trained in full.
    """
    whole = config.modules_to_save and [each for each in adapted.peft_config.values() if each.modules_to_save]
    if whole:
        raise ConfigError(
            f"adapter_in=stack with adapter.modules_to_save: the adapter of the input trains {whole[0].modules_to_save}"
            " in full too, and PEFT uses the modules of one adapter alone; set adapter_in=merge, or "
            "adapter.modules_to_save=null"
        )
    adapted.add_adapter(DEFAULT, config)
    adapted.set_adapter(DEFAULT)
    activate(adapted)
    return adapted


def activate(adapted: PeftModel) -> None:
    """Activates all adapters except the reference, and trains only the default one."""
    names = [name for name in adapted.peft_config if name not in (DEFAULT, REFERENCE)]
    first = [DEFAULT] if DEFAULT in adapted.peft_config else []  # a trainer saves and loads the first
    adapted.base_model.set_adapter([*first, *names])
    for name, parameter in adapted.named_parameters():
        if any(f".{each}." in f"{name}." for each in names):
            parameter.requires_grad_(False)


def save_only_the_trained(adapted: PeftModel) -> None:
    """Lets the model save only the adapter in training, also in checkpoints; PEFT would save a head below it too."""
    head = isinstance(adapted.get_base_model().get_output_embeddings(), BaseTunerLayer)
    more = {"save_embedding_layers": False} if head else {}
    vars(adapted)["save_pretrained"] = partial(adapted.save_pretrained, selected_adapters=[DEFAULT], **more)


def add_reference(adapted: PeftModel) -> None:
    """Adds a frozen copy of the adapter if there is none, as TRL does; TRL copies some types incompletely."""
    if REFERENCE not in adapted.peft_config:
        adapted.add_adapter(REFERENCE, copy.deepcopy(adapted.peft_config[DEFAULT]))
    values = dict([*adapted.named_parameters(), *adapted.named_buffers()])
    for name, value in values.items():
        other = values.get(f"{name}.".replace(f".{DEFAULT}.", f".{REFERENCE}.").removesuffix("."))
        if other is not None and other is not value:
            other.data.copy_(value.data)
            other.requires_grad_(False)
    for name, module in adapted.named_modules():
        if f".{REFERENCE}" in name and isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # dropout is of the training
    adapted.set_adapter(DEFAULT)


def complete_head(model: torch.nn.Module) -> None:
    """Gives the head its bias where single rows of it are trained: PEFT's wrapper has the weights alone.

    It is the embedding, and its rows are those of ``trainable_token_indices``; losses read weights and bias.
    """
    head = model.get_base_model().get_output_embeddings() if isinstance(model, PeftModel) else None
    if isinstance(head, TrainableTokensWrapper):
        vars(head)["bias"] = head.original_module.bias


def add_noise(model: "PreTrainedModel | PeftModel", alpha: float) -> None:
    """NEFTune's noise on embeddings, while a policy trains: Jain et al. 2023, arXiv:2310.05914.

    transformers adds it in every forward in training mode, that of a reference too, where it is the policy without its
    adapter or with a frozen copy of it.
    """
    embeddings = plain(model).get_input_embeddings()
    embeddings.neftune_noise_alpha = alpha

    def noisy(module: torch.nn.Module, inputs: object, output: "Tensor") -> "Tensor":
        return output if _is_reference(model) else neftune_post_forward_hook(module, inputs, output)

    embeddings.register_forward_hook(noisy)


def _is_reference(model: "PreTrainedModel | PeftModel") -> bool:
    """Whether the forward pass is that of the frozen start."""
    layer = next((each for each in model.modules() if isinstance(each, BaseTunerLayer)), None)
    return layer is not None and (layer.disable_adapters or REFERENCE in layer.active_adapters)


def adapter_weights_of(adapted: PeftModel) -> "dict[str, Tensor]":
    """The weights of the adapter in training, copied."""
    state = peft.get_peft_model_state_dict(adapted, adapter_name=DEFAULT)
    return {name: value.detach().cpu().clone() for name, value in state.items()}


def _is_half_of_experts(parameter: torch.nn.Parameter) -> bool:
    """Whether it holds experts or a divided weight in 4 bits, two in a byte, of which PEFT counts only the bytes."""
    return type(parameter).__name__ != "Params4bit" and parameter.dtype == torch.uint8


def share_trained(model: torch.nn.Module) -> dict[str, float]:
    """The number of trained parameters, the number of all parameters, and the percentage."""
    if isinstance(model, PeftModel):
        trained, total = model.get_nb_trainable_parameters()
        total += sum(each.numel() for each in model.parameters() if _is_half_of_experts(each))
    else:
        sizes = [(each.numel(), each.requires_grad) for each in model.parameters()]
        trained, total = sum(size for size, is_trained in sizes if is_trained), sum(size for size, _ in sizes)
    percent = 100 * trained / total if total else 0.0
    logger.info("trained=%d parameters=%d percent=%.4g", trained, total, percent)
    return {"trained_parameters": float(trained), "parameters": float(total), "percent_trained": percent}


_KEPT_SCORES = ("exp_avg_ipt", "exp_avg_unc")  # of PEFT's allocator: means over the steps


class RankBudget(TrainerCallback):
    """Scores the ranks of AdaLoRA after each step, and sets the weakest to zero: arXiv:2303.10512.

    The adapter keeps its shape, so that checkpoints load: PEFT would save it without the pruned ranks, and not the
    scores. A pruned rank adds nothing to the output.
    """

    def __init__(self, model: "PeftModel") -> None:
        self.model = model
        self.allocator = model.base_model.rankallocator
        self.pattern: dict[str, list[bool]] | None = None

    def saved_state(self) -> "Mapping[str, object]":
        return {"pattern": self.pattern, **{kept: dict(getattr(self.allocator, kept)) for kept in _KEPT_SCORES}}

    def load_saved_state(self, state: "Mapping[str, object]") -> None:
        for kept in _KEPT_SCORES:
            found = cast("Mapping[str, Tensor]", state[kept])
            setattr(self.allocator, kept, {name: each.to(self.model.device) for name, each in found.items()})
        self.allocator.ipt = dict.fromkeys(self.allocator.exp_avg_ipt)
        self.pattern = cast("dict[str, list[bool]] | None", state["pattern"])

    def on_optimizer_step(self, args: "Args", state: "State", control: "Control", **kwargs: object) -> None:
        """Gradients are still there; a step without a signal has none, and scores ranks by zeros."""
        for parameter in self.model.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        config = self.model.peft_config["default"]
        config.rank_pattern = self.pattern
        self.model.base_model.update_and_allocate(state.global_step + 1)
        self.pattern, config.rank_pattern = config.rank_pattern, None


def follow_ranks(trainer: "Trainer", adapter: Adapter | None) -> None:
    """Lets the ranks of AdaLoRA follow the steps; other adapters keep theirs."""
    if adapter and adapter.type == "adalora":
        trainer.add_callback(RankBudget(trainer.model))
