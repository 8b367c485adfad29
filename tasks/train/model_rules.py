"""Rules that join adapters, quantized bases, precision and kernels with each other, the model and its machine."""

from lineage.source.model_files import quantization_format
from tasks.method import FROZEN_POLICY, REWARD_HEAD
from tasks.train.generation.generating import Completing
from tasks.train.models.adapters import (
    ADALORA_STEPS,
    ADAPTERS,
    ALL_LINEAR,
    EMBEDDINGS,
    HEADS,
    MIXTURES,
    NOT_ON_CONV1D,
    ON_QUANTIZED,
    why_not_on_experts,
)
from tasks.train.models.quantization import CONV1D_MODELS, FORMATS, QUANTIZED_BEFORE, FormatRow
from tasks.train.optim.optimizers import OPTIMIZERS
from tasks.train.rule import GPU, HAVE_B, SET, UNSHARDED, ZERO, Case, Fields, Rule, own_loop, sharded, shown

_FLASH = ("flash_attention_2", "flash_attention_3")
_OF_MATRICES = tuple(name for name, row in OPTIMIZERS.items() if row.matrices)
# Models in examples.
_IN_FOUR_BITS: Fields = {
    "config.quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
}
_ADALORA: Fields = {"method.num_steps": ADALORA_STEPS}
_SEES: Fields = {"config.vision_config": {"patch_size": 14}, "config.model_type": "qwen2_vl"}
# Why rows with images are refused of a family.
_UNREAD_IMAGES = {
    "llama4": "its processor of images is made for torchvision alone, and here images are prepared by Pillow"
}
_IN_GPTQ: Fields = {"method.adapter.type": "lora", "config.quantization_config": {"quant_method": "gptq"}}


def _format_nf4(case: Case) -> Fields:
    """Four bits that need neither a GPU nor a package, without the options of another format."""
    unread = {"method.quantization.group_size": None} if case.get("method.quantization.group_size") else {}
    return {"method.quantization.format": "nf4", **unread}


def _has_frozen_policy(case: Case) -> bool:
    return FROZEN_POLICY in case.method.models.values()


def _model_row(case: Case) -> FormatRow | None:
    """Of the format that the model is in."""
    name = QUANTIZED_BEFORE.get(quantization_format(case.config) or "")
    return FORMATS[name] if name else None


def _in_few_bits(case: Case) -> object:
    return quantization_format(case.config)


def _in_bits_for_gpus(case: Case) -> bool:
    row = _model_row(case)
    return row is not None and row.gpu


def _cannot_be_merged(case: Case) -> bool:
    row = _model_row(case)
    return row is not None and not row.dequantizes and case.method.adapter is not None


def _changes_the_base(case: Case) -> object:
    return case.method.adapter and case.method.adapter.changes_the_base


def _not_on_experts(case: Case) -> str | None:
    """The adapter's setting that PEFT cannot apply to the model's experts, which get no adapter on a quantized base."""
    adapter = case.method.adapter
    return why_not_on_experts(adapter) if adapter and not case.method.quantization else None


def _reads_what_layers_get(case: Case) -> bool:
    reads = case.get("method.adapter.type") == "adalora" or case.get("method.adapter.init") == "eva"
    return reads and case.get("config.vision_config") is not None


def _reads_images(case: Case) -> bool:
    return case.get("method.images") is not None


def _reads_text_alone(case: Case) -> bool:
    return _reads_images(case) and bool(case.config) and case.get("config.vision_config") is None


def _saves_embedding(case: Case) -> bool:
    if REWARD_HEAD in case.method.models.values():  # which has no head over the vocabulary
        return False
    saved = case.method.adapter.saved_names if case.method.adapter else []
    return not {name.rpartition(".")[2] for name in saved}.isdisjoint({*EMBEDDINGS, *HEADS} - {"score"})


def _drops_out_of_its_start(case: Case) -> bool:
    """Whether the adapter is not zero at the first step, so that dropout would change it."""
    adapter = case.method.adapter
    if adapter is None or not adapter.dropout or not _has_frozen_policy(case):
        return False
    return adapter.changes_the_base or case.method.adapter_in == "continue"


def _computes_below_precision(case: Case) -> bool:
    return case.method.precision != "bf16" and (case.method.adapter is not None or _has_frozen_policy(case))


MODEL_RULES: tuple[Rule, ...] = (
    Rule(
        id="quantization-full-training", when={"method.quantization.format": SET, "method.adapter": None},
        reason="a base in few bits is frozen, so only an adapter can be trained on it",
        nearest={"method.adapter.type": "lora"}, also={"method.quantization.format": "nf4"},
    ),
    Rule(
        id="adapter-type-quantization",
        when={
            "method.adapter.type": tuple(name for name in ADAPTERS if name not in ON_QUANTIZED),
            "method.quantization.format": SET,
        },
        reason=f"PEFT puts it on layers in full precision; on a quantized base train {', '.join(ON_QUANTIZED)}",
        nearest={"method.adapter.type": "lora"}, also={"method.quantization.format": "nf4"},
    ),
    Rule(
        id="adapter-init-quantization",
        when={"method.adapter.init": _changes_the_base, "method.quantization.format": SET},
        reason="this initialization takes its product off the base, which would be rounded again",
        nearest={"method.adapter.init": None},
        also={"method.adapter.type": "lora", "method.adapter.init": "pissa", "method.quantization.format": "nf4"},
    ),
    Rule(
        id="adalora-zero", when={"method.adapter.type": "adalora", "resources.sharding": sharded},
        reason="AdaLoRA scores ranks by their gradients, which are divided over the workers",
        nearest=UNSHARDED, also={**ZERO, **_ADALORA},
    ),
    Rule(
        id="adalora-backward",
        when={
            "method.adapter.type": "adalora",
            "method.optimizer.name": tuple(name for name, row in OPTIMIZERS.items() if row.in_backward),
        },
        reason="AdaLoRA scores ranks by their gradients, which this optimizer frees inside the backward pass",
        nearest={"method.optimizer.name": "adamw_torch_fused"},
        also={"method.optimizer.name": "lomo", "resources.micro_batch_size": 16, **_ADALORA},
    ),
    Rule(
        id="adalora-steps",
        when={
            "method.adapter.type": "adalora",
            "method.num_steps": lambda case: 0 < (case.method.num_steps or 0) < ADALORA_STEPS,
        },
        reason=f"AdaLoRA scores ranks before it prunes them, which takes at least {ADALORA_STEPS} steps",
        nearest={"method.num_steps": ADALORA_STEPS}, also={"method.num_steps": ADALORA_STEPS - 1},
    ),
    Rule(
        id="adalora-return", when={"method.adapter.type": "adalora", "method.schedule.adaptive.divergence_z": SET},
        reason="AdaLoRA prunes ranks at set steps, and a training that goes back may have passed them",
        nearest={"method.schedule.adaptive.divergence_z": None},
        also={"method.schedule.adaptive.divergence_z": 50.0, "method.best.every_steps": 1, **_ADALORA},
    ),
    Rule(
        id="adalora-own-loop", when={"method.adapter.type": "adalora", "method": own_loop},
        reason="transformers' trainer prunes its ranks, and this method has a loop of its own",
        nearest={"method.adapter.type": "lora"}, also=_ADALORA, stage="own_loop",
    ),
    Rule(
        id="neftune-own-loop", when={"method.neftune_alpha": SET, "method": own_loop},
        reason="transformers' trainer adds the noise, and this method has a loop of its own",
        nearest={"method.neftune_alpha": None}, also={"method.neftune_alpha": 5.0}, stage="own_loop",
    ),
    Rule(
        id="neftune-packing", when={"method.neftune_alpha": SET, "method.packing": SET},
        reason="the noise is divided by the root of the length, and packs lie end to end with all others of a micro "
        "batch, so that micro_batch_size would change it",
        nearest={"method.packing": None}, also={"method.neftune_alpha": 5.0, "method.packing": "best_fit"},
    ),
    Rule(
        id="quantization-gpu",
        when={
            "method.quantization.format": tuple(name for name, row in FORMATS.items() if row.gpu),
            "resources.gpus_per_worker": 0,
        },
        reason="this format is computed by kernels for GPUs alone",
        nearest=_format_nf4, also={"method.adapter.type": "lora"},
    ),
    Rule(
        id="quanto-precision",
        when={
            "method.quantization.format": tuple(name for name in FORMATS if name.startswith("quanto")),
            "method.precision": ("bf16", "fp16", "fp8"),
        },
        reason="the backward pass of quanto multiplies gradients in this precision with weights in fp32, which fails",
        nearest={"method.precision": "fp32"}, also={"method.adapter.type": "lora", **GPU},
    ),
    Rule(
        id="quanto-int4-generating",
        when={
            "method.quantization.format": "quanto_int4",
            "method": lambda case: isinstance(case.method, Completing),
        },
        reason="quanto's int4 weights fail in torch's inference mode, in which completions are sampled",
        nearest=_format_nf4, also={"method.adapter.type": "lora"}, stage="grpo",
    ),
    Rule(
        id="quantization-conv1d",
        when={
            "method.quantization.format": tuple(name for name, row in FORMATS.items() if not row.conv1d),
            "config.model_type": CONV1D_MODELS,
        },
        reason="the layers of this model are no linear layers of torch, which this format alone rounds",
        nearest=_format_nf4, also={"method.adapter.type": "lora"},
    ),
    Rule(
        id="quantized-model-full-training",
        when={"config.quantization_config.quant_method": _in_few_bits, "method.adapter": None},
        reason="the model is in few bits already, and such weights cannot be trained",
        nearest={"method.adapter.type": "lora"}, also=_IN_FOUR_BITS,
    ),
    Rule(
        id="quantized-model-quantization",
        when={"config.quantization_config.quant_method": _in_few_bits, "method.quantization.format": SET},
        reason="the model is in few bits already, and would be rounded again",
        nearest={"method.quantization": None},
        also={"method.adapter.type": "lora", "method.quantization.format": "nf4", **_IN_FOUR_BITS},
    ),
    Rule(
        id="quantized-model-gpu",
        when={"config.quantization_config.quant_method": _in_bits_for_gpus, "resources.gpus_per_worker": 0},
        reason="the model is in a format whose packages are made for GPUs; their kernels for CPUs were never run here",
        nearest=GPU, also={"method.save": "adapter", **_IN_GPTQ},
    ),
    Rule(
        id="quantized-model-merge",
        when={"config.quantization_config.quant_method": _cannot_be_merged, "method.save": None},
        reason="the model is in a format that cannot be dequantized, so that no adapter can be merged into it",
        nearest={"method.save": "adapter"}, also={**GPU, **_IN_GPTQ},
    ),
    Rule(
        id="dora-int8", when={"method.adapter.type": "dora", "method.quantization.format": "int8"},
        reason="PEFT's DoRA reads the scales of a layer in int8 after bitsandbytes has moved them",
        nearest={"method.quantization.format": "nf4"},
    ),
    Rule(
        id="matrices-adapter",
        when={
            "method.optimizer.name": tuple(name for name in _OF_MATRICES if not OPTIMIZERS[name].projects),
            "method.adapter.type": tuple(name for name in ADAPTERS if name not in HAVE_B),
        },
        reason="it treats the matrices of linear layers apart, and of the adapters LoRA and DoRA alone train such",
        nearest={"method.adapter.type": "lora"},
    ),
    Rule(
        id="matrices-conv1d",
        when={"method.optimizer.name": _OF_MATRICES, "method.adapter": None, "config.model_type": CONV1D_MODELS},
        reason="it treats the matrices of linear layers apart, and the layers of this model are no linear layers of "
        "torch",
        nearest={"method.optimizer.name": "adamw_torch_fused"},
    ),
    Rule(
        id="adapter-conv1d",
        when={
            "method.adapter.type": lambda case: (
                case.get("method.adapter.type") in NOT_ON_CONV1D or case.get("method.adapter.init") == "olora"
            ),
            "method.adapter.init": shown,
            "config.model_type": CONV1D_MODELS,
        },
        reason="PEFT puts it on linear layers of torch alone, and the layers of this model are none",
        nearest={"method.adapter.type": "lora", "method.adapter.init": None}, also={"method.adapter.type": "boft"},
    ),
    Rule(
        id="adapter-experts",
        when={
            "method.adapter.type": _not_on_experts, "method.adapter.target_modules": shown,
            "config.model_type": MIXTURES,
        },
        reason="all-linear puts it on the experts of a mixture too, which are parameters, and PEFT has no DoRA, no "
        "dropout and no initialization but its own and gaussian for them",
        detail=lambda case: (
            f"adapter.{_not_on_experts(case)}: all-linear puts the adapter on the experts of a mixture too, which are "
            "parameters, and PEFT cannot do that for them"
        ),
        nearest={"method.adapter.target_modules": "attention"}, also={"method.adapter.type": "dora"},
    ),
    Rule(
        id="adapter-tied-embedding",
        when={"method.adapter.modules_to_save": _saves_embedding, "config.tie_word_embeddings": True},
        reason="embedding and head of this model are one matrix, and PEFT would train two, of which one is saved; "
        "train single rows with adapter.trainable_token_indices, or all weights with adapter=full",
        nearest={"method.adapter.modules_to_save": None},
        also={"method.adapter.type": "lora", "method.adapter.modules_to_save": "embed_tokens"},
    ),
    Rule(
        id="adapter-images",
        when={
            "method.adapter.type": _reads_what_layers_get, "method.adapter.init": shown,
            "method.adapter.target_modules": ALL_LINEAR,
        },
        reason="it reads what each layer gets, and rows of text reach no layer that reads images",
        nearest={"method.adapter.target_modules": "*language_model*"},
        also={"method.adapter.type": "adalora", "config.vision_config": {}, **_ADALORA},
    ),
    Rule(
        id="images-cross-attention",
        when={"method.images": _reads_images, "config.model_type": "mllama", "resources.sharding": sharded},
        reason="a batch without images skips the layers that attend to them, whose gradients the division waits for",
        nearest=UNSHARDED,
        also={"method.images.max_pixels": 4096, **ZERO, **_SEES, "config.model_type": "mllama"},
    ),
    Rule(
        id="images-family", when={"method.images": _reads_images, "config.model_type": tuple(_UNREAD_IMAGES)},
        reason="it was not tried with images", detail=lambda case: _UNREAD_IMAGES[str(case.get("config.model_type"))],
        nearest={"method.images": None},
        also={"method.images.max_pixels": 4096, **_SEES, "config.model_type": "llama4"},
    ),
    Rule(
        id="images-text-model", when={"method.images": _reads_text_alone, "config.model_type": shown},
        reason="this model has no vision_config: it reads no images",
        nearest={"method.images": None},
        also={"method.images.max_pixels": 4096, "config.model_type": "llama"},
    ),
    Rule(
        id="dropout-reference",
        when={
            "method.adapter.dropout": _drops_out_of_its_start, "method.adapter.init": shown, "method.adapter_in": shown,
        },
        reason="this adapter does not start at zero, so that dropout makes the policy differ from its reference at "
        "step 0",
        nearest={"method.adapter.dropout": 0.0},
        also={"method.adapter.type": "lora", "method.adapter.init": "pissa", "method.adapter.dropout": 0.1},
        stage="dpo",
    ),
    Rule(
        id="fp16-cpu", when={"method.precision": "fp16", "resources.gpus_per_worker": 0},
        reason="without a GPU the trainer computes in fp32 and says nothing",
        nearest={"method.precision": "bf16"},
    ),
    Rule(
        id="fp16-zero", when={"method.precision": "fp16", "resources.sharding": sharded},
        reason="fp16 needs a scaled loss, and over divided gradients it is not scaled",
        nearest={"method.precision": "bf16"}, also={**GPU, **ZERO},
    ),
    Rule(
        id="fp16-own-loop", when={"method.precision": "fp16", "method": own_loop},
        reason="fp16 needs a scaled loss, and a loop of a method's own does not scale it",
        nearest={"method.precision": "bf16"}, also=GPU, stage="own_loop",
    ),
    Rule(
        id="fp8-cpu", when={"method.precision": "fp8", "resources.gpus_per_worker": 0},
        reason="only GPUs of compute capability 8.9 (Ada, Hopper) or higher multiply in fp8",
        nearest={"method.precision": "bf16"},
    ),
    Rule(
        id="fp8-adapter",
        when={"method.precision": "fp8", "method.adapter.type": SET, "resources.gpus_per_worker": SET},
        reason="fp8 is torchao's recipe for layers that are trained, and those under an adapter are not",
        nearest={"method.precision": "bf16"}, also={"method.adapter.type": "lora", **GPU},
    ),
    Rule(
        id="fp8-zero",
        when={"method.precision": "fp8", "resources.sharding": sharded, "resources.gpus_per_worker": SET},
        reason="fp8 was not tried where workers divide the training",
        nearest={"method.precision": "bf16"}, also={**GPU, **ZERO},
    ),
    Rule(
        id="liger-cpu", when={"resources.liger": True, "resources.gpus_per_worker": 0},
        reason="its kernels are written in Triton, for GPUs alone", nearest={"resources.liger": False},
    ),
    Rule(
        id="empty-cache-cpu", when={"resources.empty_cache_steps": SET, "resources.gpus_per_worker": 0},
        reason="it returns unused GPU memory, and there is no GPU",
        nearest={"resources.empty_cache_steps": None}, also={"resources.empty_cache_steps": 10},
    ),
    Rule(
        id="compile-zero", when={"resources.compile": True, "resources.sharding": sharded},
        reason="DeepSpeed and FSDP2 put hooks around layers, and compiled ones were not tried under them",
        nearest={"resources.compile": False}, also=ZERO,
    ),
    Rule(
        id="loader-own-loop",
        when={
            "resources.dataloader_workers": lambda case: case.resources.dataloader_workers not in (0, "auto"),
            "method": own_loop,
        },
        reason="a loop of a method's own collates in its own process",
        nearest={"resources.dataloader_workers": 0}, also={"resources.dataloader_workers": 2}, stage="own_loop",
    ),
    Rule(
        id="prefetch-without-workers",
        when={
            "resources.prefetch_factor": SET,
            "resources.dataloader_workers": lambda case: not case.resources.num_loaders,
        },
        reason="batches are collated ahead by processes, of which there is none",
        nearest={"resources.prefetch_factor": None}, also={"resources.prefetch_factor": 4},
    ),
    Rule(
        id="flash-attention-cpu", when={"resources.attention": _FLASH, "resources.gpus_per_worker": 0},
        reason="FlashAttention has kernels for GPUs alone", nearest={"resources.attention": "auto"},
    ),
    Rule(
        id="flash-attention-fp32",
        when={"resources.attention": _FLASH, "method.precision": "fp32", "resources.gpus_per_worker": SET},
        reason="FlashAttention computes in bf16 and fp16 alone",
        nearest={"resources.attention": "auto"}, also=GPU,
    ),
    Rule(
        id="weights-precision", when={"resources.weights": "bf16", "method.precision": _computes_below_precision},
        reason="a base or a reference in bf16 computes in bf16",
        nearest={"method.precision": "bf16"}, also={"method.adapter.type": "lora"},
    ),
)  # fmt: skip
