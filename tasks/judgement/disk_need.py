"""How many bytes a training stage writes, from its recipe and the shapes of its model."""

import contextlib
import json
import logging
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from lineage.errors import ConfigError
from lineage.filesystem.disk import free_bytes, gigabytes
from lineage.source.model_files import read_json, require_sound, weight_places
from lineage.store import Entry
from tasks.context import Resources
from tasks.data.images import Images, ModelPart
from tasks.judgement.check_rows import POLICY
from tasks.recipe import REWARD_HEAD, VALUE_MODEL, TrainingRecipe
from tasks.train.models.adapters import ADAPTERS, HEADS, Adapter, adapts_experts, no_module, require_sizes, targets
from tasks.train.models.freeze import idle
from tasks.train.models.quantization import CONV1D_MODELS
from tasks.train.sharding import holds_parts

_WEIGHT_BYTES = 4  # trained weights are kept in fp32, or in two halves
_ZERO_BYTES = 8  # beside them: the fp32 weights in DeepSpeed's own file, and the copy that its optimizer steps
_UNKNOWN_STEPS = 10**9  # for num_epochs while the number of rows is unknown: as many saves as possible
_WEIGHTS = ("F64", "F32", "F16", "BF16", "I8", "F8_E4M3", "F8_E5M2")
# What formats of few bits write beside a layer's weight, which is none of its weights.
_STATE = ".quant_state."
_BESIDE = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", "_scale_inv", "_scale")
_SCALES = (".SCB", ".weight_format", ".scales", ".qzeros", ".g_idx")
_EXPERT = re.compile(r"\.experts\.\d+\.")  # in names of the weights of one expert
_HALVES = ("w1", "w3", "gate_proj", "up_proj")  # layers of an expert that are loaded as one parameter
_ROUTER = ".gate.weight"
NOT_LINEAR = ("embed", "wte", "wpe")  # two-dimensional too, but not layers that get an adapter

Shapes = dict[str, tuple[int, ...]]


class _Slice(Protocol):
    """A tensor of a file, which is not read."""

    def get_shape(self) -> list[int]: ...


logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Together:
    """Files that are on the disk at the same time.

    Args:
        num_checkpoints: of ``checkpoint`` bytes each.
        output: bytes; 0: it is not written yet.
    """

    num_checkpoints: int
    checkpoint: int
    output: int = 0

    @property
    def bytes(self) -> int:
        return self.num_checkpoints * self.checkpoint + self.output

    def __str__(self) -> str:
        plural = "checkpoint" if self.num_checkpoints == 1 else "checkpoints"
        saved = [f"{self.num_checkpoints} {plural} of {gigabytes(self.checkpoint)}"] if self.num_checkpoints else []
        made = [f"its output of {gigabytes(self.output)}"] if self.output else []
        return f"at one time {' and '.join([*saved, *made])}"


@dataclass(frozen=True, kw_only=True)
class DiskNeed:
    """The disk space that a stage needs while it trains.

    Args:
        checkpoint: bytes of one.
        fewest, most: number of checkpoints at the same time, including the one that is being written.
        kept: the most checkpoints when the output is written.
        staying: the fewest checkpoints that remain beside the output.
        output: bytes; of divided weights also those that rank 0 collects for it, in files of their own.
    """

    checkpoint: int
    fewest: int
    most: int
    kept: int
    staying: int
    output: int

    @property
    def least(self) -> Together:
        """With the fewest checkpoints: the output may be written after the last but one was deleted."""
        return self._larger(self.fewest, max(self.fewest - 1, 0))

    @property
    def total(self) -> Together:
        """With the most checkpoints."""
        return self._larger(self.most, self.kept)

    def _larger(self, saving: int, done: int) -> Together:
        """Args: saving, done: how many checkpoints there are when the last is written, and beside the output."""
        moments = ((saving, 0), (done, self.output))
        each = [Together(num_checkpoints=count, checkpoint=self.checkpoint, output=output) for count, output in moments]
        return max(each, key=lambda moment: moment.bytes)


def disk_need(method: TrainingRecipe, resources: Resources, shapes: Shapes) -> DiskNeed:
    """The disk space of a stage that starts from a model of these shapes."""
    weights = sum(map(math.prod, shapes.values()))
    trained, adapter = (weights, 0)
    if method.adapter:
        trained, adapter = weights_of_adapter(method, shapes)
    else:
        trained -= _frozen_weights(method, shapes) or 0
    saved = adapter if method.adapter else weights
    if method.has_own_loop and method.adapter:
        saved += weights  # it saves its policy with the base
    if VALUE_MODEL in method.models.values():
        saved, trained = saved + weights, trained + weights
    if method.diloco:  # each island's weights and optimizer state, and the outer weights and momentum
        islands = method.diloco.num_islands
        saved, trained = islands * saved + 2 * trained, islands * trained
    keep_best = resources.keep_best.n if resources.keep_best else 0
    by_steps, saves = _saves(method, resources)
    # A checkpoint by time is written beside the one before, however long the stage takes.
    by_clock = min(2, saves) if resources.save_minutes is not None else 0
    kept = resources.keep_last + keep_best + bool(method.best)
    in_bf16 = resources.frozen_dtype(resources.resolved_precision(method.precision)) == "bf16"
    is_half = method.optimizer.weights or (method.adapter and not method.quantization and in_bf16)  # a merged base
    return DiskNeed(
        checkpoint=saved * _WEIGHT_BYTES
        + trained * (method.optimizer.state_bytes + (_ZERO_BYTES if resources.sharding.startswith("zero") else 0)),
        fewest=max(min(resources.keep_last + 1, by_steps), by_clock),
        most=min(kept + 1, saves),
        kept=min(kept, saves),
        staying=min(keep_best, by_steps),
        output=(0 if method.save == "adapter" else weights) * (_WEIGHT_BYTES // 2 if is_half else _WEIGHT_BYTES)
        + adapter * (_WEIGHT_BYTES // 2 if method.optimizer.weights else _WEIGHT_BYTES)
        + (weights * _WEIGHT_BYTES if holds_parts(resources) else 0),
    )


def _saves(method: TrainingRecipe, resources: Resources) -> tuple[int, int]:
    """The fewest and the most checkpoints: none at the last step, which any step may be."""
    before_last = (method.num_steps or _UNKNOWN_STEPS) - 1
    by_steps = before_last // resources.save_steps if resources.save_steps else 0
    if resources.save_minutes is not None or resources.save_epochs is not None:
        return by_steps, before_last
    # The steps at which epochs end are unknown until the number of rows is known.
    every = method.best and (method.best.every_steps or (method.validation and method.validation.every_steps) or 1)
    competing = before_last // every if every else 0
    stopped = 1
    return by_steps, min(before_last, by_steps + competing + stopped)


def require_disk(
    stage: str, method: TrainingRecipe, resources: Resources, model: Path | None, entry: Entry, before: int = 0
) -> int:  # fmt: skip
    """Refuses a stage that certainly does not fit on its disk, and warns of one that may not fit.

    Args:
        model: the model that it starts from, or another of the same shapes; without weights, nothing is checked.
        entry: of its artifact.
        before: bytes that are written before it begins; negative: that are deleted.

    Returns:
        How many more bytes are on the disk when it is finished; negative: fewer.
    """
    there = sum(_sizes(entry))  # of an earlier attempt: deleted, or not written again
    if model:
        require_sound(model)
    shapes = model_shapes(model) if model else {}
    if not shapes:
        return -there
    free = free_bytes(entry.path)
    lack = partial(_lack, stage, resources, free + there - before)
    found = f"store {entry.path.parents[1]} has {gigabytes(free)} free{_beside(stage, there, before)}; {stage}"
    refusal = lack(lambda each: disk_need(method, each, shapes).least)
    if refusal:
        raise ConfigError(f"{found} needs {refusal}")
    warning = lack(lambda each: disk_need(method, each, shapes).total)
    if warning:
        logger.warning("%s may need %s", found, warning)
    need = disk_need(method, resources, shapes)
    return need.output + need.staying * need.checkpoint - there


def _beside(stage: str, there: int, before: int) -> str:
    """What changes the free space before the stage writes."""
    changes = [
        *([f"less {gigabytes(before)} for the stages before it"] if before > 0 else []),
        *([f"and {gigabytes(-before)} once the stages before it are finished"] if before < 0 else []),
        *([f"and {gigabytes(there)} that {stage} has written already"] if there else []),
    ]
    return f" ({', '.join(changes)})" if changes else ""


def _lack(stage: str, resources: Resources, room: int, needs: Callable[[Resources], Together]) -> str:
    """What is needed and what to do; empty: it fits."""
    wanted = needs(resources)
    if wanted.bytes <= room:
        return ""
    prefix = f"stages.{stage}.resources"
    last, clock = f"{prefix}.keep_last=1", f"{prefix}.save_minutes=null"
    smaller = {
        last: replace(resources, keep_last=1),
        clock: replace(resources, save_minutes=None),
        f"{last}, {clock}": replace(resources, keep_last=1, save_minutes=None),
    }
    remedy = next((f"set {options}, " for options, each in smaller.items() if needs(each).bytes <= room), "")
    lacking = gigabytes(wanted.bytes - room)
    return (
        f"about {gigabytes(wanted.bytes)}: {wanted}; {remedy}free {lacking} more (posttrain gc shows what may be "
        "deleted), or set a larger store (store=...)"
    )


def _sizes(entry: Entry) -> Iterator[int]:
    """Bytes of each file that an earlier attempt has left."""
    for directory in (entry.checkpoints.directory, entry.output, entry.work):
        for path in directory.rglob("*"):
            with contextlib.suppress(OSError):  # it was removed meanwhile
                if path.is_file():
                    yield path.stat().st_size


def model_shapes(directory: Path) -> Shapes:
    """The shape of each weight of a model, from the headers of its files; empty: there is no complete model.

    Those of GPT-2's layers are transposed, so that outputs come first, as in linear layers.
    """
    from safetensors import safe_open

    config = read_json(directory, "config.json")
    is_turned = isinstance(config, dict) and config.get("model_type") in CONV1D_MODELS
    shapes: Shapes = {}
    for path in sorted(set(weight_places(directory).values())):  # others repeat them in another layout
        with safe_open(path, framework="numpy") as file:
            weights = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
            shapes |= {name: tuple(each.get_shape()) for name, each in weights.items() if each.get_dtype() in _WEIGHTS}
            packed = [name for name in weights if _STATE in name]
            for name in packed:  # bitsandbytes packs two weights into a byte, and writes their shape beside them
                state = json.loads(bytes(file.get_tensor(name).tolist()))
                shapes[name.partition(_STATE)[0].removesuffix(".")] = tuple(state["shape"])
            shapes |= _packed_in_words(weights, config)
    beside = {f"{name}{end}" for name in shapes for end in _BESIDE}
    shapes = {name: shape for name, shape in shapes.items() if name not in beside and not name.endswith(_SCALES)}
    if is_turned:
        shapes |= {name: shape[::-1] for name, shape in shapes.items() if name.split(".")[-2][:2] == "c_"}
    return shapes


def _packed_in_words(weights: Mapping[str, "_Slice"], config: object) -> Shapes:
    """The shapes of layers in GPTQ (inputs packed, times outputs) and AWQ (inputs times outputs packed)."""
    setting = config.get("quantization_config") if isinstance(config, dict) else None
    if not isinstance(setting, dict):
        return {}
    per_word = 32 // int(setting.get("bits", 4))
    found = {name: tuple(each.get_shape()) for name, each in weights.items() if name.endswith(".qweight")}
    is_awq = setting.get("quant_method") == "awq"
    return {
        name.replace(".qweight", ".weight"): (
            (columns * per_word, rows) if is_awq else (columns, rows * per_word)
        ) for name, (rows, columns) in found.items()
    }  # fmt: skip


_TEXT: tuple[ModelPart, ...] = ("language",)  # the parts that rows of text train


def parts_trained(method: TrainingRecipe) -> tuple[ModelPart, ...]:
    """The parts of a model that a training changes."""
    images: Images | None = getattr(method, "images", None)
    if images is None:
        return _TEXT
    return (*(images.trains or ()), *(() if images.language else ("language", "cross_attention")))


def weights_of_adapter(method: TrainingRecipe, shapes: Shapes) -> tuple[int, int]:
    """``adapter_weights`` of a training."""
    assert method.adapter
    is_quantized = method.quantization is not None
    return adapter_weights(method.adapter, shapes, is_quantized=is_quantized, trains=parts_trained(method))


def adapter_weights(
    adapter: Adapter, shapes: Shapes, *, is_quantized: bool = False, trains: Collection[ModelPart] = _TEXT
) -> tuple[int, int]:
    """Weights of an adapter on a model of these shapes: those that are trained, and those that are saved.

    Args:
        is_quantized: whether the base is held in few bits: the experts of a mixture then get no adapter.
        trains: parts of the model that are trained.

    Raises:
        ConfigError: a name of the adapter matches no layer of the model, a size does not fit one, or the model has
            none of the biases.
    """
    if adapter.bias is not None and shapes and not any(name.endswith(".bias") for name in shapes):
        raise ConfigError(f"adapter.bias={adapter.bias}: this model has no biases to train; set adapter.bias=null")
    modules = {name.rsplit(".", depth)[0] for name in shapes for depth in range(1, name.count(".") + 1)}
    ends = {*HEADS, *(name.rpartition(".")[2] for name in modules)}  # a head that is the embedding is in no file
    unknown = [each for each in adapter.saved_names if each.rpartition(".")[2] not in ends]
    if unknown and not any("expert" in name for name in shapes):  # which are loaded under other names
        raise no_module(adapter, unknown[0], modules)
    row = ADAPTERS[adapter.type]
    places = {name: _layer(shapes[f"{name}.weight"]) for name in _targets(adapter, shapes)}
    layers = list(places.values())
    require_sizes(adapter, [(name, *layer) for name, layer in places.items()])
    untouched = idle(shapes, trains)
    left = sum(row.trained(adapter, *layer) for name, layer in places.items() if f"{name}.weight" in untouched)
    trained = sum(row.trained(adapter, *layer) for layer in layers) - left
    frozen = left + sum(row.frozen(adapter, *layer) for layer in layers) + _buffers(adapter, shapes)
    if adapts_experts(adapter) and not is_quantized:
        trained += sum(_of_expert(adapter, name, shape) for name, shape in shapes.items() if _is_of_mixture(name))
    trained += _of_the_base(adapter, shapes)
    return trained, trained + frozen


def _is_of_mixture(name: str) -> bool:
    """Whether it is a layer of an expert or a router, which are loaded as parameters and not as linear layers."""
    return _EXPERT.search(name) is not None or name.endswith(_ROUTER)


def _of_expert(adapter: Adapter, name: str, shape: tuple[int, ...]) -> int:
    """Weights of an expert's adapter: two layers are loaded as one parameter, whose LoRA has twice the rank."""
    outputs, inputs = _layer(shape)
    is_half = name.split(".")[-2] in _HALVES
    return adapter.rank * (inputs + (2 * outputs if is_half else outputs))


def _buffers(adapter: Adapter, shapes: Shapes) -> int:
    """Numbers that are saved with the adapter but are not parameters: VeRA's two matrices, shared by all layers."""
    layers = [_layer(shapes[f"{name}.weight"]) for name in _targets(adapter, shapes)] if adapter.type == "vera" else []
    if not layers:
        return 0
    return adapter.rank * (max(rows for rows, _ in layers) + max(columns for _, columns in layers))


def percent_trained(method: TrainingRecipe, shapes: Shapes) -> float | None:
    """The share of the parameters that a training changes; None: all of them, or the shapes are not known."""
    if method.models[POLICY] == REWARD_HEAD:  # a head with one output in place of that over the vocabulary
        shapes = {name: shape for name, shape in shapes.items() if not name.startswith(HEADS)}
    weights = sum(map(math.prod, shapes.values()))
    if not weights:
        return None
    head = _width(shapes) if method.models[POLICY] == REWARD_HEAD else 0
    adapter = method.adapter
    if adapter:
        trained, saved = weights_of_adapter(method, shapes)
        in_place = _biases(adapter, shapes) if adapter.type != "ln_tuning" else 0
        beside = saved - _buffers(adapter, shapes) - in_place
        return 100 * (trained + head) / (weights + beside + 2 * head) if trained else None
    if method.freeze or set(parts_trained(method)) != {"language"}:
        frozen = _frozen_weights(method, shapes)
        return None if frozen is None else 100 * (1 - frozen / (weights + head))
    return None


def frozen_names(method: TrainingRecipe, shapes: Shapes) -> set[str]:
    """The names of the weights that a training without an adapter leaves as they are."""
    return idle(shapes, parts_trained(method)) | (method.freeze.frozen(shapes) if method.freeze else set())


def _frozen_weights(method: TrainingRecipe, shapes: Shapes) -> int | None:
    """How many weights are frozen; None: unknown, because parts of a mixture are loaded under other names."""
    try:
        return sum(math.prod(shapes[name]) for name in frozen_names(method, shapes))
    except ConfigError:
        if any("expert" in name for name in shapes):
            return None
        raise


def _layer(shape: tuple[int, ...]) -> tuple[int, int]:
    return (shape[0], shape[1] if len(shape) > 1 else 1)


def _targets(adapter: Adapter, shapes: Shapes) -> list[str]:
    """The names of the layers that get the adapter."""
    dimensions = 1 if adapter.type == "ln_tuning" else 2
    weights = [name for name, shape in shapes.items() if len(shape) == dimensions and name.endswith(".weight")]
    modules = [name for weight in weights if _can_be_target(name := weight.removesuffix(".weight"), adapter)]
    try:
        return targets(adapter, modules)
    except ConfigError:
        if any("expert" in name for name in shapes):  # their layers are loaded under other names
            return []
        raise


def _can_be_target(module: str, adapter: Adapter) -> bool:
    layer = module.rpartition(".")[2]
    if adapter.type == "ln_tuning":
        return "norm" in layer or layer.startswith("ln")
    if _is_of_mixture(f"{module}.weight"):
        return False
    return layer not in HEADS and not layer.startswith(NOT_LINEAR)


def _of_the_base(adapter: Adapter, shapes: Shapes) -> int:
    """Weights of the base that are trained, and saved with the adapter."""
    saved = {name for name in shapes if any(f".{module}." in f".{name}" for module in adapter.saved_names)}
    tokens = adapter.trainable_token_indices or ()
    return sum(math.prod(shapes[name]) for name in saved) + _biases(adapter, shapes) + len(tokens) * _width(shapes)


def _biases(adapter: Adapter, shapes: Shapes) -> int:
    """Biases of the base that are trained: in place, except those of ``ln_tuning``, which are copied."""
    names = [name for name in shapes if name.endswith(".bias")] if adapter.bias == "all" else []
    if adapter.bias == "lora_only" or adapter.type == "ln_tuning":
        names = [name for each in _targets(adapter, shapes) if (name := f"{each}.bias") in shapes]
    return sum(math.prod(shapes[name]) for name in names)


def _width(shapes: Shapes) -> int:
    """The size of the hidden states."""
    embeddings = [shape for name, shape in shapes.items() if "embed" in name or name.endswith("wte.weight")]
    return next((shape[-1] for shape in embeddings), 0)
