"""What every training method shares: the arguments of its trainer, and running it."""

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from datasets import Dataset
from transformers import PrinterCallback
from trl import DPOTrainer

from lineage.checkpoints import Checkpoints
from lineage.errors import ConfigError, PipelineError, StoppedError
from tasks.best import HELD_OUT_LOSS, Best
from tasks.train.callbacks import NewRandomState, Recorder, StepMarks, TokenCount, summary
from tasks.train.checkpointing import BestModel, Checkpointing, Divergence, discard_drafts, held_out_rows
from tasks.train.quantization import step_in_fp32
from tasks.train.sharding import autocast, name_accumulation, zero_args

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback

    from tasks.context import TrainContext
    from tasks.data.tokens.tokenized_rows import TokenizedRows
    from tasks.method import Inputs, Training


logger = logging.getLogger(__name__)

# Transformers' own "constant" has no warmup.
_REFUSED = "does not have a deterministic implementation"  # what torch says of an operation that has none
SCHEDULES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}


def trainer_args(method: "Training", ctx: "TrainContext") -> dict[str, object]:
    """Arguments that every TRL config takes: identity from ``method``, execution from ``ctx``.

    Raises:
        ConfigError: the global batch does not divide, or the workers are not those of ``resources``.
    """
    resources = ctx.resources
    if ctx.world_size != resources.num_workers:
        raise ConfigError(
            f"{ctx.world_size} workers were started and resources.num_workers={resources.num_workers}; "
            "the global batch is derived from the latter, so the two must agree"
        )
    on_gpu = resources.gpus_per_worker > 0
    return {
        "output_dir": str(ctx.work_dir),
        "per_device_train_batch_size": resources.micro_batch_size,
        "gradient_accumulation_steps": resources.accumulation_steps(method.global_batch_size),
        "max_steps": method.num_steps,
        "learning_rate": method.learning_rate,
        "lr_scheduler_type": SCHEDULES[method.lr_schedule],
        "warmup_steps": method.warmup_ratio,  # below 1, transformers 5 takes it for a ratio
        "weight_decay": method.weight_decay,
        "max_grad_norm": method.max_grad_norm,
        "seed": method.seed,
        "bf16": method.precision == "bf16",
        "use_cpu": not on_gpu,
        # Trades time for memory, the same numbers: needed where models fill a GPU, a loss elsewhere.
        "gradient_checkpointing": on_gpu,
        "dataloader_pin_memory": on_gpu,
        "train_sampling_strategy": "sequential",  # the dataset stands in the order of training
        "max_length": None,  # rows are cut before, and counted
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **zero_args(method, ctx),
    }


def ordered(rows: "TokenizedRows", method: "Training") -> Dataset:
    """Exactly the rows that training consumes, in their one order."""
    return rows.dataset(row_order(len(rows), method.num_steps * method.global_batch_size, method.seed))


def fit(method: "Training", trainer: "Trainer", inputs: "Inputs", ctx: "TrainContext") -> dict[str, float]:
    """Trains to the last step, reporting each; a trainer that is already there is not stepped again.

    The trainer ends with the weights that are the stage's output: of the last step, or of the best.

    Returns:
        Final metrics: ``loss`` and TRL's metrics as means of the last steps, ``steps``, ``num_tokens``,
        ``train_seconds`` (of all attempts), ``tokens_per_second``; where the best model is the output, its
        ``best_step``, of which the means then are; where it ended early, ``diverged_at_step``.

    Raises:
        StoppedError: it was asked to end before its last step; a checkpoint of the step before is committed.
        PipelineError: its loss is no number, or an operation adds in no fixed order, which ``deterministic`` forbids.
        DataError: the best model is to be found on held-out rows, and there are none.
    """
    step_in_fp32(trainer.model)
    name_accumulation(trainer)
    before = _seconds_before(ctx)
    start = time.perf_counter()
    best = _best_model(method, trainer, inputs, ctx)
    divergence = Divergence(ctx.checkpoint_dir, best if method.on_divergence == "best" else None)
    if trainer.state.global_step < trainer.args.max_steps:
        try:
            with adding_in_one_order(ctx.resources.deterministic):
                _train(trainer, ctx, [*([best] if best else []), divergence], method.best, before)
        except Exception:
            if ctx.rank == 0:  # another worker that fails says nothing of what this one writes
                discard_drafts(ctx.work_dir)
            raise
    else:
        logger.info("steps=%d state=finished nothing left to train", trainer.state.global_step)
    step, notes = trainer.state.global_step, dict[str, float]()
    if best and (method.output == "best" or divergence.step is not None):
        step = best.end_at_best()
        notes["best_step"] = float(step)
    if divergence.step is not None:
        notes["diverged_at_step"] = float(divergence.step)
    return {**summary(trainer.state, before + time.perf_counter() - start, step), **notes}


def _best_model(method: "Training", trainer: "Trainer", inputs: "Inputs", ctx: "TrainContext") -> BestModel | None:
    if method.best is None:
        return None
    rows = held_out_rows(method, inputs, ctx) if method.best.metric == HELD_OUT_LOSS else None
    return BestModel(trainer, method.best, ctx, rows)


def _train(
    trainer: "Trainer",
    ctx: "TrainContext",
    watching: Sequence["TrainerCallback"],
    best: Best | None,
    seconds_before: float,
) -> None:
    checkpointing = Checkpointing(trainer, ctx, best, seconds_before)
    trainer.remove_callback(PrinterCallback)
    # Reports come after what is measured for them, checkpoints after what is decided of them.
    for callback in (NewRandomState(ctx), TokenCount(trainer), *watching, Recorder(ctx), StepMarks(ctx), checkpointing):
        trainer.add_callback(callback)
    if ctx.resume_from:
        logger.info("checkpoint=%s state=resumed", ctx.resume_from)
    trainer.train(resume_from_checkpoint=str(ctx.resume_from) if ctx.resume_from else None)
    if checkpointing.stopped_at is not None:
        raise StoppedError(f"stopped at step {checkpointing.stopped_at} of {trainer.args.max_steps}")


def _seconds_before(ctx: "TrainContext") -> float:
    """Of the attempts that the checkpoint comes from."""
    if ctx.resume_from is None:
        return 0.0
    return Checkpoints.at(ctx.resume_from).train_seconds


def row_order(num_rows: int, num_samples: int, seed: int) -> list[int]:
    """Indices of the rows in the order of training: a fresh permutation per epoch, cut to ``num_samples``.

    It depends on nothing but its arguments, so that micro batch, accumulation and workers all split the
    same list. For the first epoch it is what transformers' Trainer draws by default
    (``SeedableRandomSampler``: epoch e is seeded with ``seed + e``), so a plain script with the same seed
    sees the same rows at the same steps.
    """
    order: list[int] = []
    epoch = 0
    while len(order) < num_samples:
        generator = torch.Generator().manual_seed(seed + epoch)
        order += torch.randperm(num_rows, generator=generator).tolist()
        epoch += 1
    return order[:num_samples]


@contextlib.contextmanager
def adding_in_one_order(wanted: bool) -> Iterator[None]:
    """Has torch take its deterministic kernels meanwhile, as the backward pass of attention on a GPU has.

    cuBLAS needs ``CUBLAS_WORKSPACE_CONFIG`` for it, which a stage's process is started with.

    Raises:
        PipelineError: an operation has no such kernel.
    """
    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(wanted)
    # It takes time, for memory that is written before it is read.
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    except RuntimeError as error:
        if _REFUSED not in str(error):
            raise
        operation = str(error).partition(_REFUSED)[0].strip()
        raise PipelineError(
            f"{operation} adds in no fixed order, so that a run that was interrupted would end with other weights than "
            "one that was not; resources.deterministic=false trains with it all the same"
        ) from error
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
        torch.utils.deterministic.fill_uninitialized_memory = fills


class TokenizedDPOTrainer(DPOTrainer):
    """``DPOTrainer`` that takes ``prompt_ids``, ``chosen_ids`` and ``rejected_ids``: TRL would tokenize, and drop."""

    def _prepare_dataset(self, dataset: Dataset, *args: object) -> Dataset:
        return dataset

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> AbstractContextManager[None]:
        """The policy without its adapter, which is the reference of a LoRA, is not called through DeepSpeed."""
        return autocast(self.args)
