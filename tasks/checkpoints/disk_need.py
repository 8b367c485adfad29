"""What a training stage writes, in bytes: from its recipe, and the shapes of the model that it starts from."""

import contextlib
import json
import logging
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
_ZERO_BYTES = 8  # beside them: the fp32 weights in DeepSpeed's own file, and the copy that its optimizer steps
_FLOATS = ("F64", "F32", "F16", "BF16")
_NOT_LINEAR = ("embed", "wte", "wpe")  # two-dimensional too, and no layer that an adapter is put on
_HEADS = ("lm_head", "score")  # linear, and left out of all-linear

logger = logging.getLogger(__name__)

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class DiskNeed:
    """What a stage needs while it trains.

    Args:
        checkpoint: bytes of one.
        fewest, most: how many checkpoints there come to be at one time, with the one that is being written.
        staying: how many surely stay beside the output.
        output: bytes.
    """

    checkpoint: int
    fewest: int
    most: int
    staying: int
    output: int

    @property
    def least(self) -> int:
        """The output may be written when the one checkpoint is gone beside which the last was."""
        return max(self.checkpoint * self.fewest, self.checkpoint * max(self.fewest - 1, 0) + self.output)

    @property
    def total(self) -> int:
        """With every checkpoint that there may be."""
        return self.checkpoint * self.most + self.output


def model_shapes(directory: Path) -> Shapes:
    """The shape of each weight of a model, from the headers of its files; empty where there is no whole one."""
    from safetensors import safe_open

    index = directory / "model.safetensors.index.json"
    names = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    shapes: Shapes = {}
    for path in sorted(directory / name for name in names):  # others repeat them in another layout
        if not path.exists():
            return {}
        with safe_open(path, framework="numpy") as file:
            weights = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
            shapes |= {name: tuple(each.get_shape()) for name, each in weights.items() if each.get_dtype() in _FLOATS}
    return shapes


def disk_need(method: Training, resources: Resources, shapes: Shapes) -> DiskNeed:
    """What a stage writes that starts from a model of these shapes."""
    weights = sum(map(math.prod, shapes.values()))
    adapter = _adapter_weights(method.adapter, shapes) if method.adapter else 0
    trained = adapter if method.adapter else weights
    keep_best = resources.keep_best.n if resources.keep_best else 0
    by_steps, most = _saves(method, resources)
    # One by the clock is written beside the one before, in whatever time the stage takes.
    by_clock = min(2, most) if resources.save_minutes is not None else 0
    return DiskNeed(
        checkpoint=trained * (_WEIGHT_BYTES + _ADAM_BYTES + (_ZERO_BYTES if resources.zero_stage else 0)),
        fewest=max(min(resources.keep_last + 1, by_steps), by_clock),
        most=min(resources.keep_last + keep_best + bool(method.best) + 1, most),
        staying=min(keep_best, by_steps),
        output=(adapter if method.save == "adapter" else weights + adapter) * _WEIGHT_BYTES,
    )


def _saves(method: Training, resources: Resources) -> tuple[int, int]:
    """How many checkpoints are surely made, and at the most: none of the last step; any step may be the last."""
    before_last = method.num_steps - 1
    by_steps = before_last // resources.save_steps if resources.save_steps else 0
    if resources.save_minutes is not None:
        return by_steps, before_last
    competing = before_last // method.best.every_steps if method.best else 0
    stopped = 1
    return by_steps, min(before_last, by_steps + competing + stopped)


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
    """Refuses a stage that its disk has surely no room for, and warns of one that it may have none for.

    Args:
        model: what it starts from, or another of the same shapes; without weights there nothing is known.
        entry: where it is made.
        before: bytes that are to be written there before it begins.

    Returns:
        How many bytes more there will be when it is finished.

    Raises:
        ConfigError: names what it needs, what is free, and what to do.
    """
    shapes = model_shapes(model)
    if not shapes:
        return 0
    need = disk_need(method, resources, shapes)
    there = sum(_sizes(entry))  # of an attempt before: it goes, or is not written again
    free = free_bytes(entry.path)
    beside = f", beside {gigabytes(before)} of the stages before it" if before else ""
    found = f"store {entry.path.parents[1]} has {gigabytes(free)} free; {stage}"
    if before + need.least - there > free:
        words, remedy = _words(need, need.fewest), _remedy(stage, resources, need.fewest)
        raise ConfigError(f"{found} needs about {gigabytes(need.least - there)}: {words}{beside}; {remedy}")
    if before + need.total - there > free:
        words, remedy = _words(need, need.most), _remedy(stage, resources, need.most)
        logger.warning("%s may need %s: %s%s; %s", found, gigabytes(need.total - there), words, beside, remedy)
    return max(0, need.output + need.staying * need.checkpoint - there)


def _words(need: DiskNeed, count: int) -> str:
    plural = "checkpoint" if count == 1 else "checkpoints at one time"
    saved = f"{count} {plural}, of {gigabytes(need.checkpoint)}, and " if count else ""
    return f"{saved}its output of {gigabytes(need.output)}"


def _remedy(stage: str, resources: Resources, count: int) -> str:
    """Args: count: of checkpoints, which each option lowers."""
    fields = [
        *(["keep_last=1"] if count > 2 and resources.keep_last > 1 else []),
        *(["save_minutes=null"] if count > 0 and resources.save_minutes is not None else []),
    ]
    options = "".join(f"stages.{stage}.resources.{field}, " for field in fields)
    return f"set {options}a larger store (store=...), or free space (posttrain gc shows what may go)"


def _sizes(entry: Entry) -> Iterator[int]:
    """Bytes of each file that an attempt before has left."""
    for directory in (entry.checkpoints.directory, entry.output, entry.work):
        for path in directory.rglob("*"):
            with contextlib.suppress(OSError):  # it was removed meanwhile
                if path.is_file():
                    yield path.stat().st_size
