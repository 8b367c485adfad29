"""What a checkpoint holds, in memory and in files.

Tensors are in the safetensors form of ``torch.distributed.checkpoint``: each worker writes what it alone holds, and a
reader of another division takes its slices of all files. The rest of the state is in ``state.pt`` with a place for each
tensor, and what differs between workers in ``rank-R.pt``.
"""

import io
import json
import random
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from mmap import PAGESIZE
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypedDict, cast, runtime_checkable

import numpy as np
import psutil
import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor

from lineage.checkpoints import Checkpoint
from lineage.errors import ArtifactError
from lineage.filesystem.digest import file_names, write_digested
from tasks.train.sharding import OWN, STATE, local

if TYPE_CHECKING:
    from torch import Tensor

_OF_GROUPS = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs")  # of a schedule
_LARGE_BYTES = 2**26  # of a tensor that several threads copy
_CONTAINER = Path("/sys/fs/cgroup")


# --- the state of a training, divided into tensors and the rest

_PARTS = "DCP_SHARDING_INFO"  # of a file of parts: where each begins
_PLACE, _OWN_PLACE = "__tensor__", "__own_tensor__"
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


@runtime_checkable
class HasState(Protocol):
    """A trainer or callback with state of its own in each checkpoint, equal on all workers."""

    def saved_state(self) -> Mapping[str, object]: ...
    def load_saved_state(self, state: Mapping[str, object]) -> None: ...


@runtime_checkable
class HasOwnState(Protocol):
    """A trainer with state in each checkpoint that differs between workers.

    Where other workers resume, ``same`` is false, and the state is that of the first worker.
    """

    def own_state(self) -> Mapping[str, object]: ...
    def load_own_state(self, state: Mapping[str, object], *, same: bool) -> None: ...


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """What a checkpoint holds.

    Args:
        shared: nested dictionaries and lists, equal on all workers; divided tensors are ``DTensor``.
        own: of this worker alone.
        model: tensors that get a file of their own, under their own names.
        model_file: its name.
        parameters: name -> weight, by which a divided state of the optimizer is divided again.
        texts: file -> what renders it; called while the training continues.
        described: a directory of further files, which are copied.
        idle: the key of what stays as it is until ``Saver.copied`` is called; empty: nothing.
    """

    shared: Mapping[str, object]
    own: Mapping[str, object]
    model: "Mapping[str, Tensor]" = field(default_factory=dict)
    model_file: str = "model"
    parameters: "Mapping[str, Tensor]" = field(default_factory=dict)
    texts: Mapping[str, Callable[[], str]] = field(default_factory=dict)
    described: Path | None = None
    idle: str = ""


@dataclass
class Divided:
    """A state without its large tensors, and these by their paths.

    Args:
        in_one: leaves all tensors in the state, as copies.

    Attributes:
        tensors: equal on all workers, or divided.
        own: parts of a divided state in no form that could be divided in another way.
    """

    parameters: "Mapping[str, Tensor]"
    tensors: "dict[str, Tensor]" = field(default_factory=dict)
    own: "dict[str, Tensor]" = field(default_factory=dict)
    in_one: bool = False
    _paths: dict[tuple[object, ...], str] = field(default_factory=dict)

    def divide(self, state: object, *path: str) -> object:
        """The state with a place instead of each large tensor; small ones are copied."""
        if isinstance(state, torch.Tensor):
            return self._place(state, path)
        if isinstance(state, Mapping):
            return {key: self.divide(value, *path, str(key)) for key, value in state.items()}
        if type(state) in (list, tuple):
            items = [self.divide(value, *path, str(at)) for at, value in enumerate(cast(Sequence[object], state))]
            return items if isinstance(state, list) else tuple(items)
        return state

    def _place(self, tensor: "Tensor", path: tuple[str, ...]) -> object:
        is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
        is_large = not self.in_one and tensor.ndim and tensor.numel() and tensor.dtype in _DTYPES
        if not (is_large and (is_plain or isinstance(tensor, DTensor))):
            return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone().cpu()
        like = next((each for each in path if each in self.parameters), None)
        key = "/".join(path)
        if like and isinstance(self.parameters[like], DTensor) and not isinstance(tensor, DTensor):
            self.own[key] = tensor.detach().clone().cpu()
            return {_OWN_PLACE: key}
        if is_plain:  # tied weights are one tensor
            key = self._paths.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype), key)
        self.tensors[key] = tensor.detach()
        dtype = str(tensor.dtype).removeprefix("torch.")
        return {_PLACE: key, "shape": list(tensor.shape), "dtype": dtype}


def joined(
    state: object, parameters: "Mapping[str, Tensor]", own: "Mapping[str, Tensor]", found: "dict[str, Tensor]"
) -> object:
    """The state that ``divide`` took apart, with empty tensors, which ``found`` gets too, by path.

    Args:
        parameters: the weights in training: the state of one that is divided is divided in the same way.
    """
    if isinstance(state, Mapping) and _PLACE in state:
        place = cast("Mapping[str, object]", state)
        key, shape, dtype = str(place[_PLACE]), cast(list[int], place["shape"]), getattr(torch, str(place["dtype"]))
        if key not in found:
            like = next((parameters[each] for each in key.split("/") if each in parameters), None)
            is_divided = isinstance(like, DTensor) and list(like.shape) == shape
            found[key] = torch.zeros_like(cast(DTensor, like), dtype=dtype) if is_divided else _empty(shape, dtype)
        return found[key]
    if isinstance(state, Mapping) and _OWN_PLACE in state:
        return own[state[_OWN_PLACE]]
    if isinstance(state, Mapping):
        return {key: joined(value, parameters, own, found) for key, value in state.items()}
    if type(state) in (list, tuple):
        items = [joined(value, parameters, own, found) for value in cast(Sequence[object], state)]
        return items if isinstance(state, list) else tuple(items)
    return state


def _empty(shape: Sequence[int], dtype: torch.dtype) -> "Tensor":
    return torch.empty(tuple(shape), dtype=dtype)


def read_tensors(folder: Path, wanted: "Mapping[str, Tensor]") -> None:
    """Fills tensors by name from a checkpoint; of one that is divided over the workers, the part of this one.

    Each worker reads by itself: the workers need not meet.
    """
    from torch.distributed.checkpoint import DefaultLoadPlanner, HuggingFaceStorageReader, load

    if not wanted:
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        load(dict(wanted), storage_reader=HuggingFaceStorageReader(str(folder)), planner=planner, no_dist=True)


def divided_weights(folder: Path) -> "dict[str, Tensor]":
    """Tensors without values, as large as those of which each file of a checkpoint has a part; empty: none has."""
    sizes, dtypes = dict[str, list[int]](), {text: dtype for dtype, text in _DTYPES.items()}
    found = dict[str, torch.dtype]()
    for path in folder.glob("model-*-of-*.safetensors"):
        with safe_open(path, "pt") as file:
            offsets = json.loads((file.metadata() or {}).get(_PARTS, "{}"))
            for key, each in offsets.items():
                part = file.get_slice(key)
                ends = map(sum, zip(each["saved_offsets"], part.get_shape(), strict=True))
                sizes[key] = [*map(max, ends, sizes.get(key, [0] * len(part.get_shape())))]
                found[key] = dtypes[part.get_dtype()]
    return {key: torch.empty(size, dtype=found[key]) for key, size in sizes.items()}


def read_state(folder: Path, rank: int, parameters: "Mapping[str, Tensor] | None" = None) -> dict[str, object]:
    """The shared state of a checkpoint, with its tensors on the CPU or, if divided, where the weights are.

    Raises:
        ArtifactError: an earlier version wrote the checkpoint.
    """
    _require(folder, STATE)
    divided = torch.load(folder / STATE, map_location="cpu", weights_only=True)
    own = read_own(folder, rank).get("divided", {}) if own_file(folder, rank).exists() else {}
    found: dict[str, torch.Tensor] = {}
    state = joined(divided, parameters or {}, cast("dict[str, Tensor]", own), found)
    read_tensors(folder, found)
    return cast(dict[str, object], state)


def read_own(folder: Path, rank: int) -> dict[str, object]:
    """The state of one worker (ArtifactError: an earlier version wrote the checkpoint)."""
    _require(folder, OWN.format(rank=rank))
    found: dict[str, object] = torch.load(own_file(folder, rank), map_location="cpu", weights_only=True)
    return found


def _require(folder: Path, name: str) -> None:
    if not (folder / name).exists():
        raise ArtifactError(
            f"{folder} lacks {name}: an earlier version of posttrain wrote it, and this one reads the state of a "
            "training in another form; finish the stage with that version, or start again with restart=[STAGE]"
        )


def own_file(folder: Path, rank: int) -> Path:
    """What differs between workers, of one of them."""
    return folder / OWN.format(rank=rank)


def is_ours(folder: Path) -> bool:
    """Whether a checkpoint is in this form, not that of transformers or DeepSpeed."""
    return (folder / STATE).exists()


class RandomState(TypedDict):
    """State of all random generators, in types that ``torch.load`` reads without unpickling others."""

    python: tuple[int, tuple[int, ...], float | None]
    keys: list[int]  # of numpy's MT19937
    position: int
    has_gauss: int
    gauss: float
    torch: "torch.Tensor"
    cuda: "list[torch.Tensor]"


def random_state() -> RandomState:
    """The state of this process's random generators."""
    version, numbers, following = random.getstate()
    numpy = np.random.get_state(legacy=False)
    return {
        "python": (version, numbers, following),
        "keys": numpy["state"]["key"].tolist(),
        "position": int(numpy["state"]["pos"]),
        "has_gauss": int(numpy["has_gauss"]),
        "gauss": float(numpy["gauss"]),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_state(state: RandomState) -> None:
    """Sets all random generators of this process."""
    version, numbers, following = state["python"]
    random.setstate((version, tuple(numbers), following))
    keys = np.array(state["keys"], dtype=np.uint32)
    np.random.set_state(("MT19937", keys, state["position"], state["has_gauss"], state["gauss"]))
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])


class Stateful(Protocol):
    """What is saved and loaded: a model, an optimizer, a schedule."""

    def state_dict(self) -> Mapping[str, object]: ...
    def load_state_dict(self, state: Mapping[str, object]) -> object: ...


def named_state(optimizer: "torch.optim.Optimizer", names: Mapping[int, str]) -> dict[str, object]:
    """The state of an optimizer by the names of the weights: their numbers depend on the division.

    Args:
        names: ``id`` of a weight -> its name.
    """
    state = dict(optimizer.state_dict())
    if isinstance(state.get("state"), Mapping):
        order = _order(optimizer, names)
        state["state"] = {order.get(key, key): value for key, value in state["state"].items()}
        groups = cast("Sequence[_Group]", state["param_groups"])
        state["param_groups"] = [{**each, "params": [order.get(key, key) for key in each["params"]]} for each in groups]
    return state


def load_named_state(
    optimizer: "torch.optim.Optimizer", names: Mapping[int, str], state: Mapping[str, object]
) -> list[int]:
    """Loads what ``named_state`` returned; returns for each group the number of its saved one.

    Raises:
        ArtifactError: it has the state of a weight that the optimizer does not update, or other groups of weights.
    """
    found = list[int]()
    state, numbers = dict(state), {name: number for number, name in _order(optimizer, names).items()}
    of_weights = state.get("state")
    if isinstance(of_weights, Mapping):
        for name in of_weights:
            if isinstance(name, str) and name not in numbers:
                raise ArtifactError(
                    f"its checkpoint has the optimizer's state of {name}, which is not trained now; resume with the "
                    "code that wrote it, or start again with restart=[STAGE]"
                )
        state["state"] = {numbers.get(name, name): value for name, value in of_weights.items()}
        now = cast("Sequence[_Group]", optimizer.state_dict()["param_groups"])
        saved = cast("Sequence[_Group]", state["param_groups"])
        found = _saved_groups(saved, now, numbers)
        state["param_groups"] = [
            {**saved[index], "params": mine["params"]} for index, mine in zip(found, now, strict=True)
        ]
    optimizer.load_state_dict(state)
    return found


class _Group(TypedDict):
    """Of an optimizer, with its settings."""

    params: list[object]


def _saved_groups(saved: Sequence[_Group], now: Sequence[_Group], numbers: Mapping[str, object]) -> list[int]:
    """By their weights: transformers puts divided weights and those that are whole into groups of their own."""
    of = {numbers.get(str(name)): index for index, group in enumerate(saved) for name in group["params"]}
    if all(each in of for group in now for each in group["params"]):
        return [next((of[each] for each in group["params"]), 0) for group in now]
    if len(saved) == len(now):
        return list(range(len(now)))
    raise ArtifactError(
        f"its checkpoint has {len(saved)} groups of weights and the optimizer {len(now)}, and an earlier version did "
        "not save which weights are in which; resume with the sharding that wrote it, or start again with "
        "restart=[STAGE]"
    )


def schedule_of(groups: Sequence[int], state: Mapping[str, object]) -> dict[str, object]:
    """The saved state of a schedule for these saved groups of weights."""
    return {
        name: [cast("Sequence[object]", each)[index] for index in groups] if groups and name in _OF_GROUPS else each
        for name, each in state.items()
    }


def _order(optimizer: "torch.optim.Optimizer", names: Mapping[int, str]) -> dict[object, str]:
    """Number of each weight of the model in the optimizer -> its name."""
    weights = [each for group in optimizer.param_groups for each in group["params"]]
    return {number: names[id(each)] for number, each in enumerate(weights) if id(each) in names}


@dataclass(frozen=True, kw_only=True)
class InMemory:
    """The state of a step in memory: what a training goes back to without reading a disk.

    Args:
        divided: the shared state, without its tensors.
        tensors: this worker's part of these, and of the model's.
        own: as of ``Divided``.
    """

    step: int
    divided: object
    tensors: "Mapping[str, Tensor]"
    own: "Mapping[str, Tensor]"

    @classmethod
    def of(cls, step: int, state: TrainingState, *, on_device: bool) -> "InMemory":
        """A copy, where the tensors are or in the memory of the host."""
        rest = Divided(state.parameters)
        tree = rest.divide(state.shared)
        both = {**{f"/{key}": each for key, each in rest.tensors.items()}, **state.model}
        tensors = {
            key: local(each).clone() if on_device else local(each).to("cpu", copy=True) for key, each in both.items()
        }
        return cls(step=step, divided=tree, tensors=tensors, own=rest.own)

    def fill(self, model: "Mapping[str, Tensor]") -> None:
        """Writes the weights into those of a model."""
        for key, each in model.items():
            local(each).copy_(self.tensors[key])

    def state(self, parameters: "Mapping[str, Tensor]") -> dict[str, object]:
        """The shared state, as of ``read_state``."""
        found: dict[str, torch.Tensor] = {}
        state = joined(self.divided, parameters, self.own, found)
        for key, each in found.items():
            local(each).copy_(self.tensors[f"/{key}"])
        return cast(dict[str, object], state)


# --- the copy, and its files


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """This worker's part of a tensor, in host memory, and where it begins in the whole."""

    tensor: "Tensor"
    offsets: tuple[int, ...]


class Staging:
    """Copies of tensors in host memory, those of a file one behind the other, which the next checkpoint uses again."""

    def __init__(self) -> None:
        self.memory: dict[str, torch.Tensor] = {}
        self.left: list[tuple[torch.Tensor, torch.Tensor]] = []  # where to, and what

    def copies(self, name: str, chunks: Mapping[str, Chunk], idle: str = "") -> dict[str, Chunk]:
        """Copies of the chunks of a file; of those under ``idle``, on a CPU, once ``copy_left`` has run.

        One thread copies small ones: several would wait for each other for longer than a copy takes.
        """
        held, found, end = self._of_file(name, chunks), dict[str, Chunk](), 0
        for key, each in _in_order(chunks).items():
            start, end = end, end + each.tensor.nbytes
            place = held[start:end].view(each.tensor.dtype).view(each.tensor.shape)
            found[key] = replace(each, tensor=place)
        threads = torch.get_num_threads()
        try:
            for key, each in sorted(chunks.items(), key=lambda item: item[1].tensor.nbytes):
                if idle and key.startswith(f"{idle}/") and not each.tensor.is_cuda:
                    self.left.append((found[key].tensor, each.tensor))
                    continue
                torch.set_num_threads(threads if each.tensor.nbytes >= _LARGE_BYTES else 1)
                self.copy(found[key].tensor, each.tensor)
        finally:
            torch.set_num_threads(threads)
        return found

    def copy(self, place: "Tensor", tensor: "Tensor") -> None:
        place.copy_(tensor, non_blocking=tensor.is_cuda)

    def copy_left(self) -> None:
        """Copies what ``copies`` left, in this thread alone."""
        for place, tensor in self.left:
            np.copyto(np.asarray(_bytes(place)), np.asarray(_bytes(tensor)))
        self.left = []

    def _of_file(self, name: str, chunks: Mapping[str, Chunk]) -> "Tensor":
        """Memory for them that begins at a page, so that it is written as it is."""
        size = sum(each.tensor.nbytes for each in chunks.values()) + PAGESIZE
        held = self.memory.get(name)
        if held is None or len(held) != size:
            pinned = any(each.tensor.is_cuda for each in chunks.values())
            held = self.memory[name] = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        return held[-held.data_ptr() % PAGESIZE :]

    def fits(self, num_bytes: int) -> bool:
        """Whether copies of that size are there, or fit into the memory that is free."""
        held = sum(each.nbytes for each in self.memory.values())
        return bool(num_bytes - held <= _free_memory() // 2)


def _free_memory() -> int:
    free = int(psutil.virtual_memory().available)
    with suppress(OSError, ValueError):  # no container, or one without a limit
        kept = re.search(r"^inactive_file (\d+)", (_CONTAINER / "memory.stat").read_text(), re.MULTILINE)
        used = int((_CONTAINER / "memory.current").read_text()) - (
            int(kept[1]) if kept else 0
        )  # files are dropped first
        free = min(free, int((_CONTAINER / "memory.max").read_text()) - used)
    return free


def held_here(tensor: "Tensor", rank: int) -> Chunk | None:
    """The part of a tensor that this worker writes; None: another one writes it."""
    if not isinstance(tensor, DTensor):
        return None if rank else Chunk(tensor=tensor, offsets=(0,) * tensor.ndim)
    place = tensor.device_mesh.get_coordinate()
    if place is None or any(at and each.is_replicate() for at, each in zip(place, tensor.placements, strict=True)):
        return None
    [chunk] = tensor.__create_chunk_list__()
    local = tensor.to_local()
    return Chunk(tensor=local, offsets=tuple(chunk.offsets)) if local.numel() else None


def write_tensors(path: Path, chunks: Mapping[str, Chunk], *, is_part: bool) -> str:
    """Writes a safetensors file, and returns its SHA-256.

    Args:
        is_part: whether other files hold other parts of the tensors.
    """
    ordered = _in_order(chunks)
    offsets = {key: {"saved_offsets": list(each.offsets)} for key, each in ordered.items()}
    about = {"format": "pt", **({_PARTS: json.dumps(offsets)} if is_part else {})}
    header: dict[str, object] = {"__metadata__": about}
    end = 0
    for key, each in ordered.items():
        start, end = end, end + each.tensor.nbytes
        shape, dtype = list(each.tensor.shape), _DTYPES[each.tensor.dtype]
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % PAGESIZE)
    tensors = [each.tensor for each in ordered.values()]
    parts = [_as_one(tensors)] if _are_one(tensors) else map(_bytes, tensors)
    return write_digested(path, chain([len(text).to_bytes(8, "little") + text], parts))


def _in_order(chunks: Mapping[str, Chunk]) -> dict[str, Chunk]:
    """The widest first, so that each begins at a multiple of its width."""
    return dict(sorted(chunks.items(), key=lambda each: -each[1].tensor.element_size()))


def _are_one(tensors: "Sequence[Tensor]") -> bool:
    """Whether tensors lie one behind the other in one memory, as ``Staging`` has them."""
    memories = {each.untyped_storage().data_ptr() for each in tensors if each.device.type == "cpu"}
    ends = [each.data_ptr() + each.nbytes for each in tensors if each.is_contiguous()]
    return len(memories) == 1 and len(ends) == len(tensors) and ends[:-1] == [each.data_ptr() for each in tensors[1:]]


def _as_one(tensors: "Sequence[Tensor]") -> memoryview:
    memory = tensors[0].untyped_storage()
    start, size = tensors[0].data_ptr() - memory.data_ptr(), sum(each.nbytes for each in tensors)
    return _bytes(torch.empty(0, dtype=torch.uint8).set_(memory, start, (size,)))


def _bytes(tensor: "Tensor") -> memoryview:
    return memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


@dataclass(frozen=True, kw_only=True)
class Draft:
    """The files of a checkpoint that one worker writes."""

    folder: Path
    record: Checkpoint
    tensors: Mapping[str, Mapping[str, Chunk]]
    trees: Mapping[str, object]
    texts: Mapping[str, Callable[[], str]]
    described: Path | None
    is_divided: bool

    def write(self) -> dict[str, str]:
        """Writes them to the disk; file -> SHA-256."""
        digests = {}
        for name, chunks in self.tensors.items():
            digests[name] = write_tensors(self.folder / name, chunks, is_part=self.is_divided)
        for name, tree in self.trees.items():
            buffer = io.BytesIO()
            torch.save(tree, buffer)
            digests[name] = write_digested(self.folder / name, [buffer.getbuffer()])
        for name, render in self.texts.items():
            digests[name] = write_digested(self.folder / name, [render().encode()])
        for name in file_names(self.described) if self.described else ():
            (self.folder / name).parent.mkdir(exist_ok=True)
            digests[name] = write_digested(self.folder / name, [Path(self.described or "", name).read_bytes()])
        return digests
