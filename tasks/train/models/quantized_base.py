"""Bases in few bits: how a model is rounded when it is loaded, and how its weights are read.

Shapes: D directions, I inputs and O outputs of a layer.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from lineage.errors import ConfigError
from tasks.train.models.quantization import (
    FORMATS,
    Quantization,
    compile_kernel,
    configuration,
    require_available,
    torch_dtype,
)
from tasks.train.sharding import is_fsdp

if TYPE_CHECKING:
    from torch import Tensor, dtype, nn
    from transformers import PreTrainedModel

    from tasks.context import TrainContext

_EXPERT_DIMENSIONS = 3  # experts x outputs x inputs
_DIRECTIONS = 64  # along which a layer's gradient is compared with its differences
_LEAST_AGREEMENT = 0.98  # cosine; layers that round what they read differ by less

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Quantizer:
    """Rounds the linear layers of a model, except its head.

    Args:
        compute_dtype: of the products with dequantized weights.
    """

    setting: Quantization
    compute_dtype: "dtype"
    device: str = "cpu"

    @staticmethod
    def of(setting: Quantization | None, precision: str, ctx: "TrainContext") -> "Quantizer | None":
        """From a training's settings; None: full precision (ConfigError: a package or a GPU is missing)."""
        if setting is None:
            return None
        from accelerate import PartialState

        on_gpu = ctx.resources.gpus_per_worker > 0
        require_available(setting, on_gpu=on_gpu)
        compile_kernel(setting.format, on_gpu=on_gpu)
        return Quantizer(
            setting=setting, compute_dtype=torch_dtype(setting.compute_dtype or precision),
            # Divided weights go to the GPU in parts.
            device=str(PartialState().device) if on_gpu and not is_fsdp(ctx.resources) else "cpu",
        )  # fmt: skip

    @staticmethod
    def like(rounding: Mapping[str, object]) -> "Quantizer":
        """A quantizer with the fields of ``Quantization.rounding``, in fp32 and without a GPU."""
        return Quantizer(setting=Quantization(**rounding), compute_dtype=torch_dtype("fp32"))  # type: ignore[arg-type]

    def options(self, skip: list[str] | None) -> dict[str, object]:
        """Arguments of ``from_pretrained``."""
        config = configuration(self.setting, self.compute_dtype, skip)
        return {"quantization_config": config, "device_map": {"": self.device}}

    def kept(self, model: "PreTrainedModel") -> list[str] | None:
        """The modules that stay in full precision, if the setting names some; None: transformers' choice.

        transformers would use the names in place of its own choice, and round the head.

        Raises:
            ConfigError: the model has no module of such a name, which transformers ignores.
        """
        if not self.setting.skipped_names:
            return None
        from transformers.quantizers.base import get_keys_to_not_convert
        from transformers.quantizers.quantizers_utils import should_convert_module

        layers = [name for name, module in model.named_modules() if _is_layer(module)]
        unmatched = [
            name for name in self.setting.skipped_names if all(should_convert_module(layer, [name]) for layer in layers)
        ]
        if unmatched:
            ends = sorted({layer.rpartition(".")[2] for layer in layers})
            raise ConfigError(
                f"quantization.skip_modules={self.setting.skip_modules}: the model has no linear layer "
                f"{', '.join(unmatched)}; it has {', '.join(ends)}; name some of these"
            )
        return [*get_keys_to_not_convert(model), *self.setting.skipped_names]

    def applied(self, model: "PreTrainedModel") -> "PreTrainedModel":
        """Rounds a model that is in memory in full precision, into a new one."""
        rounded: PreTrainedModel = type(model).from_pretrained(
            None,
            config=model.config,
            state_dict=model.state_dict(),
            dtype=model.dtype,
            **self.options(self.kept(model)),
        )
        rounded.name_or_path = rounded.config.name_or_path = model.name_or_path  # PEFT asks the hub for a nameless one
        if rounded.can_generate():
            rounded.generation_config = model.generation_config
        return rounded

    def finish(self, model: "PreTrainedModel") -> "PreTrainedModel":
        """Completes a model that was loaded with ``options``: experts, layout, and a check that anything was rounded.

        Raises:
            ConfigError: nothing was rounded.
        """
        if self.setting.format in ("nf4", "fp4"):
            keep_layout(model)
            quantize_experts(model)
        rounded = [name for name, module in model.named_modules() if any(True for _ in rounded_weights(module))]
        if not rounded:
            formats = ", ".join(name for name, row in FORMATS.items() if row.conv1d)
            raise ConfigError(
                f"quantization.format={self.setting.format}: the model ({model.config.model_type}) has no layer that "
                f"it rounds, and would stay in full precision; set quantization.format to one of {formats}, or "
                "quantization=none"
            )
        kept = [name for name, module in model.named_modules() if _is_layer(module) and name not in rounded]
        experts = [name for name, each in model.named_parameters() if are_experts(each)]
        require_gradient(model)
        logger.info(
            "quantization=%s rounded_layers=%d kept=%s", self.setting.format, len(rounded), ",".join(kept) or "none"
        )
        if experts:
            logger.warning(
                "quantization=%s: experts stay in full precision, and are most of a mixture's weights; nf4 and fp4 "
                "round them: %s", self.setting.format, ",".join(experts),
            )  # fmt: skip
        return model


def _is_layer(module: "nn.Module") -> bool:
    from torch.nn import Linear
    from transformers.pytorch_utils import Conv1D

    return bool(isinstance(module, Linear | Conv1D))


def are_experts(parameter: "Tensor") -> bool:
    """Whether a parameter holds the experts of a mixture."""
    return parameter.ndim == _EXPERT_DIMENSIONS and bool(parameter.is_floating_point())


def rounded_weights(module: "nn.Module") -> Iterator[tuple[str, Callable[[], "Tensor"]]]:
    """The weights in few bits of a module itself: names, and calls that dequantize them to outputs x inputs."""
    from torch.nn.utils.parametrize import is_parametrized

    if is_parametrized(module):  # experts
        for name in module.parametrizations:
            yield name, partial(getattr, module, name)
    weight = module._parameters.get("weight")
    package = type(weight).__module__.partition(".")[0]
    if package in ("torchao", "optimum"):
        yield "weight", weight.dequantize
    elif package == "bitsandbytes":
        yield "weight", partial(_of_bitsandbytes, module, weight)


def require_gradient(model: "PreTrainedModel") -> None:
    """Requires that layers in few bits pass the gradient of their dequantized weights to what is below them.

    An adapter in a lower layer learns from that gradient. Formats for inference pass none, or a wrong one. One layer of
    each class is tried, the smallest: a layer f is linear, so that the gradient of <g, f(x)> at x times a direction v
    is <g, f(v) - f(0)>, whatever holds its weights.
    """
    layers: dict[type, nn.Module] = {}
    for module in model.modules():
        inputs = getattr(module, "in_features", None)
        if inputs is None or not _is_in_few_bits(module):
            continue
        smallest = layers.get(type(module))
        if smallest is None or inputs < smallest.in_features:
            layers[type(module)] = module
    for kind, layer in layers.items():
        found = _agreement(layer)
        if not found >= _LEAST_AGREEMENT:
            raise ConfigError(
                f"quantization: layers of {kind.__module__}.{kind.__name__} pass a gradient to the layers below them "
                f"that has a cosine of {found:.2f} to that of their weights ({_LEAST_AGREEMENT} is accepted), so that "
                "an adapter there would train on wrong gradients; set quantization.format=nf4, or another model"
            )


def _is_in_few_bits(module: "nn.Module") -> bool:
    """Whether a linear layer holds its weights in few bits, by whatever package."""
    return any(True for _ in rounded_weights(module)) or not hasattr(module, "weight") or _is_packed(module.weight)


def _is_packed(weight: object) -> bool:
    import torch

    return not isinstance(weight, torch.Tensor) or not weight.is_floating_point() or weight.element_size() == 1


def _agreement(layer: "nn.Module") -> float:
    """The cosine between a layer's gradient and its differences, along random directions; nan: it passes none."""
    import torch

    place = next(iter([*layer.parameters(), *layer.buffers()]))
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> "Tensor":
        return torch.randn(shape, generator=generator).to(place.device)

    inputs = layer.in_features
    assert isinstance(inputs, int)
    point_1I, directions_DI = random(1, inputs).requires_grad_(), random(_DIRECTIONS, inputs)
    try:
        with torch.enable_grad():
            output_1O = layer(point_1I).float()
            weights_1O = random(*output_1O.shape)
            (gradient_1I,) = torch.autograd.grad((output_1O * weights_1O).sum(), point_1I)
        with torch.no_grad():
            changes_DO = layer(directions_DI).float() - layer(torch.zeros_like(point_1I)).float()
    except RuntimeError:  # of autograd: no gradient; of kernels: none for the backward pass
        logger.warning("layer=%s state=without gradient", type(layer).__name__, exc_info=True)
        return math.nan
    by_gradient_D, by_difference_D = directions_DI @ gradient_1I[0].float(), changes_DO @ weights_1O[0]
    return float(torch.nn.functional.cosine_similarity(by_gradient_D, by_difference_D, dim=0))


def _of_bitsandbytes(module: "nn.Module", weight: "Tensor") -> "Tensor":
    from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant

    if type(weight).__name__ == "Params4bit":
        found: Tensor = dequantize_4bit(weight.data, weight.quant_state)
        return found
    scales = weight.SCB if module.state.SCB is None else module.state.SCB
    found = int8_vectorwise_dequant(weight.data, scales)
    return found


def fill_dequantized(model: "PreTrainedModel", rounded: "PreTrainedModel") -> "PreTrainedModel":
    """Copies the weights of a model in few bits into one of the same architecture in full precision, and returns that.

    transformers dequantizes bitsandbytes only, and leaves GPT-2 with linear layers, whose weights its own layers would
    read transposed.
    """
    import torch
    from transformers.pytorch_utils import Conv1D

    with torch.no_grad():
        for path, module in model.named_modules():
            source = rounded.get_submodule(path)
            found = dict(rounded_weights(source))
            for name, parameter in module.named_parameters(recurse=False):
                if name not in found:
                    parameter.copy_(getattr(source, name))
                    continue
                value = found[name]()
                parameter.copy_(value.T if isinstance(module, Conv1D) else value)
            for name, buffer in module.named_buffers(recurse=False):
                buffer.copy_(getattr(source, name))
    return model


def quantize_experts(model: "PreTrainedModel") -> None:
    """Quantizes the experts of a mixture to 4 bits too, which transformers leaves in full precision.

    Their weights are one parameter of three dimensions, not linear layers. They are dequantized at each use, one layer
    at a time.
    """
    from bitsandbytes.nn.parametrize import replace_parameter_4bit
    from torch.nn.modules.conv import _ConvNd

    config = model.config.quantization_config
    for module in list(model.modules()):
        if isinstance(module, _ConvNd):
            continue
        for name, parameter in list(module.named_parameters(recurse=False)):
            if are_experts(parameter):
                replace_parameter_4bit(
                    module, name, compress_statistics=config.bnb_4bit_use_double_quant,
                    quant_type=config.bnb_4bit_quant_type,
                )  # fmt: skip


def detect_quantized_layers(enabled: bool) -> None:
    """Sets whether PEFT checks for layers of bitsandbytes when it adds an adapter: the check imports bitsandbytes."""
    from peft.tuners.lora import model

    model.is_bnb_available = model.is_bnb_4bit_available = lambda: enabled


def is_quantized(model: "PreTrainedModel") -> bool:
    """Whether a model's linear layers are in few bits."""
    return "quantization_config" in model.config


def keep_layout(model: "PreTrainedModel") -> None:
    """Keeps bitsandbytes from changing the layout of weights on a CPU.

    On a CPU with bf16 instructions, the first call in evaluation mode would change it for good, for a kernel from a
    separate package: the steps after a measurement would compute other numbers, or fail without that package.
    """
    from bitsandbytes.nn.modules import Linear4bit

    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False


def step_in_fp32(model: "PreTrainedModel") -> None:
    """Casts trained parameters to fp32: TRL casts an adapter on a quantized base to bf16, which loses small steps."""
    import torch

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    for norm in (each for each in model.modules() if isinstance(each, torch.nn.LayerNorm)):
        if norm.bias is not None and norm.bias.requires_grad:
            norm.weight.data = norm.weight.data.float()  # a CPU computes it with weight and bias of one dtype
