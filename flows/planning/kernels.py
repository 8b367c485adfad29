"""What a training takes from its machine (precision, attention, compilation): what is missing, and what would help."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from flows.declare.pipeline import Pipeline, Stage
from lineage.errors import ConfigError
from tasks.context import Resources
from tasks.method import Training

_CPU_FLAGS = Path("/proc/cpuinfo")
_BF16_FLAGS = ("amx_bf16", "avx512_bf16")  # instructions that multiply in bf16


def check_kernels(pipeline: Pipeline) -> None:
    """Requires that each training can run on its resources as set.

    Raises:
        ConfigError: names the field, what it needs, and the nearest that works.
    """
    for name, stage in pipeline.stages.items():
        if isinstance(stage.method, Training):
            _check_precision(f"stages.{name}", stage.method, stage)
            _check_resources(f"stages.{name}.resources", stage.method, stage.resources)


def _check_precision(where: str, method: Training, stage: Stage) -> None:
    if method.precision != "fp16":
        return
    asked = f"{where}.method.precision=fp16"
    if not stage.resources.gpus_per_worker:
        raise ConfigError(
            f"{asked}: gpus_per_worker=0, and without a GPU the trainer would compute in fp32 without a word; set "
            "precision=bf16 or fp32, or gpus_per_worker=1"
        )
    if method.has_own_loop or stage.resources.zero_stage:
        why = "a loop of its own" if method.has_own_loop else f"zero_stage={stage.resources.zero_stage}"
        raise ConfigError(f"{asked}: {why} does not scale the loss, which fp16 needs; set precision=bf16")


def _check_resources(where: str, method: Training, resources: Resources) -> None:
    if resources.empty_cache_steps and not resources.gpus_per_worker:
        raise ConfigError(
            f"{where}: empty_cache_steps={resources.empty_cache_steps} returns unused GPU memory, and "
            "gpus_per_worker=0; set empty_cache_steps=null"
        )
    if resources.dataloader_workers and method.has_own_loop:
        raise ConfigError(
            f"{where}: dataloader_workers={resources.dataloader_workers} needs transformers' trainer, and "
            f"{type(method).__name__} has a loop of its own, which collates in its process; set dataloader_workers=0"
        )
    if resources.compile:
        _check_compile(where, resources)


def _check_compile(where: str, resources: Resources) -> None:
    if resources.zero_stage:
        raise ConfigError(
            f"{where}: compile=true with zero_stage={resources.zero_stage} is not supported: DeepSpeed calls the model "
            "through its own engine; set compile=false, or zero_stage=0"
        )
    if not resources.gpus_per_worker and runs_here() and not shutil.which(os.environ.get("CXX", "g++")):
        raise ConfigError(
            f"{where}: compile=true compiles C++ where there is no GPU, and there is no "
            f"{os.environ.get('CXX', 'g++')} on this machine; install it (apt-get install g++), or set compile=false"
        )


def runs_here() -> bool:
    """Whether trainings run on this machine, so that what is missing on it can be refused."""
    return not os.environ.get("RAY_ADDRESS")


def bf16_notes(stages: Mapping[str, Stage]) -> list[str]:
    """A suggestion for trainings that will run in fp32 on this machine's CPU, where it has instructions for bf16."""
    slow = [
        name
        for name, stage in stages.items()
        if isinstance(stage.method, Training) and _could_use_bf16(stage.method, stage)
    ]
    found = bf16_instructions() if slow and runs_here() else None
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
