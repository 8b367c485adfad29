"""The execution of a stage: resources, directories, reports. Nothing here may change the model."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Le

from lineage.checkpoints import Checkpoints
from lineage.errors import ConfigError
from tasks.train.best import KeepBest
from tasks.train.loop.heartbeat import Phase

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from tasks.train.optim.diloco import Islands

Metrics = Mapping[str, float]
Attention = Literal["auto", "sdpa", "flash_attention_2", "flash_attention_3", "eager"]
Dtype = Literal["fp32", "bf16"]
Precision = Literal["fp32", "bf16", "fp16", "fp8", "auto"]  # of a training; auto: see Resources.resolved_precision
Sharding = Literal[
    "none", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload", "fsdp", "fsdp_grad", "fsdp_hybrid"
]
Report = Callable[[int, Metrics], None]
_MOST_LOADERS = 4
AUTO_ROWS = 8  # rows of a forward pass under micro_batch_size=auto, where no tokens are counted


class Launcher(StrEnum):
    """Where a training stage runs."""

    AUTO = "auto"  # one worker: process; more: cluster
    PROCESS = "process"  # Ray Train's local mode, in a process of its own
    CLUSTER = "cluster"  # Ray workers: RAY_ADDRESS, or a cluster started here
    FOREGROUND = "foreground"  # Ray Train's local mode in the command's own process, for a debugger


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Resources of a stage. Not identity."""

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True}

    num_nodes: Annotated[int, Gt(0)] = 1  # machines of a Ray cluster that the workers run on
    num_workers: Annotated[int, Gt(0)] = 1  # over all nodes, each of which has an equal share
    min_workers: Annotated[int, Gt(0)] | None = None  # of a cluster that lost nodes; null: all workers are required
    gpu: str | None = None  # Ray's accelerator type that a worker's GPU must be of, such as H100; null: any
    wait_minutes: Annotated[float, Gt(0)] = 30.0  # minutes that a stage waits for the nodes of a cluster
    cpus_per_worker: Annotated[int, Gt(0)] = 2  # also the threads that torch may use, pinned
    gpus_per_worker: Annotated[int, Ge(0), Le(1)] = 0  # more would be DataParallel, with another global batch
    micro_batch_size: Annotated[int, Gt(0)] | Literal["auto"] = 8  # rows per worker in a forward pass; auto: by tokens
    launcher: Launcher = Launcher.AUTO  # auto: process for one worker, cluster (Ray) for more
    rows: Literal["auto", "local", "ray"] = "auto"  # Ray Data converts and tokenizes rows; auto: with RAY_ADDRESS
    sharding: Sharding = "none"  # what the workers divide among them: docs/sharding.md
    zero_stage: Literal[0, 2] = 0  # old name of sharding; 2: zero2
    offload: bool = False  # fsdp: weights, gradients and optimizer state are in the CPU's memory between their uses
    wrap: str | Annotated[int, Gt(0)] | None = None  # fsdp: classes or size of what is gathered at once; null: layers
    reduce_dtype: Dtype = "fp32"  # sharding: dtype of gradients while workers add them up
    prefetch: Annotated[int, Ge(0)] = 0  # sharding of weights: layers gathered ahead of their use
    timeout_minutes: Annotated[float, Gt(0)] | None = None  # a worker's longest wait for others; null: hang_minutes
    gpu_pool: str | None = None  # a global concurrency limit of Prefect that counts GPUs over several machines
    save_steps: Annotated[int, Gt(0)] | None = None  # optimizer steps between checkpoints
    save_epochs: Annotated[float, Gt(0)] | None = None  # epochs between checkpoints
    save_minutes: Annotated[float, Gt(0)] | None = 10.0  # minutes between checkpoints; all three may be set
    save_async: Literal["auto"] | bool = "auto"  # train on while a copy is written; auto: where memory holds a copy
    keep_last: Annotated[int, Gt(0)] = 2  # newest checkpoints to keep
    rollback: Literal["disk", "host", "device"] = "disk"  # where divergence_z finds the best model: see docs/survive.md
    checkpoint_mirror: str | None = None  # s3://BUCKET/PREFIX or another URL that gets a copy of each checkpoint
    keep_best: KeepBest | None = None  # best checkpoints to keep, also after the stage is finished
    max_failures: Annotated[int, Ge(0)] = 2  # retries after a lost worker, counted since the last checkpoint
    deterministic: Literal["auto"] | bool = "auto"  # equal trainings are bit-identical; auto: on CPUs, not on GPUs
    weights: Dtype | Literal["auto"] = "auto"  # dtype of frozen models: see frozen_dtype
    attention: Attention = "auto"  # auto: the fastest that is installed; see tasks.train.kernels.machine.attention_of
    gradient_checkpointing: Literal["off", "on"] | bool | Annotated[int, Gt(0)] = "off"  # N: every Nth layer
    compile: bool = False  # compile layers with torch.compile
    precompute_reference: bool = False  # compute the reference's log-probabilities once, into the store's cache
    liger: Literal["auto"] | bool = "auto"  # liger-kernel's layers; auto: see tasks.train.kernels.machine.uses_liger
    empty_cache_steps: Annotated[int, Gt(0)] | None = None  # steps between releases of unused GPU memory
    dataloader_workers: Annotated[int, Ge(0)] | Literal["auto"] = 0  # processes that collate ahead; auto: by CPUs
    prefetch_factor: Annotated[int, Gt(0)] | None = None  # batches that each of these holds ready; null: 2
    vllm_gpu_memory_utilization: Annotated[float, Gt(0), Le(1)] | None = None  # of vllm=colocate; null: 0.3
    vllm_enforce_eager: bool = False  # vllm=colocate without CUDA graphs: less memory, slower
    price_per_gpu_hour: Annotated[float, Ge(0)] | None = None  # for the plan's estimate; null: show no price
    currency: str = "USD"  # of the price
    watts_per_worker: Annotated[float, Gt(0)] | None = None  # mean power of a worker, for the plan's estimate of energy
    gpu_memory_gib: Annotated[float, Gt(0)] | None = None  # GiB of a GPU to plan for; null: that seen here
    check_memory: bool = True  # refuse a stage that does not fit into memory by the plan's estimate
    max_logp_difference: Annotated[float, Gt(0)] | None = 0.02  # nats: see docs/grpo.md; null: measure only
    max_dropped: Annotated[float, Ge(0), Le(1)] = 0.9  # largest share of a training's rows that may be dropped; 1: any
    hang_minutes: Annotated[float, Gt(0)] | None = 30.0  # minutes without a step after which a worker counts as hung

    def __post_init__(self) -> None:
        if isinstance(self.wrap, str) and not all(each.strip().isidentifier() for each in self.wrap.split(",")):
            raise ConfigError(
                f"wrap={self.wrap}: no class of layers is named so; classes separated by commas, such as "
                "LlamaDecoderLayer, a number of weights above 0, and null are accepted"
            )
        if not self.zero_stage:
            return
        if self.sharding not in ("none", "zero2"):
            raise ConfigError(
                f"zero_stage={self.zero_stage} is the old name of sharding=zero2, and sharding={self.sharding}: one of "
                "them is accepted; set zero_stage=0"
            )
        object.__setattr__(self, "sharding", "zero2")

    def sharded(self, sharding: Sharding, **changed: object) -> "Resources":
        """The same with another sharding."""
        return replace(self, sharding=sharding, zero_stage=0, **changed)  # type: ignore[arg-type]

    @property
    def on_cluster(self) -> bool:
        return self.launcher == Launcher.CLUSTER or (self.launcher == Launcher.AUTO and self.num_workers > 1)

    @property
    def rows_on_ray(self) -> bool:
        """Whether Ray Data converts and tokenizes rows, not processes of this machine."""
        return self.rows == "ray" or (self.rows == "auto" and bool(os.environ.get("RAY_ADDRESS")))

    @property
    def rows_at_once(self) -> int:
        """Rows of a forward pass where these are counted, such as in an evaluation."""
        return AUTO_ROWS if self.micro_batch_size == "auto" else self.micro_batch_size

    @property
    def num_loaders(self) -> int:
        """Processes that collate batches ahead; ``auto``: one for each further CPU of a worker, at most four."""
        chosen = self.dataloader_workers
        return min(_MOST_LOADERS, self.cpus_per_worker - 1) if chosen == "auto" else chosen

    @property
    def device(self) -> str:
        """The type of torch's device."""
        return "cuda" if self.gpus_per_worker else "cpu"

    def resolved_precision(self, precision: Precision) -> Precision:
        """The precision that ``auto`` selects: bf16 on a GPU, else fp32."""
        if precision != "auto":
            return precision
        return "bf16" if self.gpus_per_worker else "fp32"

    @property
    def is_deterministic(self) -> bool:
        """Whether kernels must be deterministic."""
        return self.gpus_per_worker == 0 if self.deterministic == "auto" else self.deterministic

    @property
    def checkpointed_layers(self) -> int | None:
        """N if activations of every Nth layer are recomputed in the backward pass; None: none."""
        chosen = self.gradient_checkpointing
        if isinstance(chosen, bool | str):
            return 1 if chosen in (True, "on") else None
        return chosen

    def frozen_dtype(self, precision: Precision | None) -> Dtype:
        """Dtype of frozen models: references, teachers, reward models, evaluated models, bases of adapters.

        Args:
            precision: of the training; None: nothing is trained. A base in bf16 computes in bf16, so ``auto`` uses fp32
                unless the training is in bf16.
        """
        if self.weights != "auto":
            return self.weights
        return "bf16" if self.gpus_per_worker and precision in ("bf16", None) else "fp32"

    def accumulation_steps(self, global_batch_size: int) -> int:
        """Micro batches per optimizer step, derived from the global batch of the recipe.

        Raises:
            ConfigError: the global batch is not divisible.
        """
        micro = 1 if self.micro_batch_size == "auto" else self.micro_batch_size
        rows = self.num_workers * micro
        if global_batch_size % rows:
            raise ConfigError(
                f"global_batch_size={global_batch_size} is not a multiple of {rows} "
                f"(num_workers={self.num_workers} x micro_batch_size={self.micro_batch_size}); "
                "change micro_batch_size or num_workers: neither is part of the recipe"
            )
        return global_batch_size // rows if self.micro_batch_size != "auto" else 1

    def of_batch(self, global_batch_size: int | None) -> "Resources":
        """The same with a smaller micro batch, where a worker has fewer rows of a step: that changes no model."""
        rows, more = divmod(global_batch_size or 0, self.num_workers)
        is_smaller = isinstance(self.micro_batch_size, int) and 0 < rows < self.micro_batch_size and not more
        return replace(self, micro_batch_size=rows) if is_smaller else self

    def divides(self, global_batch_size: int) -> bool:
        """Whether the workers' rows divide the global batch."""
        try:
            return self.accumulation_steps(global_batch_size) > 0
        except ConfigError:
            return False

    def of_rows(self, per_worker: int, most: int, multiple: int = 1) -> "Resources":
        """The same with a number of rows for ``auto``: the most that divide a worker's rows of a step.

        Args:
            per_worker: rows of a worker in a step.
            most: rows of a forward pass.
            multiple: what the number is a multiple of, such as the completions of a prompt.
        """
        if self.micro_batch_size != "auto":
            return self
        fitting = [size for size in range(multiple, per_worker + 1, multiple) if per_worker % size == 0]
        return replace(self, micro_batch_size=max((size for size in fitting if size <= most), default=multiple))


@dataclass(frozen=True, kw_only=True)
class TrainContext:
    """One worker's view of a running stage; by default outside a run, where nothing reads reports or requests a stop.

    Args:
        output_dir: directory of the artifact (``output/`` of the stage's directory).
        work_dir: scratch space, deleted at the end of the stage.
        report: ``report(step, metrics)``; every rank calls it, rank 0 records.
        cache_dir: shared cache of the store, such as for tokens; None: no cache.
        checkpoint_dir: directory of the checkpoints; None: no checkpoints.
        require_lease: raises if another run owns the stage's lock.
        resume_from: the verified checkpoint to resume from; None: start from step 0.
        should_stop: whether the stage was asked to save and stop.
        mark: ``mark(step, phase)``, the heartbeat, which every rank calls regularly (``report`` does too); a rank
            without a heartbeat for ``resources.hang_minutes`` counts as hung; step None: not started yet.
        part: ``part(what, done, of)``: how many rows of the work before the next report are done, for the screen.
        loaded: ``loaded(*slots)``: raises if models that were just loaded are not those of the plan, for these slots or
            all; what changes them later does not fail the stage.
        changed_models: slot -> the source of a model whose bytes are no longer those of the plan.
        islands: of ``method.diloco``, of which this worker's is torch's default group; None: there are none.
        most_rows: of a forward pass under ``micro_batch_size=auto``, after an attempt without memory.
        scorer: starts what scores checkpoints (``tasks.train.loop.evaluation.Scorer``); None: a process that sees the
            GPUs of this one.
    """

    output_dir: Path
    work_dir: Path
    resources: Resources = field(default_factory=Resources)
    rank: int = 0
    world_size: int = 1
    report: Report = lambda step, metrics: None
    cache_dir: Path | None = None
    checkpoint_dir: Path | None = None
    require_lease: Callable[[], None] = lambda: None
    resume_from: Path | None = None
    should_stop: Callable[[], bool] = lambda: False
    mark: Callable[[int | None, Phase], None] = lambda step, phase: None
    part: Callable[[str, int, int], None] = lambda what, done, of: None
    loaded: Callable[..., None] = lambda *slots: None
    changed_models: Callable[[], Mapping[str, str]] = dict
    islands: "Islands | None" = None
    most_rows: int | None = None
    scorer: Callable[..., object] | None = None

    @property
    def checkpoints(self) -> Checkpoints | None:
        """The checkpoints of the stage; None: it has none."""
        return Checkpoints(self.checkpoint_dir, self.require_lease) if self.checkpoint_dir else None

    @property
    def together(self) -> int:
        """The workers of torch's default group, which exchange gradients: all, or those of an island."""
        return self.islands.workers if self.islands else self.world_size

    @property
    def all_workers(self) -> "ProcessGroup | None":
        """Torch's group of all workers; None: it is the default group."""
        return self.islands.world if self.islands else None
