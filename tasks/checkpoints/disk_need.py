"""What a training stage writes, in bytes: from its recipe, and the shapes of the model that it starts from."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lineage.disk import free_bytes, gigabytes
from lineage.errors import ConfigError
from lineage.store import Entry
from tasks.context import Resources
from tasks.method import ALL_LINEAR, LoRA, Training

_WEIGHT_BYTES = 4  # what is trained is kept in fp32
_ADAM_BYTES = 8  # the two moments of each weight, in fp32
_FLOATS = ("F64", "F32", "F16", "BF16")
_NOT_LINEAR = ("embed", "wte", "wpe")  # two-dimensional too, and no layer that an adapter is put on
_HEADS = ("lm_head", "score")  # linear, and left out of all-linear

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class DiskNeed:
    """What a stage needs while it trains.

    Args:
        checkpoint: bytes of one.
        num_checkpoints: that there are at one time, with the one that is being written, at the most.
        output: bytes.
    """

    checkpoint: int
    num_checkpoints: int
    output: int

    @property
    def total(self) -> int:
        return self.checkpoint * self.num_checkpoints + self.output


def model_shapes(directory: Path) -> Shapes:
    """The shape of each weight of a model, from the headers of its files; empty where there is no whole one."""
    from safetensors import safe_open

    shapes: Shapes = {}
    for path in sorted(set(directory.glob("*.safetensors")) - set(directory.glob("adapter_*"))):
        with safe_open(path, framework="numpy") as file:
            weights = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
            shapes |= {name: tuple(each.get_shape()) for name, each in weights.items() if each.get_dtype() in _FLOATS}
    return shapes


def disk_need(method: Training, resources: Resources, shapes: Shapes) -> DiskNeed:
    """What a stage writes that starts from a model of these shapes."""
    weights = sum(map(math.prod, shapes.values()))
    adapter = _adapter_weights(method.adapter, shapes) if method.adapter else 0
    trained = adapter if method.adapter else weights
    kept = resources.keep_last + (resources.keep_best.n if resources.keep_best else 0) + bool(method.best)
    return DiskNeed(
        checkpoint=trained * (_WEIGHT_BYTES + _ADAM_BYTES),
        num_checkpoints=min(kept + 1, _most_saves(method, resources)),
        output=(adapter if method.save == "adapter" else weights + adapter) * _WEIGHT_BYTES,
    )


def _most_saves(method: Training, resources: Resources) -> int:
    """None is made of the last step. By the clock there may be one at each step."""
    before_last = method.num_steps - 1
    if resources.save_minutes is not None:
        return before_last
    intervals = (resources.save_steps, method.best.every_steps if method.best else None)
    return min(before_last, sum(before_last // interval for interval in intervals if interval))


def _adapter_weights(adapter: LoRA, shapes: Shapes) -> int:
    """Two matrices beside each layer: rank x inputs and outputs x rank."""
    layers = [shape for name, shape in shapes.items() if len(shape) == 2 and _is_target(name, adapter)]
    return sum(adapter.rank * (rows + columns) for rows, columns in layers)


def _is_target(weight: str, adapter: LoRA) -> bool:
    layer = weight.removesuffix(".weight").rpartition(".")[2]
    if adapter.target_modules != ALL_LINEAR:
        return layer in adapter.target_names
    return layer not in _HEADS and not layer.startswith(_NOT_LINEAR)


def require_room(
    stage: str, method: Training, resources: Resources, model: Path, entry: Entry, before: int = 0
) -> int:  # fmt: skip
    """Refuses a stage that its disk has no room for; returns how many bytes more there will be when it is finished.

    Args:
        model: what it starts from, or another of the same shapes; without weights there nothing is known.
        entry: where it is made.
        before: bytes that are to be written there before it begins.

    Raises:
        ConfigError: names what it needs, what is free, and what to do.
    """
    shapes = model_shapes(model)
    if not shapes:
        return 0
    need = disk_need(method, resources, shapes)
    there = sum(_sizes(entry))  # of an attempt before: it goes, or is not written again
    free = free_bytes(entry.path)
    if before + need.total - there <= free:
        return max(0, need.output - there)
    saved = f"{need.num_checkpoints} checkpoints of {gigabytes(need.checkpoint)} and " if need.num_checkpoints else ""
    beside = f", beside {gigabytes(before)} of the stages before it" if before else ""
    fewer = f"stages.{stage}.resources.keep_last=1, " if need.num_checkpoints > 1 and resources.keep_last > 1 else ""
    raise ConfigError(
        f"store {entry.path.parents[1]} has {gigabytes(free)} free; {stage} needs about "
        f"{gigabytes(need.total - there)}: {saved}its output of {gigabytes(need.output)}{beside}; set {fewer}a larger "
        "store (store=...), or free space (posttrain gc shows what may go)"
    )


def _sizes(entry: Entry) -> Iterator[int]:
    """Bytes of each file that an attempt before has left."""
    for directory in (entry.checkpoints.directory, entry.output, entry.work):
        for path in directory.rglob("*"):
            with contextlib.suppress(OSError):  # it was removed meanwhile
                if path.is_file():
                    yield path.stat().st_size
