"""LoRA layers without casts and copies: Hu et al. 2021, arXiv:2106.09685, on a GPU in bf16.

PEFT casts the input of each layer to the adapter's fp32, and autocast casts it back, for every one of some hundred
layers. Here the low-rank product is computed in bf16 from weights that stay in fp32, and the product with the frozen
weights is added to it: no activation is cast, copied or kept beside the input. A base in 4 bits is dequantized for each
product and never kept. The gradients are those of PEFT up to bf16.

Shapes: T tokens, I inputs, O outputs, R rank.
"""

import copy
from typing import TYPE_CHECKING, cast

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import nn

from tasks.train.kernels.machine import plain

if TYPE_CHECKING:
    from collections.abc import Callable

    from bitsandbytes.functional import QuantState
    from peft import PeftModel
    from torch import Tensor
    from transformers import PreTrainedModel

_FOUR_BITS = "Params4bit"


class LoraProduct(torch.autograd.Function):
    """x W' + s (x A') B' + bias, in the dtype of autocast."""

    @staticmethod
    def forward(
        ctx: "torch.autograd.function.FunctionCtx", x: "Tensor", weight: "Callable[[], Tensor]", bias: "Tensor | None",
        a_RI: "Tensor", b_OR: "Tensor", scaling: float, dtype: torch.dtype,
    ) -> "Tensor":  # fmt: skip
        x_TI, a, b = x.reshape(-1, x.shape[-1]).to(dtype), a_RI.to(dtype), b_OR.to(dtype)
        low_TR = x_TI @ a.t()
        y_TO = low_TR @ b.t()
        y_TO.addmm_(x_TI, weight().t(), beta=scaling)  # the large product itself scales and adds the small one
        if bias is not None:
            y_TO += bias.to(dtype)
        ctx.save_for_backward(x_TI, low_TR, a, b)
        ctx.weight, ctx.scaling, ctx.trained_dtype = weight, scaling, a_RI.dtype
        ctx.shape, ctx.input_dtype = x.shape, x.dtype
        return y_TO.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: "torch.autograd.function.FunctionCtx", *grads: "Tensor") -> "tuple[Tensor | None, ...]":
        x_TI, low_TR, a, b = ctx.saved_tensors
        grad_TO = grads[0].reshape(-1, grads[0].shape[-1]).to(a.dtype)
        grad_TR = grad_TO @ b
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_TI = grad_TR @ a
            grad_TI.addmm_(grad_TO, ctx.weight(), beta=ctx.scaling)
            grad_x = grad_TI.view(ctx.shape).to(ctx.input_dtype)
        grad_a = (grad_TR.t() @ x_TI).to(ctx.trained_dtype).mul_(ctx.scaling)
        grad_b = (grad_TO.t() @ low_TR).to(ctx.trained_dtype).mul_(ctx.scaling)
        return grad_x, None, None, grad_a, grad_b, None, None


def speed_up(model: "PreTrainedModel | PeftModel", *, on_cpu: bool = False) -> int:
    """Replaces the forward of plain LoRA layers; other adapters, dropout and other dtypes keep that of PEFT.

    Args:
        on_cpu: also there, for tests.

    Returns:
        The number of layers.
    """
    count = 0
    for layer in plain(model).modules():
        if _is_lora(layer) and _weight(layer.get_base_layer()) is not None:
            layer.forward = _Forward(layer, on_cpu=on_cpu)
            count += 1
    return count


class _Forward:
    """The forward of a layer: PEFT's wherever more than one plain adapter is asked for."""

    def __init__(self, layer: LoraLinear, *, on_cpu: bool) -> None:
        self.layer, self.on_cpu = layer, on_cpu
        self.slow = layer.forward
        base = layer.get_base_layer()
        self.bias, weight = base.bias, _weight(base)
        assert weight is not None
        self.weight = weight

    def __call__(self, x: "Tensor", *args: object, **kwargs: object) -> "Tensor":
        layer, dtype = self.layer, torch.bfloat16
        active = layer.active_adapters
        is_plain = (
            not layer.disable_adapters and not layer.merged and len(active) == 1 and active[0] in layer.lora_A
            and not args and not kwargs and (x.is_cuda or self.on_cpu)
            and torch.is_autocast_enabled(x.device.type) and torch.get_autocast_dtype(x.device.type) == dtype
        )  # fmt: skip
        if not is_plain:
            return cast("Tensor", self.slow(x, *args, **kwargs))
        name = active[0]
        found: Tensor = LoraProduct.apply(
            x, self.weight, self.bias, layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name], dtype
        )
        return found


def _is_lora(layer: nn.Module) -> bool:
    """Whether all adapters of a layer are plain LoRAs on a linear layer, without dropout or biases of their own."""
    if not isinstance(layer, LoraLinear) and type(layer).__name__ != "Linear4bit":
        return False
    if not hasattr(layer, "lora_A") or getattr(layer, "fan_in_fan_out", False) or layer.lora_variant:
        return False
    dropouts = all(isinstance(each, nn.Identity) for each in layer.lora_dropout.values())
    return dropouts and not any(each.bias is not None for each in layer.lora_B.values())


def _weight(base: nn.Module) -> "Callable[[], Tensor] | None":
    """Reads the frozen weights (O, I) of a base in bf16; None: their form is not known here."""
    weight = base.weight
    if type(weight).__name__ == _FOUR_BITS:
        return _Dequantized(base)
    if type(base) is nn.Linear and type(weight) is nn.Parameter and not weight.requires_grad:
        return lambda: base.weight.to(torch.bfloat16)
    return None


class _Dequantized:
    """Weights in 4 bits, in bf16 at each call: bitsandbytes would write them in fp32 first."""

    def __init__(self, base: nn.Module) -> None:
        self.base = base
        self.state: QuantState | None = None

    def __call__(self) -> "Tensor":
        from bitsandbytes.functional import dequantize_4bit

        weight = self.base.weight
        if self.state is None:
            self.state = copy.copy(weight.quant_state)
            self.state.dtype = torch.bfloat16
        found: Tensor = dequantize_4bit(weight.data, self.state)
        return found
