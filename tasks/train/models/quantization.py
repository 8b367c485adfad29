"""Quantized bases: the setting, and transformers' configuration of each format.

Linear layers, except the head, are held in few bits and frozen, and an adapter is trained beside them: QLoRA, Dettmers
et al. 2023, arXiv:2305.14314.
"""

import importlib.util
import logging
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Gt

from lineage.errors import ConfigError
from lineage.fingerprint import Setting, set_fields
from tasks.train.optim.optimizers import names_in, refuse_unread

if TYPE_CHECKING:
    from torch import dtype
    from transformers.utils.quantization_config import QuantizationConfigMixin

Format = Literal[
    "nf4", "fp4", "int8", "torchao_int8", "torchao_int8_dynamic", "torchao_float8", "quanto_int8", "quanto_int4",
    "quanto_float8", "hqq", "eetq", "fp8", "gptq", "awq", "aqlm", "mxfp4",
]  # fmt: skip
Dtype = Literal["fp32", "bf16", "fp16"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Quantization(Setting):
    """How the frozen base is held while an adapter is trained on it.

    Args:
        format: an entry of ``FORMATS``.
        double: whether the scales of the blocks are also rounded, to 8 bits; None: they are.
        compute_dtype: of the products with dequantized weights; None: that of the training's precision.
        storage_dtype: of the tensors that hold the packed bits; it changes no number, and is not in the recipe.
        skip_modules: names of further modules that stay in full precision, separated by commas, as transformers
            matches them: a prefix, a regular expression or a suffix of the full name.
        group_size: weights that share a scale; None: the format's own.
        merge: the base that the trained adapter is merged into: ``original`` has full precision; ``dequantized`` has
            the rounded weights that the adapter was trained on, so that the merged model is the trained one.
    """

    format: Format
    double: bool | None = None
    compute_dtype: Dtype | None = None
    storage_dtype: Literal["uint8", "fp32", "bf16", "fp16"] | None = None
    skip_modules: str | None = None
    group_size: Annotated[int, Gt(0)] | None = None
    merge: Literal["original", "dequantized"] = "original"

    def __post_init__(self) -> None:
        row = FORMATS[self.format]
        if not row.rounds:
            needs = f", on a GPU, with {row.package[1]}" if row.package and row.gpu else ""
            raise ConfigError(f"quantization.format={self.format}: {row.reason}{needs}")
        refuse_unread("quantization", self, "format", {name: each.reads for name, each in FORMATS.items()})
        if self.merge == "dequantized" and not row.dequantizes:
            raise ConfigError(
                f"quantization.merge=dequantized: weights in {self.format} cannot be dequantized here; set "
                "quantization.merge=original, which merges the adapter into the base in full precision"
            )
        names_in("quantization.skip_modules", self.skip_modules)

    @property
    def skipped_names(self) -> list[str]:
        return names_in("quantization.skip_modules", self.skip_modules)

    def identity(self, recipe: dict[str, object]) -> dict[str, object]:
        """Its part of a recipe whose other parts are known: of the adapter, as before it was a setting of its own."""
        adapter = recipe.get("adapter")
        if not isinstance(adapter, dict):
            raise ConfigError(
                f"quantization.format={self.format}: a base in few bits is frozen, so that only an adapter can be "
                "trained on it; set adapter=lora, or quantization=none for this stage"
            )
        own = {
            name: value
            for name, value in set_fields(self).items()
            if name not in ("format", "storage_dtype")
            and (name, value) not in (("double", True), ("merge", "original"))
        }
        return {"adapter": {**adapter, "quantization": self.format}, **({"quantization": own} if own else {})}

    def rounding(self) -> dict[str, object] | None:
        """The fields that determine how the weights are rounded that an adapter is merged into; None: they are not."""
        if self.merge == "original":
            return None
        names = ("format", "double", "skip_modules", "group_size")
        return {name: value for name, value in set_fields(self).items() if name in names}


@dataclass(frozen=True, kw_only=True)
class FormatRow:
    """One format.

    Args:
        rounds: whether a training rounds its base to it; else it is read only from models that were quantized before.
        reads: the fields of the setting that it reads, in addition to those of every format.
        package: the module, and the command that installs it; None: it is installed with the pipeline.
        gpu: whether it needs a GPU.
        conv1d: whether it also rounds the layers of GPT-2, which are not linear layers of torch.
        dequantizes: whether ``rounded_weights`` reads its weights.
        rounds_inputs: whether its layers also round what they read.
        reason: why it cannot be trained on; empty: it can.
    """

    rounds: bool = True
    reads: tuple[str, ...] = ()
    package: tuple[str, str] | None = None
    gpu: bool = False
    conv1d: bool = False
    dequantizes: bool = True
    rounds_inputs: bool = False
    reason: str = ""


def torch_dtype(name: str) -> "dtype":
    """Torch's dtype of a name."""
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "uint8": torch.uint8}[name]


def configuration(setting: Quantization, compute: "dtype", skip: list[str] | None) -> "QuantizationConfigMixin":
    """transformers' configuration of a format.

    Args:
        compute: dtype of products.
        skip: the modules that stay in full precision; None: transformers' choice.
    """
    import transformers

    match setting.format:
        case "nf4" | "fp4":
            stored = {"bnb_4bit_quant_storage": torch_dtype(setting.storage_dtype)} if setting.storage_dtype else {}
            return transformers.BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type=setting.format, llm_int8_skip_modules=skip,
                bnb_4bit_use_double_quant=setting.double is not False, bnb_4bit_compute_dtype=compute, **stored,
            )  # fmt: skip
        case "int8":
            # It warns at each product that inputs are rounded to fp16, which is documented.
            logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
            return transformers.BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=skip)
        case "quanto_int8" | "quanto_int4" | "quanto_float8":
            weights = setting.format.removeprefix("quanto_")
            return transformers.QuantoConfig(weights=weights, modules_to_not_convert=skip)
        case "eetq":
            return transformers.EetqConfig(weights="int8", modules_to_not_convert=skip)
        case "fp8":
            return transformers.FineGrainedFP8Config(modules_to_not_convert=skip)
    from torchao import quantization as torchao

    if setting.format == "torchao_float8":
        kind = torchao.Float8WeightOnlyConfig()
    elif setting.group_size:
        kind = torchao.Int8WeightOnlyConfig(granularity=torchao.PerGroup(setting.group_size))
    else:
        kind = torchao.Int8WeightOnlyConfig()
    return transformers.TorchAoConfig(kind, modules_to_not_convert=skip)


_COMPILERS = (os.environ.get("CXX", "c++"), "g++", "clang++")
_BLOCKS = ("double", "compute_dtype", "storage_dtype")
_TORCHAO = ("torchao", 'pip install "posttrain[torchao]"')
_QUANTO = ("optimum.quanto", 'pip install "posttrain[quanto]"')
_KERNELS = ("kernels", "pip install kernels")
_GPTQMODEL = ("gptqmodel", "pip install gptqmodel optimum, which needs torch>=2.14")
_CALIBRATED = "its own tool makes it, with calibration data; a model=... that it has made is accepted"

FORMATS: Mapping[str, FormatRow] = {
    "nf4": FormatRow(reads=_BLOCKS, conv1d=True),
    "fp4": FormatRow(reads=_BLOCKS, conv1d=True),
    "int8": FormatRow(conv1d=True, rounds_inputs=True),
    "torchao_int8": FormatRow(reads=("group_size",), package=_TORCHAO),
    "torchao_int8_dynamic": FormatRow(
        rounds=False, package=_TORCHAO, rounds_inputs=True,
        reason="its layers pass no right gradient to what is below them, where most of an adapter is; torchao_int8 has "
        "the same weights",
    ),
    "torchao_float8": FormatRow(package=_TORCHAO),
    "quanto_int8": FormatRow(package=_QUANTO),
    "quanto_int4": FormatRow(package=_QUANTO),
    "quanto_float8": FormatRow(package=_QUANTO),
    "hqq": FormatRow(
        rounds=False, dequantizes=False,
        reason="transformers 5.24 cannot load weights in it; set a format that is trained on: nf4, fp4, int8",
    ),
    "eetq": FormatRow(package=_KERNELS, gpu=True, dequantizes=False),
    "fp8": FormatRow(package=_KERNELS, gpu=True, dequantizes=False),
    "gptq": FormatRow(rounds=False, package=_GPTQMODEL, gpu=True, dequantizes=False, reason=_CALIBRATED),
    "awq": FormatRow(rounds=False, package=_GPTQMODEL, gpu=True, dequantizes=False, reason=_CALIBRATED),
    "aqlm": FormatRow(
        rounds=False, package=("aqlm", 'pip install "aqlm[gpu]"'), gpu=True, dequantizes=False, reason=_CALIBRATED
    ),
    "mxfp4": FormatRow(
        rounds=False, dequantizes=False,
        reason="nothing trains on such weights: a model=... in it is accepted, and dequantized as it is loaded",
    ),
}  # fmt: skip

# The format of a model that was quantized before, as ``lineage.source.model_files`` names it -> ours.
QUANTIZED_BEFORE: Mapping[str, Format] = {
    "bitsandbytes nf4": "nf4", "bitsandbytes fp4": "fp4", "bitsandbytes int8": "int8", "torchao": "torchao_int8",
    "eetq": "eetq", "gptq": "gptq", "awq": "awq", "aqlm": "aqlm",
}  # fmt: skip
CONV1D_MODELS = ("gpt2", "openai-gpt")  # whose layers are ``transformers.pytorch_utils.Conv1D``
DEQUANTIZED_ON_LOAD = ("fp8", "mxfp4")  # only the rounded values remain


def options_quantized_before(found: str) -> dict[str, object]:
    """Arguments of ``from_pretrained`` for a model that was quantized before."""
    from transformers import FineGrainedFP8Config, Mxfp4Config

    configs = {"fp8": FineGrainedFP8Config, "mxfp4": Mxfp4Config}
    return {"quantization_config": configs[found](dequantize=True)} if found in DEQUANTIZED_ON_LOAD else {}


def missing(name: Format, *, on_gpu: bool) -> str | None:
    """What this machine lacks for a format, and what to do; None: nothing."""
    row = FORMATS[name]
    trained_here = ", ".join(other for other, each in FORMATS.items() if each.rounds and not each.gpu)
    if row.gpu and not on_gpu:
        return f"{name} needs a GPU; set resources.gpus_per_worker=1, or a format that needs none: {trained_here}"
    if name == "quanto_int4" and not (any(map(shutil.which, _COMPILERS)) and shutil.which("ninja")):
        return (
            f"{name} compiles C++ at its first training, and there is no compiler ({', '.join(_COMPILERS)}) or no "
            "ninja in PATH; install them, such as apt-get install g++ ninja-build, or set quanto_int8"
        )
    if row.package and not _is_installed(row.package[0]):
        return f"{name} needs the package {row.package[0]}, which is not installed; run: {row.package[1]}"
    return None


def compiles(name: Format, *, on_gpu: bool) -> bool:
    """Whether the first training in a format compiles its kernel, which takes minutes: quanto builds that of int4."""
    return name == "quanto_int4" and not on_gpu and _is_installed("optimum.quanto") and not _build().exists()


def _build() -> Path:
    """The file that quanto writes once it has compiled its kernel for CPUs."""
    found = importlib.util.find_spec("optimum.quanto")
    assert found and found.submodule_search_locations
    return Path(found.submodule_search_locations[0], "library", "extensions", "cpp", "build", "pytorch_version.txt")


def compile_kernel(name: Format, *, on_gpu: bool) -> None:
    """Compiles the kernel of a format before the first step, in which it would be a long step 0."""
    if compiles(name, on_gpu=on_gpu):
        from optimum.quanto.library.extensions.cpp import ext

        logger.warning("quantization=%s state=compiling: its C++ kernel, once per installation; minutes", name)
        started = time.monotonic()
        assert ext.lib
        logger.info("quantization=%s state=compiled seconds=%.0f", name, time.monotonic() - started)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is not installed
        return False


def require_available(setting: Quantization, *, on_gpu: bool) -> None:
    """Requires the package and the hardware of a format."""
    lacking = missing(setting.format, on_gpu=on_gpu)
    if lacking:
        raise ConfigError(f"quantization.format={setting.format}: {lacking}")


def why_not_on_quantized(
    found: str, *, adapter: bool, quantization: Quantization | None, saves_adapter: bool, on_gpu: bool
) -> str | None:
    """Why a training cannot start from a model that was quantized before, and what to do; None: it can.

    Args:
        found: its format, from its ``config.json``.
    """
    if not adapter:
        return "its weights cannot be trained; set adapter=lora, or start from the model before it was quantized"
    if quantization is not None:
        return "quantization is set too, and would round it again; set quantization=none and adapter=lora"
    if found in DEQUANTIZED_ON_LOAD:
        return None
    name = QUANTIZED_BEFORE.get(found)
    if name is None:
        known = ", ".join([*QUANTIZED_BEFORE, *DEQUANTIZED_ON_LOAD])
        return f"no adapter was trained on this format yet; accepted: {known}; start from the model in full precision"
    lacking = missing(name, on_gpu=on_gpu)
    if lacking is None and not FORMATS[name].dequantizes and not saves_adapter:
        return "it cannot be dequantized, so that no adapter can be merged into it; set save=adapter"
    return lacking
