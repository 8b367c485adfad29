"""A base in 4 bits under an adapter, NF4 with double quantization: QLoRA, Dettmers et al. 2023, arXiv:2305.14314."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from lineage.errors import ConfigError

if TYPE_CHECKING:
    from torch import dtype
    from transformers import PreTrainedModel

    from tasks.context import TrainContext


Format = Literal["nf4"]

_EXPERT_DIMENSIONS = 3  # experts x outputs x inputs


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """How the frozen base is held while an adapter is trained on it.

    Args:
        format: ``nf4``: QLoRA, Dettmers et al. 2023, arXiv:2305.14314.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True, "allow_inf_nan": False}

    format: Format

    def identity(self, recipe: dict[str, object]) -> dict[str, object]:
        """Its part of a recipe whose other parts are known: of the adapter, as before it was a setting of its own."""
        adapter = recipe.get("adapter")
        if not isinstance(adapter, dict):
            raise ConfigError(
                f"quantization.format={self.format}: a base in few bits is frozen, so that only an adapter can be "
                "trained on it; set adapter=lora, or quantization=none for this stage"
            )
        return {"adapter": {**adapter, "quantization": self.format}}


@dataclass(frozen=True, kw_only=True)
class FourBit:
    """How linear layers except the head are loaded: 4 bits a weight, multiplied in ``compute_dtype``."""

    compute_dtype: "dtype"
    device: str
    name: str = "nf4"

    @staticmethod
    def of(quantization: Quantization | None, precision: str, ctx: "TrainContext") -> "FourBit | None":
        """From a training's settings; None: full precision."""
        if quantization is None:
            return None
        import torch
        from accelerate import PartialState

        device = str(PartialState().device) if ctx.resources.gpus_per_worker else "cpu"
        compute_dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        return FourBit(compute_dtype=compute_dtype, device=device, name=quantization.format)

    def options(self) -> dict[str, object]:
        """Arguments of ``from_pretrained``."""
        from transformers import BitsAndBytesConfig

        config = BitsAndBytesConfig(**QUANTIZATIONS[self.name], bnb_4bit_compute_dtype=self.compute_dtype)
        return {"quantization_config": config, "device_map": {"": self.device}}

    def applied(self, model: "PreTrainedModel") -> "PreTrainedModel":
        """Quantizes a model that is in memory in full precision."""
        rounded: PreTrainedModel = type(model).from_pretrained(
            None, config=model.config, state_dict=model.state_dict(), dtype=model.dtype, **self.options()
        )
        rounded.name_or_path = rounded.config.name_or_path = model.name_or_path  # PEFT asks the hub for a nameless one
        if rounded.can_generate():
            rounded.generation_config = model.generation_config
        return rounded


# Format -> arguments of BitsAndBytesConfig.
QUANTIZATIONS: Mapping[str, Mapping[str, object]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
}


def quantize_experts(model: "PreTrainedModel") -> None:
    """Quantizes the experts of a mixture too, which transformers leaves in full precision.

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
            if parameter.ndim == _EXPERT_DIMENSIONS and parameter.is_floating_point():
                replace_parameter_4bit(
                    module, name, compress_statistics=config.bnb_4bit_use_double_quant,
                    quant_type=config.bnb_4bit_quant_type,
                )  # fmt: skip


def detect_quantized_layers(enabled: bool) -> None:
    """Sets whether PEFT checks for layers of bitsandbytes when it adds an adapter: the check imports bitsandbytes."""
    from peft.tuners.lora import model

    model.is_bnb_available = model.is_bnb_4bit_available = lambda: enabled


def is_quantized(model: "PreTrainedModel") -> bool:
    """Whether a model's linear layers are in 4 bits."""
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
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
