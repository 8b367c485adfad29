"""What works with what: the rules that join settings of a training with each other, its model and its resources.

A rule of one setting alone is in its dataclass; one that joins several is an entry of ``RULES``. The plan refuses what
a rule refuses, ``posttrain compat`` prints the table, and ``docs/settings.md`` is rendered from it.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from importlib.util import find_spec

from lineage.errors import ConfigError
from lineage.model_files import quantization_format
from tasks.best import HELD_OUT_LOSS
from tasks.context import Launcher, Resources
from tasks.data.kinds import PREFERENCES
from tasks.data.tokens.packing import why_not_packable
from tasks.dpo import DPO, weights_of
from tasks.method import FROZEN_POLICY, Method, Training
from tasks.train.adapters import ALL_LINEAR, MIXTURES, NOT_ON_CONV1D, ON_QUANTIZED, why_not_on_experts
from tasks.train.dpo_losses import LOSSES
from tasks.train.generating import Generating
from tasks.train.optimizers import OPTIMIZERS, Entry
from tasks.train.quantization import CONV1D_MODELS, FORMATS, QUANTIZED_BEFORE, FormatRow
from tasks.train.schedules import PLATEAU

Fields = Mapping[str, object]  # field of a stage, such as method.adapter.type or resources.num_workers -> value
_NONE: Fields = {}
_HAVE_B = ("lora", "dora")  # adapters with two matrices of which one starts at 0
_PRODIGY_RATE = 0.1
_UNSET_NORM = 1.0  # the default of max_grad_norm


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training and what it runs on.

    Args:
        config: of its model, as ``config.json`` has it; empty: not known yet, so no rule that reads it applies.
    """

    method: Training
    resources: Resources
    config: Mapping[str, object] = field(default_factory=dict)

    def get(self, path: str) -> object:
        """The value of a field, such as ``method.adapter.type``; None: it, or the setting that it is of, is not set."""
        return self.found(path)[1]

    def found(self, path: str) -> tuple[str, object]:
        """The same, with the field that holds it: ``method.adapter`` where there is no adapter."""
        if path == "method":
            return path, type(self.method).__name__
        if path.startswith("config."):
            node: object = self.config
            for name in path.split(".")[1:]:
                node = node.get(name) if isinstance(node, Mapping) else None
            return path, node
        value: object = self
        names = path.split(".")
        for depth, name in enumerate(names, start=1):
            value = getattr(value, name, None)
            if value is None:
                return ".".join(names[:depth]), None
        return path, value

    @property
    def optimizer(self) -> Entry:
        """What the optimizer is and needs."""
        return OPTIMIZERS[self.method.optimizer.name]

    @property
    def accumulates(self) -> bool:
        """Whether a step adds up several micro batches."""
        return self.method.global_batch_size > self.resources.num_workers * self.resources.micro_batch_size

    @property
    def on_gpu(self) -> bool:
        return self.resources.gpus_per_worker > 0


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Settings that do not work together.

    Args:
        id: its name in ``posttrain compat``.
        fields: the fields that it joins; a refusal shows their values.
        refuses: whether it refuses a training.
        reason: why, as half a sentence after the values of the fields.
        detail: what to say in place of ``reason`` of the training that is refused.
        nearest: the values that make it work with the fewest changes; they pass every rule.
        example: values that it refuses, of a stage of ``stage``: the tests try both.
        stage: a file of ``conf/stage``, or ``own_loop`` for a method with a loop of its own.
        config: of the example's model.
    """

    id: str
    fields: tuple[str, ...]
    refuses: Callable[[Case], object]
    reason: str
    nearest: Fields | Callable[[Case], Fields]
    example: Fields
    stage: str = "sft"
    config: Mapping[str, object] = field(default_factory=dict)
    detail: Callable[[Case], str] | None = None


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A rule that refuses a training, and what to do.

    Args:
        found: the fields that do not work together -> their values.
        nearest: the fields to set.
    """

    rule: str
    found: Fields
    reason: str
    nearest: Fields

    def text(self, where: str) -> str:
        """A message about the stage at ``where``, such as ``stages.sft``, that ends in overrides to paste."""
        return (
            f"{where}: {', '.join(assigned(self.found))}: {self.reason}; set {' '.join(assigned(self.nearest, where))}"
        )


def refusals(case: Case) -> Iterator[Refusal]:
    """What every rule that refuses a training says."""
    for rule in RULES:
        if rule.refuses(case):
            yield Refusal(
                rule=rule.id,
                found=dict(case.found(path) for path in rule.fields),
                reason=rule.detail(case) if rule.detail else rule.reason,
                nearest=rule.nearest(case) if callable(rule.nearest) else rule.nearest,
            )


def check_compatible(where: str, method: Method, resources: Resources, config: Mapping[str, object] = _NONE) -> None:
    """Requires that the settings of a stage work together, where it is a training.

    Args:
        where: ``stages.NAME``.
        config: of its model, where that is known.

    Raises:
        ConfigError: names the fields, the reason, and the overrides that make it work.
    """
    if isinstance(method, Training):
        for refusal in refusals(Case(method=method, resources=resources, config=config)):
            raise ConfigError(refusal.text(where))


def assigned(values: Fields, where: str = "") -> list[str]:
    """Fields and values in the form of overrides."""
    prefix = f"{where}." if where else ""
    return [f"{prefix}{path}={_written(value)}" for path, value in values.items()]


def _written(value: object) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value)


def _divisor(number: int, most: int) -> int:
    """The largest divisor of ``number`` that is at most ``most``."""
    return next(each for each in range(min(number, most), 0, -1) if number % each == 0)


def _fitting_batches(case: Case) -> Fields:
    """Fewer rows per worker, and fewer workers where theirs do not divide the global batch."""
    batch, resources = case.method.global_batch_size, case.resources
    workers = _divisor(batch, resources.num_workers)
    fitting = {
        "num_workers": workers,
        "num_nodes": _divisor(workers, resources.num_nodes),
        "micro_batch_size": _divisor(batch // workers, resources.micro_batch_size),
    }
    return {f"resources.{name}": value for name, value in fitting.items() if value != getattr(resources, name)}


def _batch_does_not_divide(case: Case) -> bool:
    return case.method.global_batch_size % (case.resources.num_workers * case.resources.micro_batch_size) != 0


def _leaves_a_worker_idle(case: Case) -> bool:
    num_minibatches = case.get("method.num_minibatches")
    if not isinstance(num_minibatches, int):
        return False
    return case.method.global_batch_size < num_minibatches * case.resources.num_workers


def _keep_best_unmeasured(case: Case) -> bool:
    kept = case.resources.keep_best
    return kept is not None and kept.metric == HELD_OUT_LOSS and not case.method.measures_held_out


def _ends_before_its_patience(case: Case) -> bool:
    """Whether no measurement can end the training: that after the last step, which it also takes, ends nothing."""
    patience, every = case.get("method.validation.patience"), case.get("method.validation.every_steps")
    steps = case.method.num_steps
    if not (isinstance(patience, int) and isinstance(every, int) and steps):
        return False
    return patience > (steps - 1) // every


def _compares_in_steps(case: Case) -> bool:
    return isinstance(case.method, DPO) and any(LOSSES[name].of_step for name in weights_of(case.method))


def _compares_pairs(case: Case) -> bool:
    """Whether it trains on pairs of answers against a frozen reference."""
    return case.method.has_reference and type(case.method).reads == PREFERENCES and not case.method.has_own_loop


def _unpackable(case: Case) -> str | None:
    return why_not_packable(case.config) if case.config and case.get("method.packing") else None


def _unpaged(name: str) -> str:
    """The optimizer with its state in one memory."""
    rest = name.removeprefix("paged_")
    return rest if rest in OPTIMIZERS else "adamw_torch_fused"


def _too_much_decay(case: Case) -> bool:
    num_steps = case.method.num_steps
    return num_steps is not None and case.method.schedule.is_longer_than(num_steps)


def _computes_below_precision(case: Case) -> bool:
    is_frozen = case.method.adapter is not None or FROZEN_POLICY in case.method.models.values()
    return case.resources.weights == "bf16" and case.method.precision != "bf16" and is_frozen


def _is_conv1d(case: Case) -> bool:
    return case.get("config.model_type") in CONV1D_MODELS


def _not_on_experts(case: Case) -> str | None:
    """What of the adapter PEFT cannot put on the experts of the model; on a quantized base they get none."""
    adapter = case.method.adapter
    if adapter is None or case.method.quantization or case.get("config.model_type") not in MIXTURES:
        return None
    return why_not_on_experts(adapter)


def _drops_out_of_its_start(case: Case) -> bool:
    """Whether the adapter adds something from the first step on, of which its dropout takes some."""
    adapter = case.method.adapter
    if adapter is None or not adapter.dropout:
        return False
    return adapter.changes_the_base or case.method.adapter_in == "continue"


_QUANTIZED: Fields = {
    "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
}


def _format_row(case: Case) -> FormatRow | None:
    """Of the format that the training rounds its base to."""
    return FORMATS[case.method.quantization.format] if case.method.quantization else None


def _model_row(case: Case) -> FormatRow | None:
    """Of the format that the model is in."""
    name = QUANTIZED_BEFORE.get(quantization_format(case.config) or "")
    return FORMATS[name] if name else None


def _format_nf4(case: Case) -> Fields:
    """Four bits that need neither a GPU nor a package, without the options of another format."""
    setting = case.method.quantization
    assert setting
    unread = [name for name in ("group_size",) if getattr(setting, name) is not None]
    return {"method.quantization.format": "nf4", **{f"method.quantization.{name}": None for name in unread}}


RULES: tuple[Rule, ...] = (
    # Adapters and quantized bases.
    Rule(
        id="quantization-full-training",
        fields=("method.quantization.format", "method.adapter"),
        refuses=lambda case: case.method.quantization and case.method.adapter is None,
        reason="a base in few bits is frozen, so only an adapter can be trained on it",
        nearest={"method.adapter.type": "lora"},
        example={"method.quantization.format": "nf4", "method.adapter": None},
    ),
    Rule(
        id="adapter-type-quantization",
        fields=("method.adapter.type", "method.quantization.format"),
        refuses=lambda case: case.method.quantization and case.get("method.adapter.type") not in (None, *ON_QUANTIZED),
        reason=f"PEFT puts it on layers in full precision; on a quantized base train {', '.join(ON_QUANTIZED)}",
        nearest={"method.adapter.type": "lora"},
        example={"method.adapter.type": "vera", "method.quantization.format": "nf4"},
    ),
    Rule(
        id="adapter-init-quantization",
        fields=("method.adapter.init", "method.quantization.format"),
        refuses=lambda case: case.method.quantization and case.method.adapter and case.method.adapter.changes_the_base,
        reason="this initialization takes its product off the base, which would be rounded again",
        nearest={"method.adapter.init": None},
        example={"method.adapter.type": "lora", "method.adapter.init": "pissa", "method.quantization.format": "nf4"},
    ),
    Rule(
        id="adalora-zero",
        fields=("method.adapter.type", "resources.zero_stage"),
        refuses=lambda case: case.get("method.adapter.type") == "adalora" and case.resources.zero_stage,
        reason="AdaLoRA scores ranks by their gradients, which ZeRO divides over the workers",
        nearest={"resources.zero_stage": 0},
        example={"method.adapter.type": "adalora", "resources.zero_stage": 2, "resources.num_workers": 2},
    ),
    Rule(
        id="adalora-return",
        fields=("method.adapter.type", "method.schedule.adaptive.divergence_z"),
        refuses=lambda case: (
            case.get("method.adapter.type") == "adalora" and case.get("method.schedule.adaptive.divergence_z")
        ),
        reason="AdaLoRA prunes ranks at set steps, and a training that goes back may have passed them",
        nearest={"method.schedule.adaptive.divergence_z": None},
        example={
            "method.adapter.type": "adalora",
            "method.schedule.adaptive.divergence_z": 50.0,
            "method.best.every_steps": 1,
        },
    ),
    Rule(
        id="adalora-own-loop",
        fields=("method.adapter.type", "method"),
        refuses=lambda case: case.get("method.adapter.type") == "adalora" and case.method.has_own_loop,
        reason="transformers' trainer prunes its ranks, and this method has a loop of its own",
        nearest={"method.adapter.type": "lora"},
        example={"method.adapter.type": "adalora"},
        stage="own_loop",
    ),
    Rule(
        id="neftune-own-loop",
        fields=("method.neftune_alpha", "method"),
        refuses=lambda case: case.method.neftune_alpha and case.method.has_own_loop,
        reason="transformers' trainer adds the noise, and this method has a loop of its own",
        nearest={"method.neftune_alpha": None},
        example={"method.neftune_alpha": 5.0},
        stage="own_loop",
    ),
    Rule(
        id="neftune-packing",
        fields=("method.neftune_alpha", "method.packing"),
        refuses=lambda case: case.method.neftune_alpha and case.get("method.packing"),
        reason="the noise is divided by the root of the length, and packs lie end to end with all others of a micro "
        "batch, so that micro_batch_size would change it",
        nearest={"method.packing": None},
        example={"method.neftune_alpha": 5.0, "method.packing": "best_fit"},
    ),
    Rule(
        id="quantization-gpu",
        fields=("method.quantization.format", "resources.gpus_per_worker"),
        refuses=lambda case: (row := _format_row(case)) and row.gpu and not case.on_gpu,
        reason="this format is computed by kernels for GPUs alone",
        nearest=_format_nf4,
        example={"method.adapter.type": "lora", "method.quantization.format": "hqq"},
    ),
    Rule(
        id="quantization-conv1d",
        fields=("method.quantization.format", "config.model_type"),
        refuses=lambda case: (
            (row := _format_row(case)) and not row.conv1d and case.get("config.model_type") in CONV1D_MODELS
        ),
        reason="the layers of this model are no linear layers of torch, which this format alone rounds",
        nearest=_format_nf4,
        example={"method.adapter.type": "lora", "method.quantization.format": "torchao_int8"},
        config={"model_type": "gpt2"},
    ),
    Rule(
        id="quantized-model-full-training",
        fields=("config.quantization_config.quant_method", "method.adapter"),
        refuses=lambda case: quantization_format(case.config) and case.method.adapter is None,
        reason="the model is in few bits already, and such weights cannot be trained",
        nearest={"method.adapter.type": "lora"},
        example={},
        config=_QUANTIZED,
    ),
    Rule(
        id="quantized-model-quantization",
        fields=("config.quantization_config.quant_method", "method.quantization.format"),
        refuses=lambda case: quantization_format(case.config) and case.method.quantization,
        reason="the model is in few bits already, and would be rounded again",
        nearest={"method.quantization": None},
        example={"method.adapter.type": "lora", "method.quantization.format": "nf4"},
        config=_QUANTIZED,
    ),
    Rule(
        id="quantized-model-gpu",
        fields=("config.quantization_config.quant_method", "resources.gpus_per_worker"),
        refuses=lambda case: (row := _model_row(case)) and row.gpu and not case.on_gpu,
        reason="the model is in a format that is computed by kernels for GPUs alone",
        nearest={"resources.gpus_per_worker": 1},
        example={"method.adapter.type": "lora", "method.save": "adapter"},
        config={"quantization_config": {"quant_method": "gptq"}},
    ),
    Rule(
        id="quantized-model-merge",
        fields=("config.quantization_config.quant_method", "method.save"),
        refuses=lambda case: (
            (row := _model_row(case)) and not row.dequantizes and case.method.adapter and case.method.save is None
        ),
        reason="the model is in a format that cannot be dequantized, so that no adapter can be merged into it",
        nearest={"method.save": "adapter"},
        example={"method.adapter.type": "lora", "resources.gpus_per_worker": 1},
        config={"quantization_config": {"quant_method": "gptq"}},
    ),
    Rule(
        id="dora-int8",
        fields=("method.adapter.type", "method.quantization.format"),
        refuses=lambda case: (
            case.get("method.adapter.type") == "dora" and case.get("method.quantization.format") == "int8"
        ),
        reason="PEFT's DoRA reads the scales of a layer in int8 after bitsandbytes has moved them",
        nearest={"method.quantization.format": "nf4"},
        example={"method.adapter.type": "dora", "method.quantization.format": "int8"},
    ),
    Rule(
        id="matrices-adapter",
        fields=("method.optimizer.name", "method.adapter.type"),
        refuses=lambda case: (
            case.optimizer.matrices
            and not case.optimizer.projects
            and case.get("method.adapter.type") not in (None, "lora", "dora")
        ),
        reason="it treats the matrices of linear layers apart, and of the adapters LoRA and DoRA alone train such",
        nearest={"method.adapter.type": "lora"},
        example={"method.optimizer.name": "muon", "method.adapter.type": "vera"},
    ),
    Rule(
        id="matrices-conv1d",
        fields=("method.optimizer.name", "config.model_type"),
        refuses=lambda case: case.optimizer.matrices and case.method.adapter is None and _is_conv1d(case),
        reason="it treats the matrices of linear layers apart, and the layers of this model are no linear layers of "
        "torch",
        nearest={"method.optimizer.name": "adamw_torch_fused"},
        example={"method.optimizer.name": "muon"},
        config={"model_type": "gpt2"},
    ),
    Rule(
        id="adapter-conv1d",
        fields=("method.adapter.type", "method.adapter.init", "config.model_type"),
        refuses=lambda case: (
            _is_conv1d(case)
            and (case.get("method.adapter.type") in NOT_ON_CONV1D or case.get("method.adapter.init") == "olora")
        ),
        reason="PEFT puts it on linear layers of torch alone, and the layers of this model are none",
        nearest={"method.adapter.type": "lora", "method.adapter.init": None},
        example={"method.adapter.type": "boft"},
        config={"model_type": "gpt2"},
    ),
    Rule(
        id="adapter-experts",
        fields=("method.adapter.type", "method.adapter.target_modules", "config.model_type"),
        refuses=lambda case: _not_on_experts(case) is not None,
        reason="all-linear puts it on the experts of a mixture too, which are parameters, and PEFT has no DoRA, no "
        "dropout and no initialization but its own and gaussian for them",
        detail=lambda case: (
            f"adapter.{_not_on_experts(case)}: all-linear puts the adapter on the experts of a mixture too, which are "
            "parameters, and PEFT cannot do that for them"
        ),
        nearest={"method.adapter.target_modules": "attention"},
        example={"method.adapter.type": "dora"},
        config={"model_type": "mixtral"},
    ),
    Rule(
        id="adapter-images",
        fields=("method.adapter.type", "method.adapter.init", "method.adapter.target_modules"),
        refuses=lambda case: (
            case.get("config.vision_config") is not None
            and (case.get("method.adapter.type") == "adalora" or case.get("method.adapter.init") == "eva")
            and case.get("method.adapter.target_modules") == ALL_LINEAR
        ),
        reason="it reads what each layer gets, and rows of text reach no layer that reads images",
        nearest={"method.adapter.target_modules": "*language_model*"},
        example={"method.adapter.type": "adalora"},
        config={"vision_config": {}},
    ),
    Rule(
        id="dropout-reference",
        fields=("method.adapter.dropout", "method.adapter.init", "method.adapter_in"),
        refuses=lambda case: FROZEN_POLICY in case.method.models.values() and _drops_out_of_its_start(case),
        reason="this adapter does not start at zero, so that dropout makes the policy differ from its reference at "
        "step 0",
        nearest={"method.adapter.dropout": 0.0},
        example={"method.adapter.type": "lora", "method.adapter.init": "pissa", "method.adapter.dropout": 0.1},
        stage="dpo",
    ),
    # Precision.
    Rule(
        id="fp16-cpu",
        fields=("method.precision", "resources.gpus_per_worker"),
        refuses=lambda case: case.method.precision == "fp16" and not case.on_gpu,
        reason="without a GPU the trainer computes in fp32 and says nothing",
        nearest={"method.precision": "bf16"},
        example={"method.precision": "fp16"},
    ),
    Rule(
        id="fp16-zero",
        fields=("method.precision", "resources.zero_stage"),
        refuses=lambda case: case.method.precision == "fp16" and case.resources.zero_stage,
        reason="fp16 needs a scaled loss, and with ZeRO it is not scaled",
        nearest={"method.precision": "bf16"},
        example={
            "method.precision": "fp16",
            "resources.gpus_per_worker": 1,
            "resources.num_workers": 2,
            "resources.zero_stage": 2,
        },
    ),
    Rule(
        id="fp16-own-loop",
        fields=("method.precision", "method"),
        refuses=lambda case: case.method.precision == "fp16" and case.method.has_own_loop,
        reason="fp16 needs a scaled loss, and a loop of a method's own does not scale it",
        nearest={"method.precision": "bf16"},
        example={"method.precision": "fp16", "resources.gpus_per_worker": 1},
        stage="own_loop",
    ),
    Rule(
        id="fp8-cpu",
        fields=("method.precision", "resources.gpus_per_worker"),
        refuses=lambda case: case.method.precision == "fp8" and not case.on_gpu,
        reason="only GPUs of compute capability 8.9 (Ada, Hopper) or higher multiply in fp8",
        nearest={"method.precision": "bf16"},
        example={"method.precision": "fp8"},
    ),
    Rule(
        id="fp8-adapter",
        fields=("method.precision", "method.adapter.type"),
        refuses=lambda case: case.method.precision == "fp8" and case.on_gpu and case.method.adapter is not None,
        reason="fp8 is torchao's recipe for layers that are trained, and those under an adapter are not",
        nearest={"method.precision": "bf16"},
        example={"method.precision": "fp8", "method.adapter.type": "lora", "resources.gpus_per_worker": 1},
    ),
    Rule(
        id="fp8-zero",
        fields=("method.precision", "resources.zero_stage"),
        refuses=lambda case: case.method.precision == "fp8" and case.on_gpu and case.resources.zero_stage,
        reason="DeepSpeed casts the model itself, and fp8 was not tried under it",
        nearest={"method.precision": "bf16"},
        example={
            "method.precision": "fp8",
            "resources.gpus_per_worker": 1,
            "resources.num_workers": 2,
            "resources.zero_stage": 2,
        },
    ),
    # Memory and kernels.
    Rule(
        id="liger-cpu",
        fields=("resources.liger", "resources.gpus_per_worker"),
        refuses=lambda case: case.resources.liger and not case.on_gpu,
        reason="its kernels are written in Triton, for GPUs alone",
        nearest={"resources.liger": False},
        example={"resources.liger": True},
    ),
    Rule(
        id="empty-cache-cpu",
        fields=("resources.empty_cache_steps", "resources.gpus_per_worker"),
        refuses=lambda case: case.resources.empty_cache_steps and not case.on_gpu,
        reason="it returns unused GPU memory, and there is no GPU",
        nearest={"resources.empty_cache_steps": None},
        example={"resources.empty_cache_steps": 10},
    ),
    Rule(
        id="compile-zero",
        fields=("resources.compile", "resources.zero_stage"),
        refuses=lambda case: case.resources.compile and case.resources.zero_stage,
        reason="DeepSpeed's engine calls the model, and compiled layers were not tried under it",
        nearest={"resources.compile": False},
        example={"resources.compile": True, "resources.zero_stage": 2, "resources.num_workers": 2},
    ),
    Rule(
        id="loader-own-loop",
        fields=("resources.dataloader_workers", "method"),
        refuses=lambda case: case.resources.dataloader_workers and case.method.has_own_loop,
        reason="a loop of a method's own collates in its own process",
        nearest={"resources.dataloader_workers": 0},
        example={"resources.dataloader_workers": 2},
        stage="own_loop",
    ),
    Rule(
        id="flash-attention-cpu",
        fields=("resources.attention", "resources.gpus_per_worker"),
        refuses=lambda case: case.resources.attention.startswith("flash") and not case.on_gpu,
        reason="FlashAttention has kernels for GPUs alone",
        nearest={"resources.attention": "auto"},
        example={"resources.attention": "flash_attention_2", "method.precision": "bf16"},
    ),
    Rule(
        id="flash-attention-fp32",
        fields=("resources.attention", "method.precision"),
        refuses=lambda case: (
            case.resources.attention.startswith("flash") and case.on_gpu and case.method.precision == "fp32"
        ),
        reason="FlashAttention computes in bf16 and fp16 alone",
        nearest={"resources.attention": "auto"},
        example={"resources.attention": "flash_attention_3", "resources.gpus_per_worker": 1},
    ),
    Rule(
        id="weights-precision",
        fields=("resources.weights", "method.precision"),
        refuses=_computes_below_precision,
        reason="a base or a reference in bf16 computes in bf16",
        nearest={"method.precision": "bf16"},
        example={"resources.weights": "bf16", "method.adapter.type": "lora"},
    ),
    # References.
    Rule(
        id="precompute-no-reference",
        fields=("resources.precompute_reference", "method"),
        refuses=lambda case: case.resources.precompute_reference and not _compares_pairs(case),
        reason="it trains on no pairs against a frozen reference by transformers' trainer, so there is nothing to "
        "compute before",
        nearest={"resources.precompute_reference": False},
        example={"resources.precompute_reference": True},
    ),
    Rule(
        id="precompute-moving-reference",
        fields=("resources.precompute_reference", "method.reference_sync.every_steps"),
        refuses=lambda case: (
            case.resources.precompute_reference and case.get("method.reference_sync.every_steps") is not None
        ),
        reason="a reference that follows the policy has other log-probabilities after each update",
        nearest={"resources.precompute_reference": False},
        example={
            "resources.precompute_reference": True,
            "method.reference_sync.every_steps": 1,
            "method.sft_weight": None,
        },
        stage="dpo",
    ),
    Rule(
        id="precompute-ld-alpha",
        fields=("resources.precompute_reference", "method.ld_alpha"),
        refuses=lambda case: case.resources.precompute_reference and case.get("method.ld_alpha") is not None,
        reason="LD-DPO weights the tokens of an answer, and the cache holds their sums",
        nearest={"resources.precompute_reference": False},
        example={"resources.precompute_reference": True, "method.ld_alpha": 0.5, "method.sft_weight": None},
        stage="dpo",
    ),
    Rule(
        id="precompute-quantized-input",
        fields=("resources.precompute_reference", "method.adapter_in", "method.quantization.format"),
        refuses=lambda case: (
            case.resources.precompute_reference
            and case.method.quantization
            and case.method.adapter_in in ("continue", "stack")
        ),
        reason="the input's adapter would be merged into a base in few bits, and rounded with it",
        nearest={"resources.precompute_reference": False},
        example={
            "resources.precompute_reference": True,
            "method.adapter.type": "lora",
            "method.adapter_in": "continue",
            "method.quantization.format": "nf4",
        },
        stage="dpo",
    ),
    Rule(
        id="step-losses-zero",
        fields=("method.loss_type", "method.losses", "resources.zero_stage"),
        refuses=lambda case: case.resources.zero_stage and _compares_in_steps(case),
        reason="a loss that compares the pairs of a step reads them before the step, which was not tried under "
        "DeepSpeed's engine",
        nearest={"resources.zero_stage": 0},
        example={
            "method.loss_type": "kto_pair",
            "method.sft_weight": None,
            "resources.num_workers": 2,
            "resources.zero_stage": 2,
        },
        stage="dpo",
    ),
    Rule(
        id="moving-reference-weights",
        fields=("method.reference_sync.every_steps", "resources.weights", "method.precision"),
        refuses=lambda case: (
            case.get("method.reference_sync.every_steps") is not None
            and case.resources.frozen_dtype(case.resources.resolved_precision(case.method.precision)) == "bf16"
        ),
        reason="a reference in bf16 would round away what it takes over of the policy",
        nearest={"resources.weights": "fp32"},
        example={
            "method.reference_sync.every_steps": 1,
            "method.sft_weight": None,
            "method.precision": "bf16",
            "resources.weights": "bf16",
        },
        stage="dpo",
    ),
    Rule(
        id="moving-reference-zero",
        fields=("method.reference_sync.every_steps", "resources.zero_stage"),
        refuses=lambda case: case.get("method.reference_sync.every_steps") is not None and case.resources.zero_stage,
        reason="DeepSpeed's engine holds the reference, which was not tried to follow the policy under it",
        nearest={"resources.zero_stage": 0},
        example={
            "method.reference_sync.every_steps": 1,
            "method.sft_weight": None,
            "resources.num_workers": 2,
            "resources.zero_stage": 2,
        },
        stage="dpo",
    ),
    # Rows.
    Rule(
        id="packing-position-ids",
        fields=("method.packing", "config.model_type"),
        refuses=lambda case: _unpackable(case) is not None,
        reason="position ids alone keep the rows of a pack apart, and not every part of this model reads them",
        detail=lambda case: _unpackable(case) or "",
        nearest={"method.packing": None},
        example={"method.packing": "best_fit"},
        config={"model_type": "bloom"},
    ),
    # Optimizers and schedules.
    Rule(
        id="schedule-free-schedule",
        fields=("method.optimizer.name", "method.schedule.name"),
        refuses=lambda case: (
            case.optimizer.averages and not str(case.get("method.schedule.name")).startswith("constant")
        ),
        reason="a schedule-free optimizer averages its steps in place of a schedule, and after a warm-up wants a "
        "constant learning rate",
        nearest={"method.schedule.name": "constant"},
        example={"method.optimizer.name": "schedule_free_adamw"},
    ),
    Rule(
        id="optimizer-own-loop",
        fields=("method.optimizer.name", "method"),
        refuses=lambda case: case.method.has_own_loop and (case.optimizer.averages or case.optimizer.in_backward),
        reason="it takes part in the trainer's backward pass, measurements and checkpoints, and this method has a loop "
        "of its own",
        nearest={"method.optimizer.name": "adamw_torch_fused"},
        example={"method.optimizer.name": "schedule_free_adamw", "method.schedule.name": "constant"},
        stage="own_loop",
    ),
    Rule(
        id="galore-adapter",
        fields=("method.optimizer.name", "method.adapter.type"),
        refuses=lambda case: case.optimizer.projects and case.method.adapter,
        reason="it projects the gradients of whole matrices onto few dimensions, and an adapter's have few already",
        nearest={"method.adapter": None, "method.quantization": None},
        example={"method.optimizer.name": "galore_adamw", "method.adapter.type": "lora"},
    ),
    Rule(
        id="lora-plus-adapter",
        fields=("method.optimizer.lora_plus_ratio", "method.adapter.type"),
        refuses=lambda case: (
            case.get("method.optimizer.lora_plus_ratio") and case.get("method.adapter.type") not in _HAVE_B
        ),
        reason="LoRA+ gives the matrices B of a LoRA another learning rate, and there is none",
        nearest={"method.optimizer.lora_plus_ratio": None},
        example={"method.optimizer.lora_plus_ratio": 16.0},
    ),
    Rule(
        id="paged-cpu",
        fields=("method.optimizer.name", "resources.gpus_per_worker"),
        refuses=lambda case: case.optimizer.needs_gpu and not case.on_gpu,
        reason="its state pages between a GPU and the CPU, and there is no GPU",
        nearest=lambda case: {"method.optimizer.name": _unpaged(case.method.optimizer.name)},
        example={"method.optimizer.name": "paged_adamw_8bit"},
    ),
    Rule(
        id="backward-accumulation",
        fields=(
            "method.optimizer.name",
            "method.global_batch_size",
            "resources.num_workers",
            "resources.micro_batch_size",
        ),
        refuses=lambda case: case.optimizer.in_backward and case.resources.num_workers == 1 and case.accumulates,
        reason="LOMO and layer-wise optimizers update inside each backward pass, so each micro batch would be a step",
        nearest=lambda case: {"resources.micro_batch_size": case.method.global_batch_size},
        example={"method.optimizer.name": "lomo"},
    ),
    Rule(
        id="backward-workers",
        fields=("method.optimizer.name", "resources.num_workers"),
        refuses=lambda case: case.optimizer.in_backward and case.resources.num_workers > 1,
        reason="LOMO and layer-wise optimizers update before workers exchange gradients, so models would drift apart",
        nearest=lambda case: {
            "resources.num_workers": 1,
            "resources.num_nodes": 1,
            "resources.micro_batch_size": case.method.global_batch_size,
        },
        example={
            "method.optimizer.name": "galore_adamw_layerwise",
            "resources.num_workers": 2,
            "resources.micro_batch_size": 8,
        },
    ),
    Rule(
        id="backward-clipping",
        fields=("method.optimizer.name", "method.max_grad_norm"),
        refuses=lambda case: case.optimizer.in_backward and case.get("method.max_grad_norm") != _UNSET_NORM,
        reason="LOMO and layer-wise optimizers free each gradient before the norm of all is known, so none is clipped",
        nearest={"method.max_grad_norm": 1.0},
        example={
            "method.optimizer.name": "lomo",
            "method.max_grad_norm": 0.5,
            "resources.micro_batch_size": 16,
        },
    ),
    Rule(
        id="backward-fp16",
        fields=("method.optimizer.name", "method.precision"),
        refuses=lambda case: case.optimizer.in_backward and case.method.precision == "fp16",
        reason="LOMO and layer-wise optimizers update before the gradients of a scaled loss are scaled back",
        nearest={"method.precision": "bf16"},
        example={
            "method.optimizer.name": "galore_adamw_layerwise",
            "method.precision": "fp16",
            "resources.micro_batch_size": 16,
            "resources.gpus_per_worker": 1,
        },
    ),
    Rule(
        id="prodigy-learning-rate",
        fields=("method.optimizer.name", "method.learning_rate"),
        refuses=lambda case: (
            case.get("method.optimizer.name") == "prodigy" and case.method.learning_rate < _PRODIGY_RATE
        ),
        reason="it finds the step size itself, and the learning rate multiplies that",
        nearest={"method.learning_rate": 1.0},
        example={"method.optimizer.name": "prodigy"},
    ),
    Rule(
        id="minimum-learning-rate",
        fields=("method.schedule.min_learning_rate", "method.learning_rate"),
        refuses=lambda case: (case.method.schedule.min_learning_rate or 0) >= case.method.learning_rate,
        reason="the learning rate would rise",
        nearest=lambda case: {"method.schedule.min_learning_rate": float(f"{case.method.learning_rate / 10:g}")},
        example={"method.schedule.min_learning_rate": 0.01},
    ),
    Rule(
        id="decay-steps",
        fields=("method.schedule.decay", "method.schedule.warmup", "method.num_steps"),
        refuses=lambda case: _too_much_decay(case),
        reason="warm-up and decay are more than all steps",
        nearest={"method.schedule.decay": None},
        example={"method.schedule.name": "warmup_stable_decay", "method.schedule.decay": 3},
    ),
    Rule(
        id="adaptive-zero",
        fields=("method.schedule.adaptive.smoothing", "resources.zero_stage"),
        refuses=lambda case: case.method.schedule.adaptive and case.resources.zero_stage,
        reason="with ZeRO, DeepSpeed's engine holds the learning rate and the optimizer's state that it would change",
        nearest={"resources.zero_stage": 0},
        example={
            "method.schedule.adaptive.smoothing": 0.9,
            "resources.num_workers": 2,
            "resources.zero_stage": 2,
        },
    ),
    Rule(
        id="adaptive-optimizer",
        fields=("method.schedule.adaptive.smoothing", "method.optimizer.name"),
        refuses=lambda case: case.method.schedule.adaptive and (case.optimizer.averages or case.optimizer.in_backward),
        reason="an adaptive learning rate changes that of the next step and may go back to a checkpoint, which "
        "schedule-free optimizers and those that update inside the backward pass do not follow",
        nearest={"method.schedule.adaptive": None},
        example={
            "method.schedule.adaptive.smoothing": 0.9,
            "method.schedule.name": "constant",
            "method.optimizer.name": "schedule_free_adamw",
        },
    ),
    Rule(
        id="validation-patience",
        fields=("method.validation.patience", "method.validation.every_steps", "method.num_steps"),
        refuses=_ends_before_its_patience,
        reason="the training takes its last step before it has measured so often, so the patience never ends it",
        nearest={"method.validation.patience": None},
        example={"method.validation.patience": 2, "method.validation.every_steps": 2, "method.num_steps": 4},
    ),
    Rule(
        id="plateau-validation",
        fields=("method.schedule.name", "method.validation"),
        refuses=lambda case: case.get("method.schedule.name") == PLATEAU and case.method.validation is None,
        reason="it lowers the learning rate where the loss on held-out rows no longer falls, and none is measured",
        nearest=lambda case: (
            {"method.schedule.name": "linear"}
            if case.method.has_own_loop or not type(case.method).reads.trained
            else {"method.validation.every_steps": 10}
        ),
        example={"method.schedule.name": PLATEAU},
    ),
    # Batches, workers, sharding.
    Rule(
        id="batch-workers",
        fields=("method.global_batch_size", "resources.num_workers", "resources.micro_batch_size"),
        refuses=_batch_does_not_divide,
        reason="the global batch is not a multiple of num_workers x micro_batch_size, which change no model",
        detail=lambda case: (
            f"global_batch_size={case.method.global_batch_size} is not a multiple of "
            f"{case.resources.num_workers * case.resources.micro_batch_size} (num_workers x micro_batch_size), which "
            "change no model"
        ),
        nearest=_fitting_batches,
        example={"method.global_batch_size": 10, "resources.micro_batch_size": 4},
    ),
    Rule(
        id="minibatches-workers",
        fields=("method.num_minibatches", "method.global_batch_size", "resources.num_workers"),
        refuses=_leaves_a_worker_idle,
        reason="a minibatch has fewer completions than there are workers, so one of them would have none",
        nearest={"method.num_minibatches": 1},
        example={"method.num_minibatches": 16, "resources.num_workers": 2},
        stage="ppo",
    ),
    Rule(
        id="workers-nodes",
        fields=("resources.num_workers", "resources.num_nodes"),
        refuses=lambda case: case.resources.num_workers % case.resources.num_nodes,
        reason="num_workers counts the workers of all nodes, and does not divide over num_nodes",
        nearest=lambda case: {"resources.num_nodes": _divisor(case.resources.num_workers, case.resources.num_nodes)},
        example={"resources.num_workers": 2, "resources.num_nodes": 4, "resources.launcher": "cluster"},
    ),
    Rule(
        id="workers-launcher",
        fields=("resources.num_workers", "resources.launcher"),
        refuses=lambda case: case.resources.num_workers > 1 and not case.resources.on_cluster,
        reason="this launcher runs one worker",
        nearest={"resources.launcher": Launcher.AUTO},
        example={"resources.num_workers": 2, "resources.launcher": "process"},
    ),
    Rule(
        id="zero-one-worker",
        fields=("resources.zero_stage", "resources.num_workers"),
        refuses=lambda case: case.resources.zero_stage and case.resources.num_workers == 1,
        reason="ZeRO divides gradients and optimizer state over the workers, and there is one",
        nearest={"resources.zero_stage": 0},
        example={"resources.zero_stage": 2},
    ),
    Rule(
        id="zero-own-loop",
        fields=("resources.zero_stage", "method"),
        refuses=lambda case: case.resources.zero_stage and case.method.has_own_loop,
        reason="ZeRO needs transformers' trainer, and this method has a loop of its own",
        nearest={"resources.zero_stage": 0},
        example={"resources.zero_stage": 2, "resources.num_workers": 2},
        stage="own_loop",
    ),
    Rule(
        id="zero-optimizer",
        fields=("resources.zero_stage", "method.optimizer.name"),
        refuses=lambda case: case.resources.zero_stage and not case.optimizer.optim,
        reason="ZeRO divides the state of AdamW, over weights laid out as vectors",
        nearest={"method.optimizer.name": "adamw_torch_fused"},
        example={"resources.zero_stage": 2, "resources.num_workers": 2, "method.optimizer.name": "muon"},
    ),
    Rule(
        id="keep-best-unmeasured",
        fields=("resources.keep_best.metric", "method.best", "method.validation"),
        refuses=_keep_best_unmeasured,
        reason=f"{HELD_OUT_LOSS} is measured only where validation does, or where models compete by it (method.best)",
        nearest={"resources.keep_best.metric": "loss"},
        example={"resources.keep_best.metric": HELD_OUT_LOSS},
    ),
    Rule(
        id="vllm",
        fields=("method.vllm", "resources.gpus_per_worker"),
        refuses=lambda case: case.get("method.vllm") and (not case.on_gpu or find_spec("vllm") is None),
        reason="vLLM generates on a GPU, and must be installed",
        detail=lambda case: (
            "vLLM is not installed here (pip install vllm)"
            if case.on_gpu
            else "vLLM generates on a GPU, and there is none"
        ),
        nearest={"method.vllm": None},
        example={"method.vllm": "colocate"},
        stage="grpo",
    ),
    Rule(
        id="pairs-micro-batch",
        fields=("method.num_generations", "resources.micro_batch_size"),
        refuses=lambda case: (
            isinstance(case.method, Generating)
            and case.method.whole_groups
            and case.resources.micro_batch_size % case.method.num_generations
        ),
        reason="the chosen and the rejected completion of a prompt must be in one micro batch",
        nearest=lambda case: {"resources.micro_batch_size": case.get("method.num_generations")},
        example={"resources.micro_batch_size": 1},
        stage="online_dpo",
    ),
    Rule(
        id="adapter-init-prompts",
        fields=("method.adapter.init", "method"),
        refuses=lambda case: case.get("method.adapter.init") == "lora_ga" and not type(case.method).reads.trained,
        reason="lora_ga starts from gradients of the likelihood of rows, and prompts have none that is trained",
        nearest={"method.adapter.init": "eva"},
        example={"method.adapter.init": "lora_ga"},
        stage="grpo",
    ),
)
