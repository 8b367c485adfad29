"""Speed of a training: its tokens per second, and its share of its devices' peak arithmetic (MFU).

The peak of a device is the largest that a product of matrices reached at the start of a training on this host; it is
kept in the user's cache directory.
"""

import json
import logging
import platform
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from lineage.filesystem.files import atomic_write, user_cache
from lineage.record.environment import hardware
from tasks.judgement.estimate import Architecture, architecture, flops_per_token, sequences

if TYPE_CHECKING:
    from tasks.context import Resources
    from tasks.recipe import TrainingRecipe

logger = logging.getLogger(__name__)

_FIRST_SIDE, _LAST_SIDE = 256, 8192  # of the matrices, which are doubled until a product takes long enough
_LONG_ENOUGH = 0.01  # seconds
_PRODUCTS = 5
_LOCK_SECONDS = 60


def peaks_file() -> Path:
    """Where peaks are kept: FLOP/s by host, device, threads and precision. Delete it to measure again."""
    return user_cache("peaks.json")


def known_peak(resources: "Resources", precision: str) -> float | None:
    """FLOP/s of a worker's device; None: no training on this host has measured them."""
    return _known(peaks_file()).get(peak_key(resources, precision))


def peak(resources: "Resources", precision: str) -> float:
    """FLOP/s of a worker's device: the highest ever measured on this host, since other work slows a product down."""
    path, key = peaks_file(), peak_key(resources, precision)
    measured = measured_peak(bool(resources.gpus_per_worker), precision)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock", timeout=_LOCK_SECONDS):
            known = _known(path)
            if measured > known.get(key, 0):
                atomic_write(path, json.dumps(known | {key: measured}, indent=1))
            return max(measured, known.get(key, 0))
    except OSError as error:  # such as a home that cannot be written
        logger.warning("file=%s state=not_written error=%s", path, error)
        return measured


@cache
def measured_peak(on_gpu: bool, precision: str) -> float:
    """FLOP/s of the fastest of some products of matrices, in the dtype of the training; once per process."""
    import torch

    dtype = {"fp32": torch.float32, "fp16": torch.float16}.get(precision, torch.bfloat16)
    device = torch.device("cuda" if on_gpu else "cpu")
    generator = torch.Generator(device).manual_seed(0)  # does not change the training's random state
    side, best = _FIRST_SIDE, 0.0
    while best < _LONG_ENOUGH and side <= _LAST_SIDE:  # a CPU without instructions for a dtype takes seconds
        left, right = (torch.rand(side, side, dtype=dtype, device=device, generator=generator) for _ in range(2))
        seconds = []
        for _ in range(1 + _PRODUCTS):  # the first one starts threads and picks kernels
            start = time.perf_counter()
            torch.mm(left, right)
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        best, side = min(seconds[1:]), 2 * side
    if device.type == "cuda":
        del left, right
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)  # the peak that a training reports is its own
    return float(2 * (side // 2) ** 3 / best)


def _known(path: Path) -> dict[str, float]:
    try:
        known: dict[str, float] = json.loads(path.read_text())
    except (OSError, ValueError):  # not measured yet, or damaged: it can be measured again
        return {}
    return known


def peak_key(resources: "Resources", precision: str) -> str:
    """Host, device, threads and precision."""
    kind = "gpu" if resources.gpus_per_worker else "cpu"
    threads = f" x{resources.cpus_per_worker}" if kind == "cpu" else ""
    return f"{platform.node()}: {hardware().get(kind, kind)}{threads} {precision}"


@dataclass(frozen=True)
class Speed:
    """Turns a pace in tokens into the metrics of a stage.

    Args:
        config: of the policy; where it lacks a number, the MFU is unknown.
        slots: that are filled.
    """

    method: "TrainingRecipe"
    resources: "Resources"
    config: Mapping[str, object]
    slots: Collection[str] = ()

    @cached_property
    def found(self) -> Architecture | None:
        """The policy's architecture; None: unknown."""
        return architecture(self.config)

    @cached_property
    def peak(self) -> float:
        """FLOP/s of all workers; measured at the first call."""
        return peak(self.resources, self.method.precision) * self.resources.num_workers

    def metrics(self, tokens_per_second: float, *, num_tokens: float, num_steps: int) -> dict[str, float]:
        """Speed, and model FLOPs utilization: Chowdhery et al. 2022, arXiv:2204.02311, section 4.1.

        Recomputed activations do not count as arithmetic.

        Args:
            num_tokens, num_steps: so far, which gives the mean length of a row.
        """
        speed = {
            "tokens_per_second": tokens_per_second,
            "tokens_per_second_per_worker": tokens_per_second / self.resources.num_workers,
        }
        if self.found is None or not num_steps:
            return speed
        rows = num_steps * self.method.global_batch_size * sequences(self.method)
        length = min(round(num_tokens / rows), self.method.max_length)
        once = replace(self.resources, gradient_checkpointing="off")
        flops = flops_per_token(self.found, self.method, once, length, self.slots)
        return {**speed, "mfu": tokens_per_second * flops / self.peak}
