"""Workers of one process group that live through several trainings: their start-up costs more than those."""

import ctypes
import gc
import multiprocessing
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

from lineage.checkpoints import Checkpoints
from lineage.errors import PipelineError, StoppedError
from tasks.context import Metrics, Resources, TrainContext
from tasks.method import Training
from tests import training

TRAINED_SECONDS = 300
Rows = list[list[str]]  # of each optimizer step


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One training: of which method, from which checkpoint, and after how many steps it is asked to stop.

    Args:
        only_first_sees: whether the listing of all checkpoints is empty for the other ranks, as NFS may have it.
    """

    stage: Training
    root: Path  # of the inputs
    folder: Path
    resources: Resources
    resume_step: int | None = None
    stop_after: int | None = None
    only_first_sees: bool = False
    weighs: bool = False  # whether memory is counted
    counts_sent: bool = False  # whether bytes sent are

    def context(self, reports: list[tuple[int, Metrics]], rank: int) -> TrainContext:
        checkpoints = self.folder / "checkpoints"
        seen = self.folder / "empty" if self.only_first_sees and rank else checkpoints
        return TrainContext(
            output_dir=self.folder / "output", work_dir=self.folder / "work", checkpoint_dir=seen,
            resources=self.resources, rank=rank, world_size=self.resources.num_workers,
            report=lambda step, metrics: reports.append((step, dict(metrics))),
            resume_from=Checkpoints(checkpoints).path(self.resume_step) if self.resume_step else None,
            # Asked at the end of a step, before its report.
            should_stop=lambda: self.stop_after is not None and len(reports) + 1 >= self._steps_left(),
        )  # fmt: skip

    def _steps_left(self) -> int:
        assert self.stop_after is not None
        return self.stop_after - (self.resume_step or 0)


@dataclass(frozen=True, kw_only=True)
class Done:
    """What one rank saw."""

    reports: list[tuple[int, Metrics]]
    rows: Rows
    torch_seed: int  # the last one set, or restored
    num_gradients: int = 0  # that the optimizer read in the last step
    num_gradient_storages: int = 0  # views of one bucket share its storage
    held: dict[str, int] = field(default_factory=dict)  # bytes of tensors of a divided model, at their peak
    bytes_exchanged: int = 0  # in all-reduces with other islands
    metrics: Metrics = field(default_factory=dict)  # of the whole training

    def metric(self, name: str) -> list[float]:
        return [metrics[name] for _, metrics in self.reports]


def train(asked: Asked, rank: int = 0) -> Done:
    """Trains as one rank, and notes which rows it reads at which step."""
    import torch

    if asked.resources.num_workers > 1 and not torch.distributed.is_initialized():  # as Ray Train does
        torch.distributed.init_process_group("gloo")
    reports: list[tuple[int, Metrics]] = []
    batches: list[list[str]] = []
    storages: list[int] = []
    held: dict[str, int] = {}
    exchanged: list[int] = []
    reduce = torch.distributed.all_reduce

    def counting(tensor: Any, *given: Any, **named: Any) -> Any:
        if named.get("group") is not None:
            exchanged.append(tensor.numel() * tensor.element_size())
        return reduce(tensor, *given, **named)

    noting = mock.patch("torch.distributed.all_reduce", counting)
    sent = _sending(held) if asked.counts_sent else nullcontext()
    with noting, _noted(batches, storages), _counted(held), training.one_thread(), _weighed(held, asked.weighs), sent:
        context, metrics = asked.context(reports, rank), dict[str, float]()
        try:
            metrics |= asked.stage.run(training.inputs(asked.root, asked.stage), context)
        except StoppedError:
            assert asked.stop_after is not None
    size = asked.resources.accumulation_steps(asked.stage.global_batch_size)
    # The loader reads one batch ahead: what it read for a step that never came is no row of a step.
    rows = [list(chain(*batches[step * size : (step + 1) * size])) for step in range(len(reports))]
    return Done(
        reports=reports, rows=rows, torch_seed=torch.initial_seed(),
        num_gradients=len(storages), num_gradient_storages=len(set(storages)), held=held,
        bytes_exchanged=sum(exchanged), metrics=metrics,
    )  # fmt: skip


@contextmanager
def zero_group(size: int) -> "Iterator[WorkerGroup]":
    """DeepSpeed stays in a process that has it once: these are of their own, and have no compiler."""
    with mock.patch.dict(os.environ, CXX="/nonexistent", PATH="/nonexistent"):
        group = WorkerGroup(size)
    yield group
    group.close()


class WorkerGroup:
    """``size`` processes joined by gloo."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("forkserver")  # that of the stages: it has imported all
        port = _free_port()
        self._ends, self._processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, size, port), daemon=True)
            process.start()
            self._ends.append(ours)
            self._processes.append(process)

    def train(self, asked: Asked) -> list[Done]:
        """What each rank saw; raises what the first that failed raised."""
        asked = replace(asked, resources=replace(asked.resources, num_workers=len(self._ends)))
        for end in self._ends:
            end.send(asked)
        answers = []
        for end in self._ends:
            assert end.poll(TRAINED_SECONDS), "a worker does not answer"
            answers.append(end.recv())
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def rows_of_steps(ranks: Sequence[Done]) -> Rows:
    """The rows of each optimizer step over all ranks, in no order."""
    return [sorted(chain(*parts)) for parts in zip(*(done.rows for done in ranks), strict=True)]


def _serve(end: Connection, rank: int, size: int, port: int) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    while True:
        try:
            asked = end.recv()
        except EOFError:  # who asked is gone
            return
        try:
            end.send(train(asked, rank))
        except PipelineError as error:
            end.send(error)
        except Exception as error:
            end.send(RuntimeError(f"rank {rank}: {type(error).__name__}: {error}"))
            raise


@contextmanager
def _weighed(held: dict[str, int], weighs: bool) -> Iterator[None]:
    """Counts the memory of this process alone, at its peak over that at the start.

    Pages of files are not counted: the system takes them back where it needs memory. What is freed is not counted
    either: it goes back at once.
    """
    if not weighs:
        yield
        return
    gc.collect()
    free_at_once()
    start, ended = own_memory(), threading.Event()

    def watch() -> None:
        while not ended.wait(0.002):
            held["own_memory"] = max(held.get("own_memory", 0), own_memory() - start)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _sending(held: dict[str, int]) -> AbstractContextManager[Any]:
    """Counts the bytes that this process sends; what it computes is freed by collections alone."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Sending(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            held["sent"] = held.get("sent", 0) + _sent(func, [*args, *(kwargs or {}).values(), found])
            return found

    return Sending()


def free_at_once() -> None:
    """Has this process give back what it frees: glibc would keep several times the memory of a model."""
    threshold = -3  # M_MMAP_THRESHOLD
    ctypes.CDLL(None).mallopt(threshold, 2**16)


def own_memory() -> int:
    """Bytes that the system cannot take back from this process: without pages of files."""
    found = dict(re.findall(r"^(RssAnon|RssShmem):\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE))
    return 1024 * sum(map(int, found.values()))


# Rings of the whole tensors that a collective sends: Rajbhandari et al. 2020, arXiv:1910.02054, section 7.
_RINGS = {
    "allreduce": 2, "all_reduce": 2, "allgather": 1, "all_gather": 1, "reduce_scatter": 1, "broadcast": 1,
}  # fmt: skip


def _sent(func: Any, values: Sequence[Any]) -> int:
    """Bytes that a worker sends in an operation that torch dispatches; of no collective 0.

    Args:
        values: what goes in and comes out.
    """
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import _resolve_process_group

    name = func._schema.name.partition("::")[2].lstrip("_")
    rings = next((each for start, each in _RINGS.items() if name.startswith(start)), 0)
    if func.namespace not in ("c10d", "_c10d_functional") or not rings:
        return 0
    names = (each.name for each in func._schema.arguments)
    group = next(value for each, value in zip(names, values, strict=False) if each in ("process_group", "group_name"))
    workers = (_resolve_process_group(group) if isinstance(group, str) else ProcessGroup.unbox(group)).size()
    whole = max(sum(each.nbytes for each in _tensors(value)) for value in values)
    return rings * whole * (workers - 1) // workers


def _tensors(found: Any) -> Iterator[Any]:
    import torch

    if isinstance(found, torch.Tensor):
        yield found
    elif isinstance(found, list | tuple):
        for each in found:
            yield from _tensors(each)


@contextmanager
def _noted(batches: list[list[str]], storages: list[int]) -> Iterator[None]:
    """Notes every batch that is collated, each row by its tokens, and where the last step's gradients lie."""
    from transformers import Trainer, TrainerCallback

    from tasks.train.run import TrainingRun
    from tasks.train.sharding import local

    class Storages(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            held = [local(each.grad) for each in kwargs["model"].parameters() if each.grad is not None]
            storages[:] = [each.untyped_storage().data_ptr() for each in held]

    fit = TrainingRun.fit

    def watched(run: TrainingRun, trainer: Trainer) -> Metrics:
        collate = trainer.data_collator

        def noting(examples: list[dict[str, Any]]) -> Any:
            batches.append([str(sorted(example.items())) for example in examples])
            return collate(examples)

        trainer.data_collator = noting
        trainer.add_callback(Storages())
        return fit(run, trainer)

    with mock.patch.object(TrainingRun, "fit", watched):
        yield


@contextmanager
def _counted(held: dict[str, int]) -> Iterator[None]:
    """Counts bytes under FSDP2: of weights and gradients whenever a layer is gathered or its gradients are exchanged,
    of the optimizer's state after each step, of what is sent, and of weights while the model is read."""
    import torch
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from transformers import Trainer

    from tasks.train.sharding import Shards, local

    groups: dict[int, Any] = {}
    unshard, reduce, divide, prepare = (
        FSDPParamGroup.unshard, FSDPParamGroup.post_backward, Shards.divide, Trainer._prepare_for_training,
    )  # fmt: skip

    def peak(name: str, count: int) -> None:
        held[name] = max(held.get(name, 0), count)

    def size(group: Any) -> int:
        return sum(each.sharded_param.numel() * each.sharded_param.element_size() for each in group.fsdp_params)

    def gathers(group: Any, async_op: bool = False) -> None:
        if not group.is_unsharded and group._all_gather_result is None:
            held["gathered_in_all"] = held.get("gathered_in_all", 0) + size(group)
        unshard(group, async_op)
        groups[id(group)] = group
        there = [each for each in groups.values() if each.is_unsharded or each._all_gather_result is not None]
        peak("gathered", sum(map(size, there)))

    def reduces(group: Any, *args: Any) -> None:
        # The gradient of a head that is the embedding waits in autograd until the embedding's joins it.
        roots = [each for each in groups.values() if not each._module_fqn]
        waiting = sum(map(size, roots)) if group not in roots else 0
        whole = [
            each._unsharded_param.grad for found in groups.values() for each in found.fsdp_params
            if hasattr(each, "_unsharded_param") and not (waiting and found in roots)
        ]  # fmt: skip
        own = [each.sharded_param.grad for found in groups.values() for each in found.fsdp_params]
        peak("gradients", waiting + sum(local(each).nbytes for each in (*whole, *own) if each is not None))
        reduce(group, *args)

    def divides(shards: Any, model: Any, *given: Any) -> Any:
        if all(each.is_meta for each in model.parameters()):
            held["divided_before_read"] = held.get("divided_before_read", 0) + 1
        return divide(shards, model, *given)

    def prepared(trainer: Any, *args: Any) -> Any:
        found = prepare(trainer, *args)
        step = trainer.optimizer.step

        def stepped(*given: Any, **more: Any) -> Any:
            done = step(*given, **more)
            states = [value for each in trainer.optimizer.state.values() for value in each.values()]
            peak("optimizer", sum(local(each).nbytes for each in states if isinstance(each, torch.Tensor)))
            peak("weights", sum(local(each).nbytes for each in trainer.model.parameters()))
            return done

        trainer.optimizer.step = stepped
        _count_zero(trainer.deepspeed, [*trainer.model.parameters()], peak)
        _count_plain(trainer, [*trainer.model.parameters()], peak)
        return found

    with (
        mock.patch.object(FSDPParamGroup, "unshard", gathers),
        mock.patch.object(FSDPParamGroup, "post_backward", reduces),
        mock.patch.object(Shards, "divide", divides),
        mock.patch.object(Trainer, "_prepare_for_training", prepared),
    ):
        yield


def _count_plain(trainer: Any, parameters: list[Any], peak: Callable[[str, int], None]) -> None:
    """Counts gradients of plain data parallelism: the buckets that workers exchange, and beside them those of passes
    that are not exchanged."""
    from torch.nn.parallel import DistributedDataParallel

    if not isinstance(trainer.model_wrapped, DistributedDataParallel):
        return
    compute, step, buckets = trainer.training_step, trainer.optimizer.step, dict[int, int]()

    def gradients() -> dict[int, int]:
        return _storages([each.grad for each in parameters])

    def computed(*given: Any, **more: Any) -> Any:
        loss = compute(*given, **more)
        peak("gradients", sum({**buckets, **gradients()}.values()))
        return loss

    def stepped(*given: Any, **more: Any) -> Any:
        buckets.update(gradients())
        return step(*given, **more)

    trainer.training_step, trainer.optimizer.step = computed, stepped


def _count_zero(engine: Any, parameters: list[Any], peak: Callable[[str, int], None]) -> None:
    """Counts what DeepSpeed's ZeRO holds before it exchanges gradients, and before it steps."""
    if engine is None:
        return
    zero = engine.optimizer
    trained = sum(4 * getattr(each, "ds_numel", each.numel()) for each in parameters if each.requires_grad)

    def weigh() -> None:
        peak("weights", sum(_storages([(each, getattr(each, "ds_tensor", None)) for each in parameters]).values()))

    def weighed(fetch: Any) -> Any:
        def fetching(*given: Any, **more: Any) -> None:
            fetch(*given, **more)
            weigh()

        return fetching

    def before(called: Any) -> Any:
        def counting(*given: Any, **more: Any) -> Any:
            buffers = [each.buffer for each in zero.ipg_buckets.values()]
            known = _storages(buffers)
            grads = [each.grad for each in parameters]
            kept = (
                "averaged_gradients", "all_grad_tensors", "grad_partitions_flat_buffer", "accumulated_grads_in_cpu",
            )  # fmt: skip
            parts = getattr(zero, "single_partition_of_fp32_groups", ())  # have gradients where these are offloaded
            own = [*(getattr(zero, name, None) for name in kept), [each.grad for each in parts]]
            apart = {place: size for place, size in _storages([grads, own]).items() if place not in known}
            peak("gradients", sum(apart.values()) + min(trained, sum(known.values())))
            weigh()
            copies = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")
            states = [*zero.optimizer.state.values(), *(getattr(zero, name, None) for name in copies)]
            peak("optimizer", sum(_storages(states).values()))
            return called(*given, **more)

        return counting

    for name in ("step", "average_tensor", "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads"):
        if hasattr(zero, name):
            setattr(zero, name, before(getattr(zero, name)))
    if hasattr(zero, "parameter_offload"):
        gathering = zero.parameter_offload.param_coordinator
        gathering.fetch_sub_module = weighed(gathering.fetch_sub_module)


def _storages(found: Any) -> dict[int, int]:
    """Address of each memory of nested tensors -> bytes."""
    import torch

    if isinstance(found, torch.Tensor):
        return {found.untyped_storage().data_ptr(): found.untyped_storage().nbytes()}
    parts = found.values() if isinstance(found, dict) else found if isinstance(found, list | tuple) else ()
    return {place: size for each in parts for place, size in _storages(each).items()}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
