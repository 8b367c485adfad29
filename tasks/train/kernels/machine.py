"""A training's use of its machine: precision, matrix products, recomputed activations, compiled layers.

Trainers of transformers and loops of a method's own use the same functions on their models.
"""

import contextlib
import gc
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal
from unittest import mock

import torch
import torch.nn.functional as F
from peft import PeftModel
from torch.utils.checkpoint import checkpoint
from transformers import Trainer, TrainerCallback
from transformers.integrations.liger import apply_liger_kernel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from lineage.errors import ConfigError, PipelineError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd.function import FunctionCtx
    from transformers import PreTrainedModel
    from transformers import TrainerControl as Control
    from transformers import TrainerState as State
    from transformers import TrainingArguments as Args

    from tasks.context import Precision, Resources
    from tasks.recipe import TrainingRecipe


logger = logging.getLogger(__name__)

FIRST_SCALE = 1024.0  # torch's own 65536 overflows at the first steps of most language models
EMULATE_FP8 = False  # for tests: computes in bf16 what a GPU would compute
FP8_CAPABILITY = (8, 9)
_FP8_MULTIPLE = 16  # both dimensions of a layer's weights must be multiples of it
_HEADS = ("lm_head", "score")
COMPILER = "inductor"
AMPERE, HOPPER = 8, 9  # generations of GPUs: the first number of their compute capability
FLASH_PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
_CHECKPOINT = {"use_reentrant": False}
_WITHOUT_LIGER: dict[str, dict[str, object]] = {}  # module of transformers -> its variables before Liger
_EXPERTS = 3  # dimensions of the weights of a mixture's experts
Held = Literal["fp32", "bf16", "as trained"]  # see names_in_bf16
KEPT_TOKENS = 512  # of a row, up to which attention keeps its probabilities
_BLOCK = 128  # of queries, that are multiplied with all keys before them
_SIDE = 64  # of matrices: torch has no oneDNN product of much smaller ones


def kernel_args(method: "TrainingRecipe", resources: "Resources") -> dict[str, object]:
    """The trainer's arguments for precision and kernels (ConfigError: the hardware lacks the precision)."""
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)  # it would replace precision=fp32
    precision, on_gpu = resources.resolved_precision(method.precision), resources.gpus_per_worker > 0
    require_precision(precision, on_gpu=on_gpu)
    return {
        "bf16": precision in ("bf16", "fp8"),  # fp8 also computes other operations in bf16
        "fp16": precision == "fp16",
        "use_cpu": not on_gpu,
        "activation_checkpointing": resources.checkpointed_layers is not None,
        "activation_checkpointing_kwargs": dict(_CHECKPOINT),  # TRL changes it
        "torch_empty_cache_steps": resources.empty_cache_steps,
        "dataloader_num_workers": resources.num_loaders,
        "dataloader_prefetch_factor": resources.prefetch_factor,
        "dataloader_pin_memory": on_gpu,
    }


def plain(model: "PreTrainedModel | PeftModel") -> "PreTrainedModel":
    """The model, without the wrapper of its adapter."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def hold_in(model: "PreTrainedModel", held: Held) -> "PreTrainedModel":
    """Casts a model's parameters in place, one at a time, so that there are never two copies in memory."""
    for name in names_in_bf16(model, held):
        parameter = model.get_parameter(name)
        packed = type(parameter) is not torch.nn.Parameter  # of a quantized base, whatever dtype stores it
        if parameter.dtype == torch.float32 and not packed:
            parameter.data = parameter.data.bfloat16()
    if held == "bf16":
        model.config.dtype = torch.bfloat16
    return model


def names_in_bf16(model: "PreTrainedModel", held: Held) -> list[str]:
    """The parameters that a model has in bf16, also of a model without weights yet.

    ``bf16``: all but the head of a reward model, which computes in fp32. Buffers, such as those of rotary positions,
    stay in fp32 too. ``as trained``: what autocast casts in a policy that is trained in fp32, so that its reference, or
    itself under ``optimizer.weights=bf16``, computes the same numbers. Embeddings and norms stay in fp32: the sums of
    the layers' outputs are rounded alike.
    """
    if held == "fp32":
        return []
    if held == "bf16":
        names = (name for name, _ in model.named_parameters(remove_duplicate=False))
        return [name for name in names if not name.startswith("score.")]
    kept = {id(each.weight) for each in model.modules() if isinstance(each, torch.nn.Embedding)}
    is_tied = model.get_input_embeddings() is not None and model.config.get_text_config().tie_word_embeddings
    shared = {*model.all_tied_weights_keys} if is_tied else set()  # with the embedding, once it is loaded
    return [
        f"{path}.{name}" if path else name
        for path, module in model.named_modules() for name, each in module.named_parameters(recurse=False)
        if (isinstance(module, torch.nn.Linear | Conv1D) or each.ndim == _EXPERTS) and id(each) not in kept
        and path != "score" and not (each.is_meta and f"{path}.{name}" in shared)
    ]  # fmt: skip


def replace_kernels(model: "PreTrainedModel", precision: "Precision", resources: "Resources") -> None:
    """Replaces modules of a model, before it has an adapter: by those of Liger, and by linear layers in fp8.

    A reference gets the same as its policy, so that the two agree at step 0.

    Raises:
        ConfigError: there are no such modules for its architecture.
    """
    if uses_liger(model, precision, resources):
        _apply_liger(model)
    if precision == "fp8":
        _multiply_in_fp8(model)


def uses_liger(model: "PreTrainedModel", precision: "Precision", resources: "Resources") -> bool:
    """Whether layers are Liger's; ``auto``: on a GPU where the package has them, as with FlashAttention."""
    if resources.liger != "auto":
        return resources.liger
    if not resources.gpus_per_worker or resources.is_deterministic or precision == "fp32":
        return False
    if find_spec("liger_kernel") is None:
        return False
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    found = model.config.model_type in MODEL_TYPE_TO_APPLY_LIGER_FN
    logger.info("liger=%s model_type=%s", found, model.config.model_type)
    return found


def _apply_liger(model: "PreTrainedModel") -> None:
    """Hsu et al. 2024, arXiv:2410.10989. Losses stay: only trained positions go through the head already."""
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    if model.config.model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ConfigError(
            f"liger=true: liger-kernel has no kernels for the model ({model.config.model_type}); set liger=false"
        )
    modeling = sys.modules[type(model).__module__]
    _WITHOUT_LIGER.setdefault(modeling.__name__, dict(vars(modeling)))
    apply_liger_kernel(model, {"cross_entropy": False, "fused_linear_cross_entropy": False})


def forget_liger() -> None:
    """Takes Liger's kernels out of the modules of transformers, where it also puts them: a CPU cannot run them."""
    for name, before in _WITHOUT_LIGER.items():
        vars(sys.modules[name]).update(before)


def _multiply_in_fp8(model: "PreTrainedModel") -> None:
    """torchao's recipe: all linear layers except the head, scaled by tensor at each step; weights stay in fp32."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    chosen: list[str] = []

    def is_chosen(module: torch.nn.Module, name: str) -> bool:
        sides = (getattr(module, "in_features", 1), getattr(module, "out_features", 1))
        fits = not name.endswith(_HEADS) and all(side % _FP8_MULTIPLE == 0 for side in sides)
        chosen.extend([name] if fits else [])
        return fits

    config = Float8LinearConfig(pad_inner_dim=True, emulate=EMULATE_FP8)
    convert_to_float8_training(model, config=config, module_filter_fn=is_chosen)
    logger.info("fp8_layers=%d", len(chosen))
    if not chosen:
        raise ConfigError(
            f"precision=fp8: the model ({model.config.model_type}) has no linear layer whose sides are multiples of "
            f"{_FP8_MULTIPLE}; set precision=bf16"
        )


def attention_of(resources: "Resources", precision: "Precision") -> str | None:
    """The attention of a training's models; None: that of transformers, SDPA where the architecture has it.

    ``auto`` is FlashAttention where its package is installed and the GPU can run it, unless kernels must be
    deterministic: its deterministic backward pass is slower than SDPA's.
    """
    if resources.attention != "auto":
        return resources.attention
    if not resources.gpus_per_worker or resources.is_deterministic or precision == "fp32":
        return None
    generation = torch.cuda.get_device_capability()[0]
    if generation == HOPPER and find_spec(FLASH_PACKAGES["flash_attention_3"]):
        return "flash_attention_3"
    return "flash_attention_2" if generation >= AMPERE and find_spec(FLASH_PACKAGES["flash_attention_2"]) else None


def prepare_layers(model: "PreTrainedModel | PeftModel", resources: "Resources", *, own_loop: bool) -> None:
    """Sets which layers of a model recompute their activations, and which are compiled.

    Args:
        own_loop: whether there is no trainer of transformers that would switch on recomputation.

    Raises:
        ConfigError: the architecture cannot do it.
    """
    base = plain(model)
    layers = [each for each in base.modules() if isinstance(each, GradientCheckpointingLayer)]
    every, name = resources.checkpointed_layers, base.config.model_type
    if every is not None:
        if not base.supports_gradient_checkpointing:
            raise ConfigError(f"gradient_checkpointing: the model ({name}) does not support it; set it to off")
        # TRL switches checkpointing off and on again for a reference, without every_n_layers.
        base._set_gradient_checkpointing = partial(_set_checkpointing, base._set_gradient_checkpointing, every)
        if own_loop:
            base.activation_checkpointing_enable(activation_checkpointing_kwargs=dict(_CHECKPOINT))
    if resources.compile:
        if not layers:
            raise ConfigError(f"compile: no layers are known of the model ({name}); set compile=false")
        for layer in layers:
            # Dynamic shapes from the first call, so that a resumed run uses the same kernels.
            layer.compile(backend=COMPILER, dynamic=True)


def _set_checkpointing(
    switch: Callable[..., None],
    every: int,
    enable: bool = True,
    gradient_checkpointing_func: Callable[..., object] = checkpoint,
    every_n_layers: int = 1,
) -> None:
    switch(enable=enable, gradient_checkpointing_func=gradient_checkpointing_func, every_n_layers=every)


def require_precision(precision: str, *, on_gpu: bool) -> None:
    """Requires hardware for a precision."""
    if precision == "fp16" and not on_gpu:
        raise ConfigError(
            "precision=fp16: this training has no GPU, and would compute in fp32; set precision=bf16 or fp32, or "
            "resources.gpus_per_worker=1"
        )
    if precision == "fp8" and not EMULATE_FP8 and (not on_gpu or torch.cuda.get_device_capability() < FP8_CAPABILITY):
        raise ConfigError(
            "precision=fp8: a GPU of compute capability 8.9 (Ada, Hopper) or higher is needed, and this is "
            f"{torch.cuda.get_device_name() if on_gpu else 'a CPU'}; set precision=bf16"
        )
    if precision == "bf16" and on_gpu and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ConfigError(
            f"precision=bf16: {torch.cuda.get_device_name()} computes no bf16; GPUs from Ampere on do; set "
            "precision=fp16 or fp32"
        )


@contextmanager
def fast_products(precision: str, *, on_gpu: bool) -> Iterator[None]:
    """Sets how matrices in fp32 are multiplied.

    On a GPU in TF32, which has 10 bits of mantissa, unless the training is in fp32. On a CPU with oneDNN, which uses
    AVX-512 on CPUs of every vendor: torch's default, MKL, does so on Intel's alone, and oneDNN is twice as fast on
    AMD's. The precision ``medium`` selects oneDNN. It also lets oneDNN round to bf16, which it does with AMX: there
    torch's default stays. The numbers are those of MKL up to the order of additions. Attention is ``sdpa_of_cpu``.
    """
    if on_gpu:
        with _products("highest" if precision == "fp32" else "high"):
            yield
        return
    with _products("medium"), mock.patch.object(F, "scaled_dot_product_attention", sdpa_of_cpu):
        if not is_exact():
            torch.set_float32_matmul_precision("highest")
        yield


@contextmanager
def _products(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def sdpa_of_cpu(
    query: "Tensor", key: "Tensor", value: "Tensor", attn_mask: "Tensor | None" = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, *,
    _sdpa: "Callable[..., Tensor]" = F.scaled_dot_product_attention,
) -> "Tensor":  # fmt: skip
    """SDPA in bf16 as ``CausalInBf16``; else torch's, whose products, forward and backward, are MKL's.

    The flash kernel multiplies small blocks of each head, for which a call of oneDNN takes several times as long
    (``bench/attention.py``).
    """
    fast = torch.get_float32_matmul_precision()
    options = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal}
    attend = partial(_sdpa, query, key, value, **options, scale=scale, enable_gqa=enable_gqa)
    if fast == "highest" or torch.compiler.is_compiling():
        return attend()
    if is_causal and attn_mask is None and not dropout_p and _is_short_in_bf16(query, key):
        few = query.shape[1] // key.shape[1]
        states = (query, *((each.repeat_interleave(few, 1) if few > 1 else each) for each in (key, value)))
        blocks: Tensor = CausalInBf16.apply(*(each.flatten(0, 1) for each in states), scale or query.shape[-1] ** -0.5)
        return blocks.unflatten(0, query.shape[:2])
    with _products("highest"):
        attended = attend()
    if attended.grad_fn is not None:
        attended.grad_fn.register_prehook(lambda grads: torch.set_float32_matmul_precision("highest"))
        attended.grad_fn.register_hook(lambda inputs, grads: torch.set_float32_matmul_precision(fast))
    return attended


def _is_short_in_bf16(query: "Tensor", key: "Tensor") -> bool:
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else query.dtype
    short = query.ndim == 4 and query.shape[2] == key.shape[2] <= KEPT_TOKENS
    return short and dtype == torch.bfloat16 and bool(torch.cpu._is_avx512_bf16_supported())


class CausalInBf16(torch.autograd.Function):
    """Causal attention of (heads of all rows, L, d), whose products are few, large and, but the scores, in bf16.

    Scores are in fp32, as in torch's flash kernel, which does its products at the rate of fp32. Probabilities are kept
    for the backward pass, in bf16: of rows of ``KEPT_TOKENS``, about a quarter of a layer's other activations.
    """

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.bfloat16)
    def forward(ctx: "FunctionCtx", query: "Tensor", key: "Tensor", value: "Tensor", scale: float) -> "Tensor":
        scaled, keys, length = query.float() * scale, key.float().transpose(1, 2), query.shape[1]
        later = torch.full((_BLOCK, _BLOCK), -torch.inf).triu(1)
        probabilities = list["Tensor"]()
        for start in range(0, length, _BLOCK):
            end = min(start + _BLOCK, length)
            scores = scaled[:, start:end] @ keys[:, :, :end]
            scores[:, :, start:] += later[: end - start, : end - start]
            probabilities.append(scores.softmax(-1).to(value.dtype))
        ctx.save_for_backward(query, key, value, *probabilities)
        ctx.scale = scale
        return torch.cat([each @ value[:, : each.shape[2]] for each in probabilities], dim=1)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: "FunctionCtx", grads: "Tensor") -> "tuple[Tensor, Tensor, Tensor, None]":
        query, key, value, *probabilities = ctx.saved_tensors
        of_query, of_key, of_value = (torch.zeros_like(each, dtype=torch.float32) for each in (query, key, value))
        for each in probabilities:
            end = each.shape[2]
            own = slice(end - each.shape[1], end)
            of_value[:, :end] += each.transpose(1, 2) @ grads[:, own]
            of_scores = torch._softmax_backward_data(
                grads[:, own] @ value[:, :end].transpose(1, 2), each, -1, each.dtype
            )
            of_query[:, own] = of_scores @ key[:, :end]
            of_key[:, :end] += of_scores.transpose(1, 2) @ query[:, own]
        scale, dtype = ctx.scale, query.dtype
        return (of_query * scale).to(dtype), (of_key * scale).to(dtype), of_value.to(dtype), None


def is_exact() -> bool:
    """Whether matrix products keep the last bits of fp32, tried with numbers that bf16 and TF32 would round."""
    fine = torch.full((_SIDE, _SIDE), 1 + 2**-20)
    return bool(torch.equal(fine @ torch.eye(_SIDE), fine))


def start_scaler(trainer: "Trainer") -> None:
    """Starts the loss scale of fp16 at ``FIRST_SCALE``; a resumed checkpoint has its own."""
    scaler = trainer.accelerator.scaler
    if scaler is not None:
        scaler.load_state_dict({**scaler.state_dict(), "scale": FIRST_SCALE})
        trainer.add_callback(LossScale(scaler))


class LossScale(TrainerCallback):
    """Logs the loss scale, and steps that the scaler skipped because their gradients overflowed.

    A skipped step changes no weight. It runs before the callbacks that stop a training whose gradients are non-finite.
    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self.scaler = scaler

    def on_log(
        self, args: "Args", state: "State", control: "Control", logs: "dict[str, float]", **kwargs: object
    ) -> None:
        """Replaces the norm of gradients that were skipped by 0.

        Raises:
            PipelineError: gradients overflow however small the scale is.
        """
        if "loss" not in logs:
            return
        found = {"loss_scale": float(self.scaler.get_scale())}
        if math.isfinite(logs["loss"]) and not math.isfinite(logs["grad_norm"]):
            if found["loss_scale"] < 1:
                raise PipelineError(
                    f"training diverged: at step {state.global_step} gradients overflow fp16 at a loss scale of "
                    f"{found['loss_scale']:g}; lower learning_rate, or train in precision=bf16 or fp32"
                )
            logger.warning(
                "step=%d state=skipped grad_norm=%s loss_scale=%g", state.global_step, logs["grad_norm"],
                found["loss_scale"],
            )  # fmt: skip
            found["grad_norm"] = 0.0
        logs |= found
        state.log_history[-1] |= found


_COLLECT_SECONDS = 10.0
_NOT_DETERMINISTIC = "does not have a deterministic implementation"  # in torch's error message
_FLASH = "FLASH_ATTENTION_DETERMINISTIC"


@contextlib.contextmanager
def collecting_between_steps(*, enabled: bool) -> Iterator[Callable[[], None]]:
    """Keeps Python's garbage collector out of the steps, in which it would keep a GPU waiting.

    Yields:
        A function to call between steps, which collects every few seconds. What was there before is not searched.
    """
    if not (enabled and gc.isenabled()):
        yield lambda: None
        return
    last = time.monotonic()

    def collect() -> None:
        nonlocal last
        if time.monotonic() - last > _COLLECT_SECONDS:
            gc.collect()
            last = time.monotonic()

    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield collect
    finally:
        gc.enable()
        gc.unfreeze()


@contextlib.contextmanager
def deterministic_kernels(enabled: bool) -> Iterator[None]:
    """Deterministic kernels: without them repeated runs differ in the last bits.

    cuBLAS also needs ``CUBLAS_WORKSPACE_CONFIG``, which is set when a stage's process starts.

    Raises:
        PipelineError: an operation has no deterministic kernel.
    """
    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(enabled)
    os.environ[_FLASH] = str(int(enabled))  # of flash-attn, which does not ask torch
    # Filling takes time, and training never reads memory that it has not written.
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    except RuntimeError as error:
        if _NOT_DETERMINISTIC not in str(error):
            raise
        operation = str(error).partition(_NOT_DETERMINISTIC)[0].strip()
        raise PipelineError(
            f"{operation} is not deterministic, so a resumed run would not end with the weights of an uninterrupted "
            "one; deterministic operations are accepted; set resources.deterministic=false to train with it"
        ) from error
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
        os.environ[_FLASH] = "0"
        torch.utils.deterministic.fill_uninitialized_memory = fills
