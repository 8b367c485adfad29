"""Micro batches of about equal tokens: ``resources.micro_batch_size=auto``.

A step's rows are divided over the workers and into micro batches by their tokens, not by their number: few long rows
or many short ones fill a GPU alike. The rows of a step, and so its gradient, stay the same; losses that are means over
the rows of a micro batch count by its share of the step's rows.
"""

import contextlib
import copy
import functools
import gc
import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.utils.data import DataLoader

from lineage.errors import NoMemoryError, PipelineError
from tasks.data.kinds import IGNORED, parts_of
from tasks.train.sharding import exchange, is_divided, local

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import Tensor
    from transformers import Trainer
    from transformers import Trainer as _Base

    from tasks.context import Resources

    Batch = dict[str, Tensor]
    Example = Mapping[str, Sequence[int]]

else:
    _Base = object  # of a class in front of trainers
logger = logging.getLogger(__name__)

_STEP = "micro_batches"  # the only key of the inputs that the trainer's loop passes on
_OF_TOKENS = ("mean_token_accuracy", "entropy")  # TRL's means over the trained tokens of a micro batch
_FILL = 0.92  # share of a GPU's free memory to use: the allocator leaves gaps

Division = list[list[list[int]]]  # micro batch -> worker -> indices of rows


@dataclass
class Budget:
    """How many tokens a forward pass takes at most.

    Args:
        tokens: at the start, from the estimate.
        most: what measuring may raise it to.
        measured: whether the first step corrects it.
    """

    tokens: int
    most: int
    measured: bool


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Collated rows of one worker.

    Args:
        tokens: of the worker with the most.
        rows, trained: number of rows of this worker, and of trained tokens of all workers.
    """

    batch: "Batch"
    tokens: int
    rows: int
    trained: int


def num_tokens(example: "Example", *, padded: bool) -> int:
    """Tokens that the layers process for an example; a prompt is processed once for all answers, unless ``padded``."""
    asked, answered = parts_of(example)
    prompt, answers = len(asked), [len(each) for each in answered]
    if not padded or not answers:
        return max(1, prompt + sum(answers))
    return max(1, len(answers) * (prompt + max(answers)))


def divide(tokens: Sequence[int], workers: int, budget: int, *, padded: bool = False) -> Division:
    """Divides the rows of a step: as few micro batches as the budget allows, of about equal tokens.

    Each worker has equally many rows in a micro batch, of about equal lengths, because trainers gather values by row.

    Args:
        tokens: of each row; their number is a multiple of ``workers``.
        budget: most tokens of a worker in a micro batch; a single longer row is a micro batch of its own.
        padded: whether rows are padded to the longest of their micro batch.
    """
    order = sorted(range(len(tokens)), key=lambda index: (-tokens[index], index))
    tiers = [order[start : start + workers] for start in range(0, len(order), workers)]
    tiers = [tier[::-1] if number % 2 else tier for number, tier in enumerate(tiers)]  # no worker has all the longest
    sizes = [max(tokens[index] for index in tier) for tier in tiers]
    groups = _filled(sizes, budget) if padded else _balanced(sizes, budget)
    return [[sorted(tiers[each][worker] for each in group) for worker in range(workers)] for group in groups]


def _balanced(sizes: Sequence[int], budget: int) -> list[list[int]]:
    """Groups with about equal sums: each size, the largest first, goes to the smallest group."""
    count = max(1, -(-sum(sizes) // budget))
    while True:
        groups, sums = [list[int]() for _ in range(count)], [0] * count
        for index, size in enumerate(sizes):
            smallest = min(range(count), key=sums.__getitem__)
            groups[smallest].append(index)
            sums[smallest] += size
        fits = all(total <= budget or len(group) == 1 for group, total in zip(groups, sums, strict=True))
        if fits or count == len(sizes):
            return [group for group in groups if group]
        count += 1


def _filled(sizes: Sequence[int], budget: int) -> list[list[int]]:
    """Groups of neighbours in a descending order, whose first size times their number is in the budget."""
    groups: list[list[int]] = []
    for index in range(len(sizes)):
        if groups and sizes[groups[-1][0]] * (len(groups[-1]) + 1) <= budget:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


@functools.cache
def by_tokens(trainer_class: Hashable) -> "type[Trainer]":
    """The trainer with micro batches of about equal tokens; ``start`` completes it."""
    assert isinstance(trainer_class, type)
    found = type(trainer_class.__name__, (_ByTokens, trainer_class), {"__module__": trainer_class.__module__})
    found.__qualname__ = trainer_class.__qualname__
    return found


def start(trainer: "Trainer", budget: Budget, global_batch_size: int, *, padded: bool) -> None:
    """Sets the budget of a trainer of ``by_tokens``.

    Args:
        padded: whether its forward processes padding.
    """
    assert isinstance(trainer, _ByTokens)
    trainer.budget, trainer.rows_per_step, trainer.is_padded = budget, global_batch_size, padded


class _Whole:
    """Keeps accelerate from walking through every token of a step's rows."""

    def __init__(self, examples: "list[Example]") -> None:
        self.examples = examples


class _ByTokens(_Base):
    """A base class in front of a trainer: a step is one batch of its loop, divided here."""

    budget: Budget
    rows_per_step: int
    is_padded: bool
    _proven = 0  # most tokens at once of a step that no worker ran out of memory in

    def get_train_dataloader(self) -> DataLoader:
        """Every worker reads all rows of a step, whose lengths decide which are its own."""
        return DataLoader(
            self.train_dataset,
            batch_size=self.rows_per_step,
            collate_fn=_Whole,
            num_workers=self.args.dataloader_num_workers,
            prefetch_factor=self.args.dataloader_prefetch_factor,
        )

    def get_batch_samples(
        self, epoch_iterator: "Iterator[_Whole]", num_batches: int, device: torch.device
    ) -> "tuple[list[dict[str, object]], Tensor | int | None]":
        """The step as one batch of transformers' loop."""
        assert num_batches == 1, "a step is one batch"
        self._correct()
        self._step_examples = next(epoch_iterator).examples
        return [{_STEP: self._divided(device)}], self._items_of_step

    def training_step(
        self, model: torch.nn.Module, inputs: "dict[str, list[MicroBatch]]", num_items_in_batch: object = None
    ) -> "Tensor":
        """Forward and backward of all micro batches; where memory is short, of smaller ones, from the start.

        Several workers agree before each exchange of a step with more tokens than any before, so that all repeat it.
        """
        micro_batches, is_exact = inputs[_STEP], torch.are_deterministic_algorithms_enabled()
        while True:
            before, reason = _State.of(self), ""
            largest = max(each.tokens for each in micro_batches)
            agrees = self.args.world_size > 1 and (is_exact or largest > self._proven) and not is_divided(model)
            try:
                with _agreeing(self.accelerator) if agrees else contextlib.nullcontext():
                    loss = self._all_micro_batches(model, micro_batches, agrees=agrees)
            except _OtherWorkerError as error:
                reason = str(error)
            except torch.OutOfMemoryError as error:
                if self.args.world_size > 1 and not agrees:
                    raise
                reason = str(error).partition(". ")[0]
                if agrees:
                    _agree(self.args.device, failed=True)
            # Outside of the handlers, whose traceback holds the activations.
            if not reason:
                if agrees:
                    exchange(each for each in self.model.parameters() if each.requires_grad)
                self._proven = max(self._proven, largest)
                return loss
            micro_batches = self._smaller(model, micro_batches, before, reason)

    def log(self, logs: dict[str, float], *args: object, **kwargs: object) -> None:
        """TRL averages over micro batches as if they had equal rows."""
        metrics = getattr(self, "_metrics", {}).get("train", {})
        for name, values in metrics.items():
            weights: list[int] = [each.trained if name in _OF_TOKENS else each.rows for each in self._divided_step]
            total = sum(weights)
            if isinstance(values, list) and len(values) == len(weights) > 1 and total:
                extreme = {"max": max, "min": min}.get(name.partition("_")[0])
                mean = sum(weight * value for weight, value in zip(weights, values, strict=True)) / total
                values[:] = [extreme(values) if extreme else mean]
        super().log(logs, *args, **kwargs)

    def _divided(self, device: torch.device) -> list[MicroBatch]:
        """The micro batches of this worker, through the trainer's own ``get_batch_samples``."""
        args, examples = self.args, self._step_examples
        tokens = [num_tokens(each, padded=self.is_padded) for each in examples]
        division = divide(tokens, args.world_size, self.budget.tokens, padded=self.is_padded)
        parts = [workers[args.process_index] for workers in division]
        collate = self.data_collator
        batches = [collate([examples[index] for index in part]) for part in parts]
        collected, self._items_of_step = super().get_batch_samples(iter(batches), len(batches), device)
        self._divided_step = [
            MicroBatch(
                batch=batch, rows=len(part),
                tokens=max(sum(tokens[index] for index in own) for own in workers),
                trained=sum(_trained(examples[index]) for own in workers for index in own) if len(parts) > 1 else 1,
            )
            for batch, part, workers in zip(collected, parts, division, strict=True)
        ]  # fmt: skip
        return self._divided_step

    def _all_micro_batches(
        self, model: torch.nn.Module, micro_batches: Sequence[MicroBatch], *, agrees: bool
    ) -> "Tensor":  # fmt: skip
        rows, losses = sum(each.rows for each in micro_batches), list[torch.Tensor]()
        for number, micro in enumerate(micro_batches, start=1):
            # A mean over the rows of a micro batch is divided by this: it counts by its share of the step.
            self.current_gradient_accumulation_steps = rows / micro.rows
            is_last = number == len(micro_batches)
            waits = contextlib.nullcontext() if is_last and not agrees else self.accelerator.no_sync(model)
            with waits:
                losses.append(super().training_step(model, micro.batch, self._items_of_step))
            if not is_last:
                self.callback_handler.on_substep_end(self.args, self.state, self.control)
        if agrees:
            _agree(self.args.device)
        return torch.stack(losses).sum()

    def _smaller(
        self, model: torch.nn.Module, micro_batches: Sequence[MicroBatch], before: "_State", reason: str
    ) -> list[MicroBatch]:
        """Halves the budget, as if the step had not been tried (PipelineError: a micro batch has one row already)."""
        largest, longest = max(each.tokens for each in micro_batches), max(each.rows for each in micro_batches)
        remedy = "set gradient_checkpointing=on, a smaller max_length, an adapter or quantization"
        if longest == 1:
            raise PipelineError(f"out of memory with one row of {largest} tokens ({reason}); {remedy}")
        model.zero_grad(set_to_none=True)
        before.restore(self)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self.budget.tokens = self.budget.most = max(1, min(largest, self.budget.tokens) // 2)
        logger.warning(
            "step=%d state=out_of_memory tokens_at_once=%d: halved to %d, and the step is repeated (%s)",
            self.state.global_step + 1, largest, self.budget.tokens, reason,
        )  # fmt: skip
        return self._divided(self.args.device)

    def _correct(self) -> None:
        """After the first step, sets the budget by the memory that its tokens took."""
        if not self.budget.measured or not getattr(self, "_divided_step", None):
            return
        self.budget.measured = False
        device, tokens = self.args.device, max(each.tokens for each in self._divided_step)
        trained = [each for each in self.model.parameters() if each.requires_grad]
        gradients = sum(local(each).numel() * each.element_size() for each in trained)
        held = torch.cuda.memory_allocated(device) + gradients
        per_token = max(1.0, (torch.cuda.max_memory_allocated(device) - held) / tokens)
        room = _FILL * (torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)) - held
        found = torch.tensor(max(1, min(self.budget.most, int(room / per_token))), device=device)
        if self.args.world_size > 1:
            torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MIN)
        before, self.budget.tokens = self.budget.tokens, int(found)
        logger.info("tokens_at_once=%d before=%d bytes_per_token=%d", self.budget.tokens, before, per_token)


class _OtherWorkerError(Exception):
    """Another worker ran out of memory."""


def _agree(device: torch.device, *, failed: bool = False) -> None:
    """Tells all workers whether this one ran out of memory, and learns it of the others.

    Raises:
        _OtherWorkerError: another one did.
    """
    found = torch.tensor(int(failed), device=device)
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
    if not failed and int(found):
        raise _OtherWorkerError("another worker ran out of memory")


@contextlib.contextmanager
def _agreeing(accelerator: "Accelerator") -> Iterator[None]:
    """Has workers agree before each exchange of values, for which one that has left its step would not come."""

    def after_agreement(exchange: Callable[..., object]) -> Callable[..., object]:
        def agreed(*args: object, **kwargs: object) -> object:
            _agree(accelerator.device)
            return exchange(*args, **kwargs)

        return agreed

    names = ("gather", "gather_for_metrics", "reduce", "pad_across_processes")
    for name in names:
        setattr(accelerator, name, after_agreement(getattr(accelerator, name)))
    try:
        yield
    finally:
        for name in names:
            delattr(accelerator, name)


@dataclass(frozen=True, kw_only=True)
class _State:
    """What a step changes before its weights: random generators and metrics."""

    cpu: "Tensor"
    cuda: "Tensor | None"
    metrics: object
    total_tokens: int
    counted: int

    @staticmethod
    def of(trainer: "_ByTokens") -> "_State":
        on_gpu = trainer.args.device.type == "cuda"
        return _State(
            cpu=torch.get_rng_state(), cuda=torch.cuda.get_rng_state() if on_gpu else None,
            metrics=copy.deepcopy(getattr(trainer, "_metrics", None)),
            total_tokens=getattr(trainer, "_total_train_tokens", 0), counted=len(getattr(trainer, "new_tokens", ())),
        )  # fmt: skip

    def restore(self, trainer: "_ByTokens") -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)
        if self.metrics is not None:
            trainer._metrics = self.metrics
        if hasattr(trainer, "_total_train_tokens"):
            trainer._total_train_tokens = self.total_tokens
        del getattr(trainer, "new_tokens", [])[self.counted :]


def _trained(example: "Example") -> int:
    labels = example.get("labels")
    if labels is None:
        return max(1, sum(len(each) for each in parts_of(example)[1]))
    return sum(int(label != IGNORED) for label in labels[1:])


@contextlib.contextmanager
def resuming_with_fewer(
    resources: "Resources", rows_at_once: Callable[[], int], of_rows: "Callable[[int], Resources]"
) -> Iterator[None]:  # fmt: skip
    """Under ``micro_batch_size=auto``: where a step cannot be repeated, the training resumes with fewer rows.

    So it is where completions are generated, in a loop of a method's own, and with ZeRO.

    Args:
        rows_at_once: rows of a forward pass.
        of_rows: the resources with at most so many.

    Raises:
        NoMemoryError: memory was short, and there are fewer rows to take.
        PipelineError: there are not.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        if resources.micro_batch_size != "auto":
            raise
        rows, reason = rows_at_once(), str(error).partition(". ")[0]
    else:
        return
    fewer = of_rows(rows // 2).micro_batch_size
    assert fewer != "auto"
    if fewer >= rows:
        raise PipelineError(
            f"out of memory with {rows} rows in a forward pass, the fewest ({reason}); set "
            "gradient_checkpointing=on, a smaller max_length, an adapter or quantization"
        )
    raise NoMemoryError(f"out of memory with {rows} rows in a forward pass ({reason})", fewer)
