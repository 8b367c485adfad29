"""A base in 4 bits under an adapter, NF4 with double quantization: QLoRA, Dettmers et al. 2023, arXiv:2305.14314."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import dtype
    from transformers import PreTrainedModel

    from tasks.context import TrainContext
    from tasks.recipe import TrainingRecipe


_EXPERT_DIMENSIONS = 3  # experts x outputs x inputs


@dataclass(frozen=True, kw_only=True)
class FourBit:
    """How linear layers, but for the head, are loaded: 4 bits a weight, multiplied in ``compute_dtype``."""

    compute_dtype: "dtype"
    device: str
    name: str = "nf4"

    @staticmethod
    def of(method: "TrainingRecipe", ctx: "TrainContext") -> "FourBit | None":
        """What a training asks for; None: full precision."""
        if method.adapter is None or method.adapter.quantization is None:
            return None
        import torch
        from accelerate import PartialState

        device = str(PartialState().device) if ctx.resources.gpus_per_worker else "cpu"
        compute_dtype = torch.bfloat16 if method.precision == "bf16" else torch.float32
        return FourBit(compute_dtype=compute_dtype, device=device, name=method.adapter.quantization)

    def options(self) -> dict[str, object]:
        """What ``from_pretrained`` takes."""
        from transformers import BitsAndBytesConfig

        config = BitsAndBytesConfig(**QUANTIZATIONS[self.name], bnb_4bit_compute_dtype=self.compute_dtype)
        return {"quantization_config": config, "device_map": {"": self.device}}

    def applied(self, model: "PreTrainedModel") -> "PreTrainedModel":
        """A model that is in memory in full precision, as one loaded so would be."""
        rounded: PreTrainedModel = type(model).from_pretrained(
            None, config=model.config, state_dict=model.state_dict(), dtype=model.dtype, **self.options()
        )
        rounded.name_or_path = rounded.config.name_or_path = model.name_or_path  # PEFT asks the hub for a nameless one
        if rounded.can_generate():
            rounded.generation_config = model.generation_config
        return rounded


# What a base can be rounded to; a row more is a name more in tasks.recipe.LoRA.
QUANTIZATIONS: Mapping[str, Mapping[str, object]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
}


def quantize_experts(model: "PreTrainedModel") -> None:
    """Rounds the experts of a mixture too, whose weights are one parameter of three dimensions and no linear layers.

    transformers leaves them in full precision. They are unpacked when they are read, one layer at a time.
    """
    from bitsandbytes.nn.parametrize import replace_parameter_4bit
    from torch.nn.modules.conv import _ConvNd

    config = model.config.quantization_config
    for module in list(model.modules()):
        if isinstance(module, _ConvNd):
            continue
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.ndim == _EXPERT_DIMENSIONS and parameter.is_floating_point():
                replace_parameter_4bit(
                    module, name, compress_statistics=config.bnb_4bit_use_double_quant,
                    quant_type=config.bnb_4bit_quant_type,
                )  # fmt: skip


def look_for_quantized(looks: bool) -> None:
    """Whether PEFT, putting an adapter on a layer, asks if bitsandbytes made it: to ask, it imports bitsandbytes."""
    from peft.tuners.lora import model

    model.is_bnb_available = model.is_bnb_4bit_available = lambda: looks


def is_quantized(model: "PreTrainedModel") -> bool:
    """Whether linear layers of a model are in 4 bits."""
    return "quantization_config" in model.config


def keep_layout(model: "PreTrainedModel") -> None:
    """Holds bitsandbytes from laying weights out anew on a CPU.

    On one with bf16 instructions the first call of a model that is not in training mode would do so for good, for a
    kernel that is a package of its own: what the steps after a measurement compute would change, or fail without it.
    """
    from bitsandbytes.nn.modules import Linear4bit

    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False


def step_in_fp32(model: "PreTrainedModel") -> None:
    """What is trained is stepped in fp32: TRL makes an adapter on a quantized base bf16, which loses small steps."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
