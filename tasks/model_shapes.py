"""The shapes of a model's weights, without reading them, and of an adapter on it."""

import json
from pathlib import Path

from tasks.method import ALL_LINEAR, LoRA

_FLOATS = ("F64", "F32", "F16", "BF16")
_NOT_LINEAR = ("embed", "wte", "wpe")  # two-dimensional too, and no layer that an adapter is put on
_HEADS = ("lm_head", "score")  # linear, and left out of all-linear

Shapes = dict[str, tuple[int, ...]]


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


def adapter_weights(adapter: LoRA, shapes: Shapes) -> int:
    """Two matrices beside each layer: rank x inputs and outputs x rank."""
    layers = [shape for name, shape in shapes.items() if len(shape) == 2 and _is_target(name, adapter)]
    return sum(adapter.rank * (rows + columns) for rows, columns in layers)


def _is_target(weight: str, adapter: LoRA) -> bool:
    layer = weight.removesuffix(".weight").rpartition(".")[2]
    if adapter.target_modules != ALL_LINEAR:
        return layer in adapter.target_names
    return layer not in _HEADS and not layer.startswith(_NOT_LINEAR)
