"""DiLoCo, islands that train apart and rarely synchronise: Douillard et al. 2023, arXiv:2311.08105, algorithm 1.

The workers are divided into islands, by rank. To the trainer, its island is all the workers that there are: batches,
losses, gradients, clipping and optimizer are the island's own. After each round of ``inner_steps`` steps the islands
send how far they have moved (outer weights minus their own), and an outer SGD with Nesterov momentum takes the mean as
its gradient. All islands resume from the new outer weights, each with its own optimizer state.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Gt, Lt

from lineage.fingerprint import Setting

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from transformers import Trainer


logger = logging.getLogger(__name__)

_BUCKET_ELEMENTS = 2**24  # weights that are sent at once
_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_ISLANDS = "islands"  # folder of the parts of all islands but the first
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True, kw_only=True)
class DiLoCo(Setting):
    """Islands of workers, each with an inner optimizer of its own, and an outer optimizer over them.

    ``global_batch_size`` counts the rows of all islands, so that a step trains as many tokens as without.

    Args:
        num_islands: among which the workers are divided; ``num_workers`` is a multiple of it.
        inner_steps: optimizer steps of an island from one synchronisation to the next; the last step always ends with
            one.
        outer_learning_rate, outer_momentum: of the Nesterov SGD on the mean of the islands' pseudo-gradients; 1 and 0
            make the output of a round the mean of the islands' weights.
        pseudo_gradient_dtype: in which they are sent and added up.
    """

    num_islands: Annotated[int, Gt(0)]
    inner_steps: Annotated[int, Gt(0)] = 100
    outer_learning_rate: Annotated[float, Gt(0)] = 0.7
    outer_momentum: Annotated[float, Ge(0), Lt(1)] = 0.9
    pseudo_gradient_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"

    def rounds(self, num_steps: int) -> int:
        """Synchronisations of a training; the last round may be shorter."""
        return math.ceil(num_steps / self.inner_steps)

    def traffic(self, num_trained: int, num_steps: int, num_workers: int) -> "Traffic":
        """What leaves an island in a training of ``num_steps`` steps, and what would with plain data parallelism.

        Args:
            num_trained: trained weights.
        """
        rounds = self.rounds(num_steps)
        return Traffic(
            dtype=self.pseudo_gradient_dtype, rounds=rounds, num_steps=num_steps,
            in_all={
                name: rounds * _of_all_reduce(num_trained * size, self.num_islands) for name, size in _BYTES.items()
            },
            data_parallel=num_steps * _of_all_reduce(num_trained * _BYTES["fp32"], num_workers),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that leave an island, besides about 1 kB of metrics and flags for each step.

    Args:
        dtype: of the pseudo-gradients. in_all: dtype -> bytes of all rounds.
        data_parallel: bytes in all, where all workers exchange fp32 gradients at each step.
    """

    dtype: str
    rounds: int
    num_steps: int
    in_all: Mapping[str, int]
    data_parallel: int

    def to_dict(self) -> dict[str, object]:
        """As in ``plan --json``."""
        return {
            "rounds": self.rounds, "bytes": self.in_all[self.dtype],
            "bytes_per_step": self.in_all[self.dtype] / self.num_steps, "bytes_by_dtype": dict(self.in_all),
            "data_parallel_bytes": self.data_parallel,
            "data_parallel_bytes_per_step": self.data_parallel / self.num_steps,
        }  # fmt: skip

    def __str__(self) -> str:
        others = ", ".join(f"{name} {_written(size)}" for name, size in self.in_all.items() if name != self.dtype)
        return (
            f"an island sends {_written(self.in_all[self.dtype])} in {self.rounds} rounds in {self.dtype} ({others}), "
            f"{_written(self.in_all[self.dtype] / self.num_steps)} per step; with plain data parallelism "
            f"{_written(self.data_parallel)}, {_written(self.data_parallel / self.num_steps)} per step"
        )


def _written(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.4g} GB"


def _of_all_reduce(num_bytes: int, parts: int) -> int:
    """Bytes that each of the parts sends in a ring: for the sums, and to hand them on."""
    return 2 * (parts - 1) * num_bytes // parts


class Islands:
    """The islands as one worker sees them, and the outer optimizer; ``divided`` makes its island the default group.

    Attributes:
        index: of its island. worker: its rank in there.
        world: the group of all workers; None: there is one.
        base_changed: whether an adapter's initialization changed the frozen weights too.
        trained: the weights that are exchanged, by name.
        part: the first rank of the island with this worker's part of the weights; 0: they are whole.
        exchanges: whether this worker does, for all of the island with its part.
        sent: bytes of pseudo-gradients that the island gave to all-reduces in the last round.
    """

    def __init__(self, setting: DiLoCo, rank: int, workers: int, *, base_changed: bool) -> None:
        self.setting, self.workers, self.base_changed = setting, workers, base_changed
        self.index, self.worker = divmod(rank, workers)
        self.world: ProcessGroup | None = None
        self.between: ProcessGroup | None = None  # the workers with this one's rank in their islands
        self.sent = self.part = 0
        self._repeating: ProcessGroup | None = None  # the workers of the island with this one's part
        self._outer, self._momentum = dict[str, "Tensor"](), dict[str, "Tensor"]()  # by name, in fp32 on the CPU

    def folder(self, directory: Path) -> Path:
        """The part of a directory that DeepSpeed writes or reads for this island: the first has no folder.

        It is two levels below, because transformers takes folders of a checkpoint with an adapter for more adapters.
        """
        return directory / _ISLANDS / str(self.index) if self.index else directory

    def own_rows(self, order: Sequence[int], at_once: int) -> list[int]:
        """Its share of the rows of each step or, where steps read the same, of each generation."""
        own = at_once // self.setting.num_islands
        first = self.index * own
        return [row for start in range(0, len(order), at_once) for row in order[start + first :][:own]]

    def sum(self, values: "Tensor") -> "Tensor":
        """The sum over the islands of what all workers of an island have."""
        if self.between is not None:
            import torch

            torch.distributed.all_reduce(values, group=self.between)
        return values

    def mean_log(self, logs: Mapping[str, float]) -> dict[str, float]:
        """The metrics of a step as means over the islands that have them."""
        if self.between is None:
            return dict(logs)
        import torch

        found: list[Mapping[str, float]] = [{}] * self.setting.num_islands
        torch.distributed.all_gather_object(found, dict(logs), group=self.between)
        names = sorted(set().union(*found))
        values = {name: [each[name] for each in found if name in each] for name in names}
        return {name: each[0] if len(set(each)) == 1 else fmean(each) for name, each in values.items()}

    # --- the outer optimizer

    def begin(self, trainer: "Trainer", *, is_resumed: bool) -> None:
        """Starts from the first worker's weights, unless ``load`` follows."""
        import torch

        self._trainer = trainer
        named = dict(trainer.model.named_parameters())
        self.trained = {name: each for name, each in named.items() if each.requires_grad}
        # FSDP2 repeats along the first dimension of its mesh, and divides along the last.
        mesh = next((each.device_mesh for each in self.trained.values() if hasattr(each, "device_mesh")), None)
        self._repeating = torch.distributed.group.WORLD if self.workers > 1 and mesh is None else None
        if mesh is not None:
            self.part = mesh.get_local_rank(mesh.ndim - 1)
            self._repeating = mesh.get_group(0) if mesh.ndim > 1 else None
        self.exchanges = self.worker == self.part
        if is_resumed:
            return
        for each in named.values():
            if self.world is not None and mesh is None and (each.requires_grad or self.base_changed):
                torch.distributed.broadcast(each.detach(), src=0, group=self.world)
        self._refresh_masters()
        if self.exchanges:
            self._outer = {name: _local(each).float().cpu().clone() for name, each in self.trained.items()}
            self._momentum = {name: torch.zeros_like(each) for name, each in self._outer.items()}

    def state(self) -> "dict[str, dict[str, Tensor]]":
        """What a checkpoint holds of this worker beside the shared state, which is that of the first island."""
        if not self.exchanges:
            return {}
        if self.index == 0:
            return {"outer": self._outer, "momentum": self._momentum}
        return {"weights": {name: _local(each) for name, each in self.trained.items()}}

    def load(self, first: "Mapping[str, Mapping[str, Tensor]]", own: "Mapping[str, Mapping[str, Tensor]]") -> None:
        """Args: first, own: states of the first island, and of this one, for the part of the model held here."""
        if self.exchanges:
            self._outer, self._momentum = dict(first["outer"]), dict(first["momentum"])
        for name, saved in own.get("weights", {}).items():
            _local(self.trained[name]).copy_(saved)

    def is_due(self, step: int, num_steps: int) -> bool:
        """Whether the islands synchronise after a step."""
        return step % self.setting.inner_steps == 0 or step == num_steps

    def synchronise(self) -> dict[str, float]:
        """An outer step, after which every island has the outer weights.

        Returns:
            Metrics: the norm of the mean pseudo-gradient, and what left this worker's island for it.
        """
        import torch

        self.sent = 0
        square = torch.zeros((), dtype=torch.float64)
        for names in self._buckets():
            weights = [_local(self.trained[name]) for name in names]
            sizes = [each.numel() for each in weights]
            if self.exchanges:
                outer, found = self._outer_step(names, torch.cat([each.float().flatten() for each in weights]))
                square += found
            else:
                outer = torch.empty(sum(sizes), device=weights[0].device)
            if self._repeating is not None:
                torch.distributed.broadcast(outer, group_src=0, group=self._repeating)
            for each, part in zip(weights, outer.split(sizes), strict=True):
                each.copy_(part.view_as(each))
        self._refresh_masters()
        if self.workers > 1:  # of an island
            both = torch.stack([square, torch.tensor(float(self.sent), dtype=torch.float64)])
            both = both.to(self._trainer.args.device)
            torch.distributed.all_reduce(both)
            square, self.sent = both[0], int(both[1])
        return {
            "diloco/outer_norm": float(square.sqrt()),
            "diloco/sent_mib": _of_all_reduce(self.sent, self.setting.num_islands) / 2**20,
        }

    def _outer_step(self, names: Sequence[str], inner: "Tensor") -> "tuple[Tensor, Tensor]":
        """The new outer weights of a bucket, and the square of the mean pseudo-gradient's norm."""
        import torch

        setting = self.setting
        outer, momentum = (
            torch.cat([state[name].flatten() for name in names]).to(inner.device)
            for state in (self._outer, self._momentum)
        )
        delta = (outer - inner).to(getattr(torch, _DTYPES[setting.pseudo_gradient_dtype]))
        if self.between is not None and delta.numel():
            torch.distributed.all_reduce(delta, group=self.between)
            self.sent += delta.numel() * delta.element_size()
        gradient = delta.float() / setting.num_islands
        momentum.mul_(setting.outer_momentum).add_(gradient)
        outer -= setting.outer_learning_rate * (gradient + setting.outer_momentum * momentum)
        for state, whole in ((self._outer, outer), (self._momentum, momentum)):
            for name, part in zip(names, whole.split([state[name].numel() for name in names]), strict=True):
                state[name].copy_(part.view_as(state[name]))
        return outer, gradient.double().square().sum().cpu()

    def _buckets(self) -> Iterator[list[str]]:
        names, size = list[str](), 0
        for name, each in self.trained.items():
            if names and size + each.numel() > _BUCKET_ELEMENTS:
                yield names
                names, size = [], 0
            names.append(name)
            size += each.numel()
        if names:
            yield names

    def _refresh_masters(self) -> None:
        """ZeRO's optimizer steps a copy of the weights, which must follow them."""
        refresh = getattr(getattr(self._trainer.model_wrapped, "optimizer", None), "refresh_fp32_params", None)
        if refresh is not None:
            refresh()

    def collect(self, draft: Path) -> None:
        """Moves what DeepSpeed wrote for the other islands into the draft of all."""
        (draft / _ISLANDS).mkdir()
        for index in map(str, range(1, self.setting.num_islands)):
            (draft.parent / _ISLANDS / index / draft.name).replace(draft / _ISLANDS / index)


@contextmanager
def divided(
    setting: DiLoCo | None, rank: int, world_size: int, *, base_changed: bool, timeout: timedelta
) -> Iterator[Islands | None]:
    """The islands of a training; inside, torch's default group is that of this worker's island.

    Args:
        base_changed: whether an adapter's initialization changed the frozen weights too.
        timeout: a worker's longest wait for others.
    """
    if setting is None:
        yield None
        return
    workers = world_size // setting.num_islands
    islands = Islands(setting, rank, workers, base_changed=base_changed)
    if world_size == 1:
        yield islands
        return
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    islands.world = world = dist.group.WORLD
    parts = [range(first, first + workers) for first in range(0, world_size, workers)]
    own = [dist.new_group(list(ranks), timeout=timeout) for ranks in parts][islands.index]
    between = [list(range(first, world_size, workers)) for first in range(workers)]
    islands.between = [dist.new_group(ranks, timeout=timeout) for ranks in between][islands.worker]
    logger.info("island=%d of %d workers=%d state=joined", islands.index, setting.num_islands, workers)
    # Libraries (accelerate, TRL, DDP, DeepSpeed, FSDP2) ask for the default group by many names: this sets all of them.
    distributed_c10d._update_default_pg(own)
    # A mesh of the default group finds its ranks by their numbers in there.
    distributed_c10d._world.pg_group_ranks[own] = {each: each for each in range(workers)}
    try:
        yield islands
    finally:
        distributed_c10d._update_default_pg(world)


def _local(weight: "Tensor") -> "Tensor":
    """The part of a weight that this worker holds, without its history."""
    found: Tensor = weight.detach()
    return found.to_local() if hasattr(found, "to_local") else found
