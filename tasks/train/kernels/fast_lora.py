"""LoRA layers without casts and copies: Hu et al. 2021, arXiv:2106.09685, on a GPU in bf16.

PEFT casts the input of each layer to the adapter's fp32, and autocast casts it back, for every one of some hundred
layers. Here the low-rank product is computed in bf16 from weights that stay in fp32, and the product with the frozen
weights is added to it: no activation is cast, copied or kept beside the input. Layers that read the same input (those
of queries, keys and values; of gate and up) are one function of it, with one gradient for it. A base in 4 bits is
dequantized for each product and never kept. The gradients are those of PEFT up to bf16.

Shapes: T tokens, I inputs, O outputs, R ranks of all layers of a product.
"""

import copy
from typing import TYPE_CHECKING, cast

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import nn

from tasks.train.kernels.machine import plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from bitsandbytes.functional import QuantState
    from peft import PeftModel
    from torch import Tensor
    from transformers import PreTrainedModel

_FOUR_BITS = "Params4bit"
_SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # layers of one module


class LoraProduct(torch.autograd.Function):
    """x W' + s (x A') B' + bias of layers that read the same x, in the dtype of autocast."""

    @staticmethod
    def forward(
        ctx: "torch.autograd.function.FunctionCtx", x: "Tensor", layers: "Sequence[_Forward]", scaling: float,
        dtype: torch.dtype, *adapters: "Tensor",
    ) -> "tuple[Tensor, ...]":  # fmt: skip
        x_TI = x.reshape(-1, x.shape[-1]).to(dtype)
        shapes = [each.shape for each in adapters]  # A of all layers, then B of all
        packed = torch.cat([each.reshape(-1) for each in adapters]).to(dtype)
        a_RI, parts = _parts(packed, shapes)
        low_TR, outputs = x_TI @ a_RI.t(), list["Tensor"]()
        for layer, (low, _, b) in zip(layers, _of_layers(low_TR, parts), strict=True):
            y_TO = low @ b.t()
            y_TO.addmm_(x_TI, layer.weight().t(), beta=scaling)  # the large product itself scales and adds the small
            if layer.bias is not None:
                y_TO += layer.bias.to(dtype)
            outputs.append(y_TO.view(*x.shape[:-1], -1))
        ctx.save_for_backward(x_TI, low_TR, packed)
        ctx.layers, ctx.scaling, ctx.shapes, ctx.trained_dtype = layers, scaling, shapes, adapters[0].dtype
        ctx.shape, ctx.input_dtype = x.shape, x.dtype
        return tuple(outputs)

    @staticmethod
    def backward(ctx: "torch.autograd.function.FunctionCtx", *grads: "Tensor") -> "tuple[Tensor | None, ...]":
        x_TI, low_TR, packed = ctx.saved_tensors
        a_RI, parts = _parts(packed, ctx.shapes)
        found = torch.empty_like(packed)
        found_RI, found_parts = _parts(found, ctx.shapes)
        grad_TR = torch.empty_like(low_TR)
        grads_TO = [each.reshape(-1, each.shape[-1]).to(packed.dtype) for each in grads]
        of_layers = zip(_of_layers(low_TR, parts), _of_layers(grad_TR, found_parts), strict=True)
        for grad_TO, ((low, _, b), (grad_low, _, grad_b)) in zip(grads_TO, of_layers, strict=True):
            torch.mm(grad_TO, b, out=grad_low)
            grad_b.addmm_(grad_TO.t(), low, beta=0, alpha=ctx.scaling)
        found_RI.addmm_(grad_TR.t(), x_TI, beta=0, alpha=ctx.scaling)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_TI = grad_TR @ a_RI
            for number, (layer, grad_TO) in enumerate(zip(ctx.layers, grads_TO, strict=True)):
                grad_TI.addmm_(grad_TO, layer.weight(), beta=1.0 if number else ctx.scaling)
            grad_x = grad_TI.view(ctx.shape).to(ctx.input_dtype)
        trained = _split(found.to(ctx.trained_dtype), ctx.shapes)
        return grad_x, None, None, None, *trained


def _split(packed: "Tensor", shapes: "Sequence[torch.Size]") -> "list[Tensor]":
    """Views of tensors that lie end to end."""
    views = packed.split([shape.numel() for shape in shapes])
    return [view.view(shape) for view, shape in zip(views, shapes, strict=True)]


def _parts(packed: "Tensor", shapes: "Sequence[torch.Size]") -> "tuple[Tensor, list[Tensor]]":
    """The A of all layers as one, which lie first, and all matrices by themselves."""
    half = shapes[: len(shapes) // 2]
    return packed[: sum(shape.numel() for shape in half)].view(-1, half[0][1]), _split(packed, shapes)


def _of_layers(low_TR: "Tensor", parts: "Sequence[Tensor]") -> "Iterable[tuple[Tensor, Tensor, Tensor]]":
    """The low-rank states of each layer, with its A and B."""
    all_a, all_b = parts[: len(parts) // 2], parts[len(parts) // 2 :]
    return zip(low_TR.split([len(a) for a in all_a], dim=1), all_a, all_b, strict=True)


def speed_up(model: "PreTrainedModel | PeftModel", *, on_cpu: bool = False) -> int:
    """Replaces the forward of plain LoRA layers; other adapters, dropout and other dtypes keep that of PEFT.

    Args:
        on_cpu: also there, for tests.

    Returns:
        The number of layers.
    """
    count = 0
    for parent in plain(model).modules():
        fast = {
            name: _Forward(layer, on_cpu=on_cpu) for name, layer in parent.named_children()
            if _is_lora(layer) and _weight(layer.get_base_layer()) is not None
        }  # fmt: skip
        for each in fast.values():
            each.layer.forward = each
        for names in _SAME_INPUT:
            group = _Group([fast[name] for name in names if name in fast])
            for each in group.members:
                each.group = group
        count += len(fast)
    return count


class _Group:
    """Layers that read the same input: the first that is called computes the outputs of all."""

    def __init__(self, members: "list[_Forward]") -> None:
        self.members = members
        self.x: Tensor | None = None
        self.version = 0
        self.outputs = dict[int, "Tensor"]()  # of members that were not called yet

    def output(self, member: "_Forward", x: "Tensor") -> "Tensor":
        """A member's product with x; what others would read of another x is dropped."""
        if torch.compiler.is_compiling():
            return member.products(x, [member])[0]
        version = 0 if x.is_inference() else x._version
        if not (self.x is x and self.version == version and id(member) in self.outputs):
            alike = [each for each in self.members if each is member or each.is_like(member, x)]
            found = member.products(x, alike)
            self.x, self.version = x, version
            self.outputs = {id(each): output for each, output in zip(alike, found, strict=True)}
        output = self.outputs.pop(id(member))
        if not self.outputs:
            self.x = None
        return output


class _Forward:
    """The forward of a layer: PEFT's wherever more than one plain adapter is asked for."""

    def __init__(self, layer: LoraLinear, *, on_cpu: bool) -> None:
        self.layer, self.on_cpu = layer, on_cpu
        self.slow = layer.forward
        base = layer.get_base_layer()
        self.bias, weight = base.bias, _weight(base)
        assert weight is not None
        self.weight = weight
        self.group = _Group([self])

    def __call__(self, x: "Tensor", *args: object, **kwargs: object) -> "Tensor":
        if args or kwargs or self._adapter(x) is None:
            return cast("Tensor", self.slow(x, *args, **kwargs))
        return self.group.output(self, x)

    def _adapter(self, x: "Tensor") -> str | None:
        """The name of the adapter that is all that the layer adds to its base; None: it is not so."""
        layer, dtype = self.layer, torch.bfloat16
        active = layer.active_adapters
        is_plain = (
            not layer.disable_adapters and not layer.merged and len(active) == 1 and active[0] in layer.lora_A
            and (x.is_cuda or self.on_cpu)
            and torch.is_autocast_enabled(x.device.type) and torch.get_autocast_dtype(x.device.type) == dtype
        )  # fmt: skip
        return active[0] if is_plain else None

    def is_like(self, other: "_Forward", x: "Tensor") -> bool:
        """Whether it has the same adapter, scaled alike."""
        name = self._adapter(x)
        return name is not None and name == other._adapter(x) and self._scaling(name) == other._scaling(name)

    def _scaling(self, name: str) -> float:
        return float(self.layer.scaling[name])

    def products(self, x: "Tensor", layers: "Sequence[_Forward]") -> "tuple[Tensor, ...]":
        """Of layers alike, of which it is one."""
        name = self.layer.active_adapters[0]
        of_a, of_b = ([getattr(each.layer, side)[name].weight for each in layers] for side in ("lora_A", "lora_B"))
        found: tuple[Tensor, ...] = LoraProduct.apply(x, layers, self._scaling(name), torch.bfloat16, *of_a, *of_b)
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
