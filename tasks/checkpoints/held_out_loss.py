"""A model's mean loss on the held-out rows of its own data, between two steps of its training."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from lineage.errors import DataError
from tasks.check_rows import POLICY, rows_slot
from tasks.data.preparing.row_split import HELD_OUT
from tasks.data.tokens.load_or_make import load_or_make
from tasks.steps.alive import Doing
from tasks.zero import autocast

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import Trainer

    from tasks.context import TrainContext
    from tasks.method import Inputs, Training


def held_out_rows(method: "Training", inputs: "Inputs", ctx: "TrainContext") -> "Dataset":
    """The tokens of the held-out rows, made as those that are trained on.

    Raises:
        DataError: there are none.
    """
    rows, stated = inputs[rows_slot(method)], method.tokenization()
    assert stated
    found = 0
    if (rows.path / HELD_OUT).exists():
        # A row that must not be trained on cut is only left out here.
        tokenization = replace(stated, too_long="drop") if stated.too_long == "refuse" else stated
        policy, workers = inputs[POLICY].path, ctx.resources.cpus_per_worker
        tokens = load_or_make(tokenization, rows, policy, ctx.cache_dir, workers, side=HELD_OUT)
        found = len(tokens)
    if not found:
        raise DataError(
            f"best.metric=held_out_loss: {rows.name!r} has no held-out row with a trained token; hold out rows "
            f"(stages.{rows.name}.method.held_out=0.05), or state best.metric=loss"
        )
    return tokens.dataset(range(found))


def held_out_loss(trainer: "Trainer", rows: "Dataset", ctx: "TrainContext") -> float:
    """The trainer's own loss, in nats per trained token, or per pair where rows are pairs; the same on all workers.

    Nothing that the training goes on with is touched: no weight, no random state, no metric.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=trainer.args.device)  # loss x weight, weight
    with _evaluating(trainer), torch.no_grad(), trainer.compute_loss_context_manager():
        for indices, counts in _batches(len(rows), ctx):
            ctx.mark(trainer.state.global_step, Doing.BETWEEN)
            batch = trainer._prepare_inputs(trainer.data_collator([rows[index] for index in indices]))
            with autocast(trainer.args):
                loss = trainer.compute_loss(trainer.model, batch)
            weight = (batch["labels"][:, 1:] != -100).sum() if "labels" in batch else len(indices)
            if counts:
                sums += torch.stack([loss.double() * weight, torch.as_tensor(weight, device=loss.device).double()])
    total, weight = trainer.accelerator.reduce(sums, "sum").tolist()
    return float(total / weight)


def _batches(num_rows: int, ctx: "TrainContext") -> Iterator[tuple[range, bool]]:
    """A worker's micro batches, and whether it is the one that counts them.

    The losses of TRL gather over the workers, so that all take the same number of rows at a time: what is left when
    the rows are divided is done by all of them.
    """
    size = ctx.resources.micro_batch_size
    per_round = ctx.world_size * size
    divided = num_rows - num_rows % per_round
    for start in range(ctx.rank * size, divided, per_round):
        yield range(start, start + size), True
    for start in range(divided, num_rows, size):
        yield range(start, min(start + size, num_rows)), ctx.rank == 0


@contextmanager
def _evaluating(trainer: "Trainer") -> Iterator[None]:
    devices = [trainer.args.device] if trainer.args.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        trainer.model.eval()
        try:
            yield
        finally:
            trainer.model.train()
            trainer._metrics["eval"].clear()
