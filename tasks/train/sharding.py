"""The division of a training over its workers: of weights, gradients and optimizer state; and their gradients' mean.

DeepSpeed's ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054, section 5) puts an engine of its own around the model.
FSDP2 (torch's ``fully_shard``; Zhao et al. 2023, arXiv:2304.11277) divides the weights themselves: each is a
``DTensor``, of which a worker holds rows, and a layer is gathered while it computes. Both train the same model as plain
data parallelism, up to the order of additions.
"""

import contextlib
import functools
import inspect
import math
import os
import pickle
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Literal, cast
from unittest import mock

from lineage.checkpoints import Checkpoint, Checkpoints
from lineage.errors import ArtifactError, ConfigError
from tasks.train.models.freeze import unread_by_text

if TYPE_CHECKING:
    from typing import TypeVar

    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn import Module, Parameter
    from torch.optim import Optimizer
    from transformers import PreTrainedModel, Trainer, TrainingArguments

    from tasks.context import Resources, Sharding, TrainContext
    from tasks.model.vision import Vision
    from tasks.recipe import TrainingRecipe

    T = TypeVar("T")
    _State = dict[str, dict[int, dict[str, Tensor]]]

STATE, OWN = "state.pt", "rank-{rank}.pt"  # files of a checkpoint: what workers share, and what differs
BUCKET_ELEMENTS = 50_000_000  # gradients in one all-reduce: 200 MB
_EXCHANGED = 2**24  # gradients of weights that are not divided, which workers exchange at once

_BY_ZERO = "ds_id"  # attribute of a weight that ZeRO-3 divides
_BELOW = "_posttrain_below"  # the weights of a model that gets an adapter before it is divided
_FORGET_BLANK = "_posttrain_forget_blank"  # a function, of a model whose tower reads blank images
_4_BITS, _ROUNDED = "Params4bit", "_posttrain_rounded"  # class of bitsandbytes; what it holds beside its bytes

Part = Literal["weights", "gradients", "optimizer"]


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A value of ``resources.sharding``.

    Args:
        divides: what a worker holds a part of.
        offloads: what of that is in the CPU's memory.
        about: when to choose it.
    """

    engine: Literal["deepspeed", "fsdp"] | None
    divides: tuple[Part, ...]
    about: str
    offloads: tuple[Part, ...] = ()
    zero_stage: int = 0


_ALL: tuple[Part, ...] = ("weights", "gradients", "optimizer")
_STATE: tuple[Part, ...] = ("gradients", "optimizer")
STRATEGIES: "Mapping[Sharding, Strategy]" = {
    "none": Strategy(engine=None, divides=(), about="the training fits into a worker"),
    "zero1": Strategy(
        engine="deepspeed", divides=("optimizer",), zero_stage=1,
        about="optimizer state alone does not fit; a step moves half as much again as without",
    ),
    "zero2": Strategy(
        engine="deepspeed", divides=_STATE, zero_stage=2,
        about="gradients do not fit either; each forward pass of a step adds up all gradients",
    ),
    "zero2_offload": Strategy(
        engine="deepspeed", divides=_STATE, offloads=("optimizer",), zero_stage=2,
        about="as zero2, with few GPUs and much memory of the CPU",
    ),
    "zero3": Strategy(
        engine="deepspeed", divides=_ALL, zero_stage=3, about="weights do not fit, and other tools expect DeepSpeed",
    ),
    "zero3_offload": Strategy(
        engine="deepspeed", divides=_ALL, offloads=("weights", "optimizer"), zero_stage=3,
        about="as zero3, with few GPUs and much memory of the CPU",
    ),
    "fsdp": Strategy(
        engine="fsdp", divides=_ALL, about="weights do not fit; offload=true: nor does a worker's part of them",
    ),
    "fsdp_grad": Strategy(
        engine="fsdp", divides=_STATE,
        about="weights fit whole from the forward to the backward pass, which then gathers nothing",
    ),
    "fsdp_hybrid": Strategy(
        engine="fsdp", divides=_ALL, about="several machines: within one they divide, across them they repeat",
    ),
}  # fmt: skip


def divided_over(resources: "Resources") -> int:
    """The number of workers that divide; the rest repeats what they hold."""
    if resources.sharding == "none":
        return 1
    return resources.num_workers // (resources.num_nodes if resources.sharding == "fsdp_hybrid" else 1)


def is_fsdp(resources: "Resources") -> bool:
    """Whether FSDP2 divides the weights."""
    return STRATEGIES[resources.sharding].engine == "fsdp"


def holds_parts(resources: "Resources") -> bool:
    """Whether a worker holds a part of the weights between steps."""
    return "weights" in STRATEGIES[resources.sharding].divides or is_fsdp(resources)


def zero_stage(resources: "Resources") -> int:
    """The stage of DeepSpeed's ZeRO; 0: another sharding."""
    return STRATEGIES[resources.sharding].zero_stage


def require_readable(checkpoint: Checkpoint, method: "TrainingRecipe", resources: "Resources") -> None:
    """Requires that the workers can resume from a checkpoint: each reads its own part of ZeRO's optimizer state.

    Raises:
        ConfigError: their number or ``sharding`` is not that of the workers that wrote it; or an earlier version wrote
            it, without what the method or FSDP2 reads.
    """
    is_earlier = not checkpoint.files.keys() & {STATE, OWN.format(rank=0)}
    reader = "this method" if method.keeps_state else "FSDP2"
    if is_earlier and (method.keeps_state or (is_fsdp(resources) and checkpoint.sharding is None)):
        raise ConfigError(
            f"its checkpoint of step {checkpoint.step} lacks {STATE}: an earlier version of posttrain wrote it, and "
            f"{reader} reads the state of a training in another form; finish the stage with that version"
        )
    wrote = (checkpoint.num_workers, checkpoint.sharding or ("zero2" if checkpoint.zero_stage else "none"))
    reads = (resources.num_workers, resources.sharding)
    if method.has_own_loop and wrote[1].startswith("fsdp") != is_fsdp(resources):
        raise ConfigError(
            f"its checkpoint of step {checkpoint.step} was written with sharding={wrote[1]}, and sharding={reads[1]} "
            "cannot resume from it: the optimizer of a method with a loop of its own has other groups of divided "
            f"weights than of whole ones; set sharding={wrote[1]}"
        )
    if wrote != reads and not checkpoint.can_move:
        raise ConfigError(
            f"its checkpoint of step {checkpoint.step} was written with num_workers={wrote[0]} and "
            f"sharding={wrote[1]} by an optimizer whose state is no division of its weights', and "
            f"num_workers={reads[0]} with sharding={reads[1]} cannot resume from it; "
            f"set num_workers={wrote[0]} and sharding={wrote[1]}"
        )
    if wrote != reads and any(each.startswith("zero") for each in (wrote[1], reads[1])):
        raise ConfigError(
            f"its checkpoint of step {checkpoint.step} was written with num_workers={wrote[0]} and "
            f"sharding={wrote[1]}, and num_workers={reads[0]} with sharding={reads[1]} cannot resume from it: "
            "ZeRO's optimizer state is read in the parts that it was written in; "
            f"set num_workers={wrote[0]} and sharding={wrote[1]}"
        )


# --- weights: FSDP2, and what ZeRO-3 starts from


class Shards:
    """The division of models by FSDP2; for ZeRO-3, of their weights until ``to_zero`` takes them.

    A weight is divided before it is read, so that a worker reads its own rows alone, and no worker holds a whole model.
    What must change whole weights first (an adapter that is merged, a rounded base) divides them afterwards.
    """

    def __init__(self, resources: "Resources") -> None:
        self.resources = resources

    @classmethod
    def of(cls, resources: "Resources") -> "Shards | None":
        return cls(resources) if holds_parts(resources) else None

    @property
    def mesh(self) -> "DeviceMesh":
        """Of all workers, or of an island's."""
        import torch

        group = torch.distributed.group.WORLD
        assert group
        inside = math.gcd(divided_over(self.resources), group.size())
        shape = (inside,) if inside == group.size() else (group.size() // inside, inside)
        return _mesh(self.resources.device, shape, group)

    @property
    def device(self) -> "torch.device":
        """Where a worker's part of the weights is."""
        import torch

        offloads = self.resources.offload or "weights" in STRATEGIES[self.resources.sharding].offloads
        on_gpu = self.resources.gpus_per_worker and not offloads
        return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    @contextlib.contextmanager
    def reading(self) -> "Iterator[dict[str, object]]":
        """Has ``from_pretrained`` read a worker's part of each weight: into a model that is divided while it has none.

        Yields:
            Further arguments of it.
        """
        from transformers import PreTrainedModel
        from transformers.distributed import DistributedConfig

        def prepared(config: object, device_map: object = None) -> "tuple[object, torch.device, SimpleNamespace]":
            return config, self.device, SimpleNamespace(get_mesh=lambda _names: self.mesh)

        def divided(model: "PreTrainedModel", *_: object) -> "PreTrainedModel":
            model.tie_weights()  # else a head that is the embedding would be gathered twice
            return self.divide(model)

        with (
            mock.patch.object(PreTrainedModel, "prepare_distribute_model", staticmethod(prepared)),
            mock.patch.object(PreTrainedModel, "maybe_distribute_model", staticmethod(divided)),
        ):
            yield {"distributed_config": DistributedConfig()}

    def divide(self, model: "PreTrainedModel", adapter: "Iterable[Parameter]" = ()) -> "PreTrainedModel":
        """Divides a model, with or without weights; for ZeRO-3 ``to_zero`` does so, once it is read.

        Its head for scores, if it has one, stays whole: it starts from random numbers, and has few. So do the scales of
        weights in few bits, which bitsandbytes finds on their module.

        Args:
            adapter: its weights, which stay whole.

        Raises:
            ConfigError: it has none of the layers that ``wrap`` names.
        """
        import torch
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        resources = self.resources
        if not is_fsdp(resources):
            return self._in_rows(model) if all(each.is_meta for each in model.parameters()) else model
        dtype = torch.bfloat16 if resources.reduce_dtype == "bf16" else None
        shared = {
            "mesh": self.mesh,
            "mp_policy": MixedPrecisionPolicy(reduce_dtype=dtype),
            "offload_policy": CPUOffloadPolicy(pin_memory=resources.gpus_per_worker > 0)
            if resources.offload
            else OffloadPolicy(),
        }
        _whole_adapters()
        shared_by_root = _tied(model)
        layers = [each for each in _layers(model, resources.wrap) if shared_by_root.isdisjoint(each.modules())]
        head, rounded = getattr(model, "score", None), _plain_bytes(model)
        shared["ignored_params"] = {*adapter, *(head.parameters() if head else ())}
        for each in reversed(dict.fromkeys([*layers, *_apart(model)])):
            fully_shard(each, reshard_after_forward=resources.sharding != "fsdp_grad", **shared)
        # The root is not divided again after the forward: a head reads its weights outside of any layer.
        fully_shard(model, reshard_after_forward=False, **shared)
        for module, weight in rounded.items():
            weight.quant_state.to(self.device)
            vars(module)[_ROUNDED], module.quant_state = weight.__getstate__(), weight.quant_state
        for place, each in enumerate(layers if resources.prefetch else ()):
            each.set_modules_to_forward_prefetch(layers[place + 1 : place + 1 + resources.prefetch])
            each.set_modules_to_backward_prefetch(layers[max(0, place - resources.prefetch) : place][::-1])
        model._is_distributed_loading_by_transformers = True  # transformers' trainer puts neither DDP nor FSDP on it
        return model

    def _in_rows(self, model: "PreTrainedModel") -> "PreTrainedModel":
        """Gives a model without weights a worker's rows of each; a head for scores stays whole, as in ``divide``."""
        import torch
        from torch.distributed.tensor import DTensor, Shard
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        _whole_adapters()
        head, known = getattr(model, "score", None), dict[int, torch.nn.Parameter]()  # tied weights are one
        for module in model.modules():
            for name, each in [*module._parameters.items()]:
                if each is None or module is head or not each.dim():
                    continue
                if id(each) not in known:
                    shape, _ = compute_local_shape_and_global_offset(each.shape, self.mesh, [Shard(0)])
                    rows = torch.empty(shape, dtype=each.dtype, device=each.device)
                    part = DTensor.from_local(rows, self.mesh, [Shard(0)], shape=each.shape, stride=each.stride())
                    known[id(each)] = torch.nn.Parameter(part, requires_grad=each.requires_grad)
                module._parameters[name] = known[id(each)]
        return model


def _whole_adapters() -> None:
    """PEFT would give an adapter the shape of a worker's rows, unless the mesh has one dimension, named fsdp."""
    vars(import_module("peft.tuners.tuners_utils"))["_torch_supports_distributed"] = False


def is_late(method: "TrainingRecipe", resources: "Resources") -> bool:
    """Whether a policy is divided once it has its adapter, which reads whole weights."""
    adapter = method.adapter
    return bool(adapter and Shards.of(resources) and (adapter.reads_whole or method.quantization))


def keep_whole(model: "PreTrainedModel", method: "TrainingRecipe", resources: "Resources") -> None:
    """Until ``divide_late``: transformers' trainer does not move the model, nor put DDP or FSDP on it."""
    if not (is_fsdp(resources) and is_late(method, resources)):
        return
    model._is_distributed_loading_by_transformers = True
    vars(model)[_BELOW] = {*model.parameters()}


def divide_late(model: "PreTrainedModel", resources: "Resources") -> None:
    """Divides a model of ``keep_whole``, which has an adapter now; no other."""
    if below := vars(model).pop(_BELOW, None):
        Shards(resources).divide(model, {*model.parameters()} - below)


def _plain_bytes(model: "PreTrainedModel") -> "dict[Module, Parameter]":
    """Has the layers of bitsandbytes hold their weights in 4 bits as plain bytes; layer -> the weights as they were."""
    import torch

    found = {each: each.weight for each in model.modules() if type(each._parameters.get("weight")).__name__ == _4_BITS}
    for module, weight in found.items():
        module._parameters["weight"] = torch.nn.Parameter(weight.data, requires_grad=False)
    return found


@functools.cache
def _mesh(device: str, shape: tuple[int, ...], _group: "ProcessGroup") -> "DeviceMesh":
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device, shape, mesh_dim_names=("repeated", "divided")[-len(shape) :])


def _layers(model: "PreTrainedModel", wrap: str | int | None) -> "list[Module]":
    """The modules that are gathered at once, in the order of the model."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    if isinstance(wrap, int):
        return list(_by_size(model, wrap))
    names = [each.strip() for each in wrap.split(",")] if wrap else list(model._no_split_modules or ())
    found = [each for each in model.modules() if type(each).__name__ in names]
    if wrap is None:
        return found or [each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)]
    missing = set(names) - {type(each).__name__ for each in found}
    if missing:
        known = ", ".join(sorted({type(each).__name__ for each in model.modules()}))
        raise ConfigError(
            f"wrap={wrap}: the model ({model.config.model_type}) has no layer of class {', '.join(sorted(missing))}; "
            f"it has: {known}; set one of them, a number of weights, or null"
        )
    return found


def _by_size(module: "Module", size: int) -> "Iterator[Module]":
    """The smallest modules that have at least ``size`` weights; lists of modules compute nothing themselves."""
    from torch.nn import ModuleDict, ModuleList

    for child in module.children():
        if sum(each.numel() for each in child.parameters()) >= size:
            below = list(_by_size(child, size))
            yield from below
            if not below and not isinstance(child, ModuleDict | ModuleList):
                yield child


def _tied(model: "PreTrainedModel") -> "set[Module]":
    """The embedding and the head, if they have one weight: only the root of both can gather it."""
    inputs, outputs, config = model.get_input_embeddings(), model.get_output_embeddings(), model.config
    if inputs is None or outputs is None:
        return set()
    tied = any(getattr(each, "tie_word_embeddings", False) for each in (config, config.get_text_config()))
    return {inputs, outputs} if outputs.weight is inputs.weight or tied else set()


def _apart(model: "PreTrainedModel") -> "list[Module]":
    """The embedding, unless the head reads it too: it is needed at both ends of a step alone."""
    inputs = model.get_input_embeddings()
    return [] if inputs is None or inputs in _tied(model) else [inputs]


def is_divided(model: object) -> bool:
    """Whether FSDP2 has divided a model, also one that now has an adapter."""
    return bool(getattr(model, "_is_fsdp_managed_module", False))


def is_by_zero(model: "Module") -> bool:
    """Whether ZeRO-3 has divided a model."""
    return any(hasattr(each, _BY_ZERO) for each in model.parameters())


def local(tensor: "Tensor") -> "Tensor":
    """This worker's part of a tensor; ZeRO-3 holds it apart, filled up to the length of the others'."""
    if hasattr(tensor, _BY_ZERO):
        part: Tensor = tensor.ds_tensor
        return part[: max(0, tensor.ds_numel - tensor.ds_zero_partition_rank * part.numel())]
    found: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


def gather_again(model: "Module") -> None:
    """Drops gathered weights, so that each parameter is this worker's part, and the next forward gathers new values."""
    for module in model.modules():
        if callable(getattr(module, "reshard", None)):
            module.reshard()


def through(model: "PreTrainedModel", compute: "Callable[[], T]") -> "T":
    """Calls a function of a model's submodules as the model's forward, in which FSDP2 gathers what they read."""
    if not is_divided(model):
        return compute()
    own = vars(model).get("forward")

    def forward() -> "T":
        restore()
        return compute()

    def restore() -> None:
        if own is not None:
            vars(model)["forward"] = own
        else:
            vars(model).pop("forward", None)

    vars(model)["forward"] = forward
    try:
        found: T = model()
    finally:
        restore()
    return found


@contextlib.contextmanager
def whole_head(model: "PreTrainedModel") -> "Iterator[None]":
    """Has what is behind a model's backbone whole on each worker, where ZeRO-3 has not taken its rows yet."""
    import torch

    inside, rows = {*model.base_model.modules()}, list[tuple[torch.nn.Module, str, torch.nn.Parameter]]()
    if not is_divided(model):
        for module in model.modules():
            if module not in inside:
                named = module._parameters.items()
                rows += [(module, name, each) for name, each in named if hasattr(each, "full_tensor")]
    for module, name, each in rows:
        whole = each.detach().to(each.device_mesh.device_type).full_tensor()
        module._parameters[name] = torch.nn.Parameter(whole, requires_grad=False)
    try:
        yield
    finally:
        for module, name, each in rows:
            module._parameters[name] = each


# --- FSDP2: steps, checkpoints and the output


def install(trainer: "Trainer") -> None:
    """Has transformers' trainer take steps with a divided model: gradients of whole weights, such as an adapter's, are
    exchanged once in a step, and those of divided ones in each micro batch, so that they stay divided."""
    if not is_divided(trainer.model):
        return
    step = trainer.training_step

    def stepped(*args: object, **kwargs: object) -> "Tensor":
        loss: Tensor = step(*args, **kwargs)
        if trainer.accelerator.sync_gradients:
            getattr(trainer.model, _FORGET_BLANK, lambda: None)()
            exchange(each for each in trainer.model.parameters() if each.requires_grad)
        return loss

    trainer.training_step = stepped
    trainer._defer_fsdp_gradient_reduction = contextlib.nullcontext
    trainer._sync_replicated_trainable_parameters = lambda _model: None  # its all-reduce is none of gloo's


def take_part(model: "PreTrainedModel", vision: "Vision | None", *, trains: bool) -> None:
    """Has a model's tower read a blank image where a batch has none, and adds 0 times what it makes of it.

    Workers gather the weights of a tower, and add up its gradients, at one time: one that has no image would not come.

    Args:
        vision: None: no row has images.
        trains: its tower or projector is trained; else only divided weights need this.
    """
    if vision is None or not (trains or is_divided(model)):
        return
    import torch

    backbone, is_blank, saw = model.base_model, list[bool](), set[bool]()
    known = inspect.signature(backbone.get_image_features).parameters
    blank = {name: each for name, each in vision.blank().items() if name in known}

    def begin(_backbone: "Module", _args: object, inputs: "Mapping[str, Tensor | None]") -> None:
        ids, has_images = inputs.get("input_ids"), inputs.get("pixel_values") is not None
        is_next = ids is not None and ids.shape[1] == 1  # a token of a completion, after its prompt with the images
        is_blank[:] = [not (has_images or is_next)]
        saw.add(has_images and torch.is_grad_enabled())

    def add(_embedding: "Module", _args: object, states: "Tensor") -> "Tensor":
        if not (is_blank and is_blank.pop()):
            return states
        found = backbone.get_image_features(**{name: each.to(states.device) for name, each in blank.items()})
        parts = _tensors((found.pooler_output, getattr(found, "deepstack_features", ())))
        nothing: Tensor = sum(each.flatten()[:0].sum() for each in parts)
        return states + nothing.to(states.dtype)

    def forget_blank() -> None:
        seen = torch.tensor(any(saw), device=model.device).int()
        torch.distributed.all_reduce(seen, torch.distributed.ReduceOp.MAX)
        parameters = {} if seen else dict(model.named_parameters())
        for name in unread_by_text(model) & parameters.keys():
            parameters[name].grad = None
        saw.clear()

    backbone.register_forward_pre_hook(begin, with_kwargs=True)
    # A batch with images runs the tower here too: workers gather in one order.
    model.get_input_embeddings().register_forward_hook(add)
    if is_divided(model):  # ``generate`` would run the tower before the forward, in which weights are gathered
        vars(model)["_prepare_multimodal_encoder_kwargs_for_generation"] = lambda inputs: inputs
    # In a step without images gradients would be 0 instead of none, and momentum move the tower's weights.
    vars(model)[_FORGET_BLANK] = forget_blank


def _tensors(found: object) -> "Iterator[Tensor]":
    if isinstance(found, Iterable):
        for each in found:
            yield from [each] if hasattr(each, "dim") else _tensors(each)


def exchange(trained: "Iterable[Parameter]") -> None:
    """Replaces each gradient by the mean over all workers, as DDP would; FSDP2 has done so for divided weights."""
    import torch
    from torch.distributed.tensor import DTensor

    whole, world_size = [each for each in trained if not isinstance(each, DTensor)], torch.distributed.get_world_size()
    if not whole:
        return
    is_there = torch.tensor([each.grad is not None for each in whole], device=whole[0].device).int()
    torch.distributed.all_reduce(is_there, torch.distributed.ReduceOp.MAX)
    with_gradient = [each for each, found in zip(whole, is_there.tolist(), strict=True) if found]
    parts, sizes = list[list[torch.nn.Parameter]](), list[int]()
    for each in with_gradient:
        if each.grad is None:
            each.grad = torch.zeros_like(each)
        if not parts or sizes[-1] + each.numel() > _EXCHANGED or parts[-1][0].grad.dtype != each.grad.dtype:
            parts.append([])
            sizes.append(0)
        parts[-1].append(each)
        sizes[-1] += each.numel()
    for part in parts:
        mean = torch.cat([each.grad.flatten() for each in part]) / world_size
        torch.distributed.all_reduce(mean)
        for each, own in zip(part, mean.split([each.numel() for each in part]), strict=True):
            each.grad.copy_(own.view_as(each))


def _whole(tensor: "Tensor", folder: Path | None) -> "Tensor | None":
    """A divided tensor in a file of a folder, on the worker that has one; one that is not divided as it is."""
    if hasattr(tensor, _BY_ZERO):
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters([tensor]):
            return in_file(tensor.data, folder) if folder else None
    if not hasattr(tensor, "full_tensor"):
        return tensor
    full: Tensor = tensor.full_tensor()
    return in_file(full, folder) if folder else None


def in_file(tensor: "Tensor", folder: Path) -> "Tensor":
    """A copy whose memory is a file without a name, which the system takes back where it needs memory."""
    import torch

    part = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    if not part.numel():
        return part.view(tensor.dtype).view(tensor.shape)
    with tempfile.NamedTemporaryFile(dir=folder, prefix="weight-") as file:
        file.write(part.numpy())  # a full disk raises here; written through the memory it would kill the process
        file.flush()
        copied: Tensor = torch.from_file(file.name, shared=True, size=part.numel(), dtype=torch.uint8)
    return copied.view(tensor.dtype).view(tensor.shape)


def in_parts(state: "Mapping[str, Tensor]", model: "Module") -> "dict[str, Tensor]":
    """A worker's part of the whole weights of a model."""
    like = model.state_dict()
    return {name: divided_as(each, like[name]) for name, each in state.items()}


def optimizer_in_parts(state: "_State", optimizer: "Optimizer") -> "_State":
    """A worker's part of the whole state of an optimizer, for each weight that is divided."""
    trained = [each for group in optimizer.param_groups for each in group["params"]]
    if not any(hasattr(each, "placements") for each in trained):
        return state
    for place, values in state["state"].items():
        for name, value in values.items():
            if getattr(value, "shape", None) == trained[place].shape:
                values[name] = divided_as(value, trained[place])
    return state


def divided_as(whole: "Tensor", like: "Tensor") -> "Tensor":
    """This worker's part of a whole tensor, if ``like`` is divided."""
    from torch.distributed.tensor import DTensor

    is_whole = isinstance(like, DTensor) and not isinstance(whole, DTensor)
    return as_part(_part_of(whole, like), like) if is_whole else whole


def as_part(part: "Tensor", like: "Tensor") -> "Tensor":
    """A worker's part of what is divided as ``like``; of a whole one, or of another shape, as it is."""
    from torch.distributed.tensor import DTensor

    if not isinstance(like, DTensor) or part.shape != like.to_local().shape:
        return part
    part = part.to(like.to_local().device, copy=True).contiguous()
    return DTensor.from_local(part, like.device_mesh, like.placements, shape=like.shape, stride=like.stride())


def _part_of(weights: "Tensor", like: "Tensor") -> "Tensor":
    """A worker's rows of a tensor, which may be in a file."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not hasattr(like, "placements"):
        return weights[...] if like.dim() else weights[:]
    shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    return weights[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]


def read_whole() -> None:
    """Has ``from_pretrained`` read whole models, also after a trainer of this process was set up for ZeRO-3.

    transformers would divide what it reads among all workers, and rank 0, which alone loads its output, wait for them.
    """
    if integration := sys.modules.get("transformers.integrations.deepspeed"):
        integration.unset_hf_deepspeed_config()


def whole_on_first(model: "Module", folder: Path, *, first: bool) -> None:
    """Makes a divided model whole on rank 0, weight by weight, in files of a folder; it can be trained no further."""
    import torch

    by_zero = is_by_zero(model)
    if not (by_zero or is_divided(model)):
        return
    read_whole()
    gather_again(model)
    known, parts = dict[int, torch.nn.Parameter | None](), list[torch.Tensor]()  # tied weights are one
    for module in model.modules():
        for name, each in [*module._parameters.items()]:
            if each is None or not (hasattr(each, "full_tensor") or hasattr(each, _BY_ZERO)):
                continue
            if id(each) not in known:
                full = _whole(each, folder if first else None)
                parts.append(each)
                known[id(each)] = None if full is None else _parameter(module, full, requires_grad=each.requires_grad)
            if first:
                module._parameters[name] = known[id(each)]
    _free(parts)
    if first:
        for module in model.modules():
            (_forget_zero if by_zero else _forget_fsdp)(module)
        model.to("cpu")


def _free(divided: "Iterable[Tensor]") -> None:
    """Frees this worker's parts of weights: an engine or an optimizer keeps them, beside the whole model."""
    for memory in [local(each).untyped_storage() for each in divided]:
        if memory.resizable():
            memory.resize_(0)


def _parameter(module: "Module", weights: "Tensor", *, requires_grad: bool) -> "Parameter":
    """A weight of a module; in 4 bits, as bitsandbytes had it."""
    import torch

    if name := vars(module).pop(_ROUNDED, None):
        from bitsandbytes.nn.modules import Params4bit

        found: torch.nn.Parameter = Params4bit.__new__(Params4bit)
        found.__setstate__({**name, "data": weights, "module": None})
        found.quant_state.to(weights.device)
        return found
    return torch.nn.Parameter(weights, requires_grad=requires_grad)


def _forget_zero(module: "Module") -> None:
    if type(module).__module__ == __name__:  # of ``to_zero``
        module.__class__ = type(module).__mro__[1]
    vars(module)["_parameters"] = {**module._parameters}
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, each in [*hooks.items()]:
            if each.__module__.startswith("deepspeed"):
                del hooks[key]
    # ``all_parameters`` is a method of the module: its copies would be freed by collections alone.
    own = ("pre_bwd_fn", "post_bwd_fn", "all_parameters", "_external_params", "_original_parameters")
    for name in [each for each in vars(module) if each.startswith(("ds_", "_ds_")) or each in own]:
        delattr(module, name)


def _forget_fsdp(module: "Module") -> None:
    from torch.distributed.fsdp import FSDPModule

    vars(module).pop("_is_fsdp_managed_module", None)
    vars(module).pop("_is_distributed_loading_by_transformers", None)
    if not isinstance(module, FSDPModule):
        return
    state = module._get_fsdp_state()
    handles = [state._pre_forward_hook_handle, state._post_forward_hook_handle]
    for group in state._fsdp_param_groups:
        handles += group._module_to_pre_save_state_dict_hook_handle.values()
        handles += group._module_to_pre_load_state_dict_hook_handle.values()
    for handle in handles:
        handle.remove()
    module.__class__ = type(module).__mro__[type(module)._orig_cls_mro_index]


# --- DeepSpeed


def zero_args(method: "TrainingRecipe", ctx: "TrainContext") -> dict[str, object]:
    """The trainer's arguments for ZeRO; empty without it.

    Raises:
        ConfigError: the checkpoint to resume from cannot be read.
    """
    resources = ctx.resources
    if ctx.resume_from:
        require_readable(Checkpoints.at(ctx.resume_from), method, resources)
    if not zero_stage(resources):
        leave_out_deepspeed()
        # A batch without images gives what reads them no gradient, for which the other workers would wait.
        has_images = getattr(method, "images", None) is not None
        return {"ddp_find_unused_parameters": True} if has_images and ctx.world_size > 1 else {}
    _bring_in(on_gpu=resources.gpus_per_worker > 0)
    # With bf16=True the trainer would have DeepSpeed keep the weights themselves in bf16.
    return {"deepspeed": zero_config(method, resources), "bf16": False}


def zero_config(method: "TrainingRecipe", resources: "Resources") -> dict[str, object]:
    """DeepSpeed's configuration. Nothing is "auto": transformers compares each number with the trainer's."""
    strategy = STRATEGIES[resources.sharding]
    offloads = {f"offload_{'param' if part == 'weights' else part}": {"device": "cpu"} for part in strategy.offloads}
    of_weights = {
        "stage3_gather_16bit_weights_on_model_save": True,
        "stage3_prefetch_bucket_size": resources.prefetch * BUCKET_ELEMENTS,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_reuse_distance": 0,  # else weights that are read again stay gathered: all of a small model
    }  # fmt: skip
    return {
        "train_batch_size": method.rows_of_island,
        "train_micro_batch_size_per_gpu": resources.micro_batch_size,
        "gradient_accumulation_steps": resources.accumulation_steps(method.global_batch_size),
        "gradient_clipping": method.max_grad_norm,
        "fp16": {"enabled": False},
        "bf16": {"enabled": False},
        "communication_data_type": resources.reduce_dtype,
        "zero_force_ds_cpu_optimizer": False,  # its own must be compiled
        # Autocast over fp32 weights, as without ZeRO; all-reduces stay in fp32 (no module is listed).
        "torch_autocast": {
            "enabled": method.precision == "bf16", "dtype": "bfloat16", "lower_precision_safe_modules": [],
        },
        "zero_optimization": {
            "stage": strategy.zero_stage,
            **offloads,
            **(of_weights if strategy.zero_stage == 3 else {}),
            "overlap_comm": False,  # deterministic
            "reduce_bucket_size": BUCKET_ELEMENTS,
            "allgather_bucket_size": BUCKET_ELEMENTS,
        },
    }  # fmt: skip


def to_zero(args: "TrainingArguments", *models: "Module | None") -> None:
    """Has ZeRO-3 divide models, weight by weight: what a worker has read of them are rows; nothing without ZeRO-3.

    DeepSpeed itself would divide models that each worker holds whole. Its linear layers forget a weight after the
    forward pass: torch's keep a view of it for the backward pass, and with that all weights of the model.
    """
    if not isinstance(args.deepspeed, dict) or args.deepspeed["zero_optimization"]["stage"] != 3:
        return
    import deepspeed
    import torch
    from deepspeed.runtime.zero.linear import zero3_linear_wrap
    from deepspeed.runtime.zero.partition_parameters import Init

    class Linear(torch.nn.Linear):
        def forward(self, inputs: "Tensor") -> "Tensor":
            return cast("Tensor", zero3_linear_wrap(inputs, self.weight, self.bias))

    deepspeed.init_distributed(auto_mpi_discovery=False)  # the group of the workers: else it counts one
    zero, known = Init(config_dict_or_path=args.deepspeed), dict[int, torch.nn.Parameter]()  # tied weights are one
    for module in (module for model in models if model is not None for module in model.modules()):
        if type(module) is torch.nn.Linear:
            module.__class__ = Linear
        for name, each in [*module._parameters.items()]:
            if each is None:
                continue
            if id(each) not in known:
                rows = each.detach().to(zero.local_device) if hasattr(each, "full_tensor") else None
                whole = each if rows is None else torch.nn.Parameter(rows.full_tensor(), each.requires_grad)
                zero._convert_to_zero_parameters([whole])
                known[id(each)] = whole
            module._parameters[name] = known[id(each)]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(zero.local_device)


def zero_weights(
    trainer: "Trainer", folder: Path, exclude_frozen_parameters: bool = False
) -> "dict[str, Tensor] | None":
    """The whole weights of a model that ZeRO-3 divides, in files of a folder; on rank 0, to which others give theirs.

    DeepSpeed's own method, whose argument this has, holds all of them in memory.
    """
    import torch

    engine, first = trainer.deepspeed, torch.distributed.get_rank() == 0
    named, known = dict(engine.module.named_parameters(remove_duplicate=False)), dict[int, torch.Tensor | None]()
    engine.optimizer.checkpoint_event_prologue()
    for each in named.values():
        if id(each) not in known and (each.requires_grad or not exclude_frozen_parameters):  # tied weights are one
            known[id(each)] = _whole(each, folder if first else None)
    engine.optimizer.checkpoint_event_epilogue()
    buffers = {name: each for name, each in engine.module.state_dict().items() if name not in named}
    weights = {name: known[id(each)] for name, each in named.items() if id(each) in known}
    return cast("dict[str, Tensor]", {**weights, **buffers}) if first else None


def autocast(args: "TrainingArguments") -> AbstractContextManager[None]:
    """Autocast for a model that is not called through DeepSpeed's engine, which casts only its own model."""
    if not isinstance(args.deepspeed, dict) or not args.deepspeed["torch_autocast"]["enabled"]:
        return contextlib.nullcontext()
    import torch

    cast: AbstractContextManager[None] = torch.autocast(args.device.type, dtype=torch.bfloat16)
    return cast


def name_accumulation(trainer: "Trainer") -> None:
    """Sets accelerate's accumulation to that of DeepSpeed's configuration: else it warns that they differ."""
    if trainer.args.deepspeed:
        trainer.accelerator.gradient_accumulation_steps = trainer.args.gradient_accumulation_steps


def leave_out_deepspeed() -> None:
    """Hides DeepSpeed from accelerate, which would import it (1.4 s) for a type check alone.

    ``None`` in ``sys.modules`` is Python's documented way to block an import.
    """
    sys.modules.setdefault("deepspeed", None)  # type: ignore[arg-type]


def _bring_in(*, on_gpu: bool) -> None:
    """Imports DeepSpeed without compiling its operators: ZeRO-2 needs none of them."""
    if not on_gpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    TorchCheckpointEngine.load = _load_plain  # its own method unpickles anything
    # All-reduces for inference through shared memory: compiling them takes 80 s at the start of a process group.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _load_plain(engine: object, path: str, map_location: object = None) -> object:
    """Loads a DeepSpeed checkpoint: only tensors, plain data, and the three classes that its own files contain.

    Raises:
        ArtifactError: the file names anything else, whose code could run when it is read.
    """
    import torch
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    try:
        with torch.serialization.safe_globals([LossScaler, ZeroStageEnum, fragment_address]):
            return torch.load(path, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        raise ArtifactError(
            f"{path} was not loaded: it names {named[1] if named else 'what is no tensor'}, and reading that could run "
            "code; tensors and plain data, as DeepSpeed writes them, are accepted; restore the file, or start again "
            "with restart=[STAGE]"
        ) from None
