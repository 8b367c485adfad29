"""Rules that join adapters, quantized bases, precision and kernels with each other, the model and its machine."""

from lineage.model_files import quantization_format
from tasks.method import FROZEN_POLICY
from tasks.train.adapters import ALL_LINEAR, MIXTURES, NOT_ON_CONV1D, ON_QUANTIZED, why_not_on_experts
from tasks.train.quantization import CONV1D_MODELS, FORMATS, QUANTIZED_BEFORE, FormatRow
from tasks.train.rule import Case, Fields, Rule


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


MODEL_RULES: tuple[Rule, ...] = (
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
)
