"""What a training takes from its machine (precision, attention, compilation): what is missing, and what would help."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from flows.declare.pipeline import Pipeline, Stage
from lineage.errors import ConfigError
from tasks.context import Resources
from tasks.method import Training
from tasks.train.optimizers import OPTIMIZERS


@dataclass(frozen=True, kw_only=True)
class _Package:
    """What a setting needs: the module that it imports, and how it is installed."""

    module: str
    install: str


_FLASH = {
    "flash_attention_2": _Package(module="flash_attn", install="pip install flash-attn --no-build-isolation"),
    "flash_attention_3": _Package(
        module="flash_attn_interface", install="from github.com/Dao-AILab/flash-attention, folder hopper: pip install ."
    ),
}
_LIGER = _Package(module="liger_kernel", install="pip install 'posttrain[liger]'")
_TORCHAO = _Package(module="torchao", install="pip install torchao==0.18.0")
_CAPABILITIES = ("nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader")
_FP8_CAPABILITY = (8, 9)
_CPU_FLAGS = Path("/proc/cpuinfo")
_BF16_FLAGS = ("amx_bf16", "avx512_bf16")  # instructions that multiply in bf16


def check_kernels(pipeline: Pipeline) -> None:
    """Requires that this machine has what the resources of its trainings need.

    Raises:
        ConfigError: names the field, what it needs, and the nearest that works.
    """
    if os.environ.get("RAY_ADDRESS"):
        return  # they run on other machines
    for name, stage in pipeline.stages.items():
        if isinstance(stage.method, Training):
            _check_compiler(f"stages.{name}.resources", stage.resources)
            _check_packages(f"stages.{name}", stage.method, stage.resources)
            if stage.method.precision == "fp8":
                _check_fp8(f"stages.{name}.method.precision=fp8")
            _check_optimizer(f"stages.{name}", stage.method)


def _check_compiler(where: str, resources: Resources) -> None:
    compiler = os.environ.get("CXX", "g++")
    if resources.compile and not resources.gpus_per_worker and not shutil.which(compiler):
        raise ConfigError(
            f"{where}.compile=true: without a GPU it compiles C++, and there is no {compiler} on this machine; install "
            "it (apt-get install g++), or set compile=false"
        )


def _check_packages(where: str, method: Training, resources: Resources) -> None:
    chosen = {
        f"resources.attention={resources.attention}": ("auto", _FLASH.get(resources.attention)),
        "resources.liger=true": ("false", _LIGER if resources.liger else None),
        "method.precision=fp8": ("bf16", _TORCHAO if method.precision == "fp8" else None),
    }
    for setting, (instead, package) in chosen.items():
        if package and not find_spec(package.module):
            raise ConfigError(
                f"{where}.{setting}: the package {package.module} is not installed; install it ({package.install}), or "
                f"set {setting.partition('=')[0].partition('.')[2]}={instead}"
            )


def _check_fp8(asked: str) -> None:
    """What the driver says of this machine's GPUs; where it says nothing, the training's start checks again."""
    try:
        listing = subprocess.run(_CAPABILITIES, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return
    for line in filter(None, listing.splitlines()):
        name, _, capability = line.rpartition(", ")
        if tuple(map(int, capability.split("."))) < _FP8_CAPABILITY:
            raise ConfigError(
                f"{asked}: {name} has compute capability {capability}, and 8.9 (Ada, Hopper) or higher is needed; set "
                "precision=bf16"
            )


def _check_optimizer(where: str, method: Training) -> None:
    """Requires the package of an optimizer that is in none of the lock's."""
    package = OPTIMIZERS[method.optimizer.name].package
    if package and package.is_missing:
        raise ConfigError(
            f"{where}.method.optimizer.name={method.optimizer.name}: it needs the package {package.name}, which is not "
            f"installed: {package.install}; or set optimizer=adamw_torch_fused"
        )


def bf16_notes(stages: Mapping[str, Stage]) -> list[str]:
    """A suggestion for trainings that will run in fp32 on this machine's CPU, where it has instructions for bf16."""
    slow = [
        name
        for name, stage in stages.items()
        if isinstance(stage.method, Training) and _could_use_bf16(stage.method, stage)
    ]
    found = bf16_instructions() if slow and not os.environ.get("RAY_ADDRESS") else None
    if not found:
        return []
    return [f"precision=bf16 would train {', '.join(slow)} faster: this CPU has {found} (docs/performance.md)"]


def _could_use_bf16(method: Training, stage: Stage) -> bool:
    applies = not method.has_own_loop or "precision" in method.applies
    return applies and method.precision == "fp32" and not stage.resources.gpus_per_worker


def bf16_instructions() -> str | None:
    """The CPU's instructions for bf16; None: it has none, or does not say."""
    try:
        flags = set(_CPU_FLAGS.read_text().split())
    except OSError:
        return None
    return next((flag for flag in _BF16_FLAGS if flag in flags), None)
