"""What every training method shares: the arguments of its trainer, and running it."""

import logging
import math
import time
from collections import deque
from typing import TYPE_CHECKING

import psutil
import torch
from transformers import PrinterCallback, TrainerCallback

from lineage.checkpoints import Checkpoints
from lineage.errors import ConfigError, PipelineError, StoppedError
from tasks.checkpointing import Checkpointing
from tasks.row_order import row_order

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

    from tasks.context import TrainContext
    from tasks.data.tokens.tokenized_rows import TokenizedRows
    from tasks.method import Training

logger = logging.getLogger(__name__)

# Transformers' own "constant" has no warmup.
SCHEDULES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}
# Not computed by the packed forward (they need the whole distribution of every token), or not about the step.
UNREPORTED = frozenset({"entropy", "logits/chosen", "logits/rejected", "epoch"})
WINDOW_STEPS = 10  # tokens per second are those of the last steps; the final loss is their mean


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
    }


def ordered(rows: "TokenizedRows", method: "Training") -> "Dataset":
    """Exactly the rows that training consumes, in their one order."""
    return rows.dataset(row_order(len(rows), method.num_steps * method.global_batch_size, method.seed))


class TokenCount(TrainerCallback):
    """Lets TRL's count of tokens go on where the checkpoint's ended: it keeps none in a checkpoint."""

    def __init__(self, trainer: "Trainer") -> None:
        self.trainer = trainer

    def on_train_begin(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kwargs: object
    ) -> None:
        counts = [entry["num_tokens"] for entry in state.log_history if "num_tokens" in entry]
        self.trainer._total_train_tokens = counts[-1] if counts else 0


class Recorder(TrainerCallback):
    """Hands every step's metrics to ``ctx.report``, and stops a training whose loss is no number."""

    def __init__(self, ctx: "TrainContext") -> None:
        self.report = ctx.report
        self.process = psutil.Process()
        self.window: deque[tuple[float, float]] = deque(maxlen=WINDOW_STEPS + 1)  # (seconds, tokens so far)

    def on_train_begin(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kwargs: object
    ) -> None:
        counts = [float(entry["num_tokens"]) for entry in state.log_history if "num_tokens" in entry]
        self.window.append((time.perf_counter(), counts[-1] if counts else 0.0))

    def on_log(
        self,
        args: "TrainingArguments",
        state: "TrainerState",
        control: "TrainerControl",
        logs: dict[str, float],
        **kwargs: object,
    ) -> None:
        if "loss" not in logs:  # the summary after the last step
            return
        if not (math.isfinite(logs["loss"]) and math.isfinite(logs["grad_norm"])):
            raise PipelineError(
                f"training diverged: at step {state.global_step} loss={logs['loss']} grad_norm={logs['grad_norm']}; "
                f"nothing was saved; lower learning_rate (now {args.learning_rate:g}) or max_grad_norm (now "
                f"{args.max_grad_norm:g}), raise warmup_ratio, or train in precision=fp32"
            )
        self.window.append((time.perf_counter(), float(logs["num_tokens"])))
        (start, tokens_before), (now, tokens) = self.window[0], self.window[-1]
        metrics = {name: float(value) for name, value in logs.items() if name not in UNREPORTED}
        speed = (tokens - tokens_before) / (now - start)
        self.report(state.global_step, {**metrics, "tokens_per_second": speed, "memory_gib": self.memory_gib(args)})

    def memory_gib(self, args: "TrainingArguments") -> float:
        """The most that was allocated on this worker's GPU so far; without one, what its process holds now."""
        if args.device.type == "cuda":
            return float(torch.cuda.max_memory_allocated(args.device)) / 2**30
        return float(self.process.memory_info().rss) / 2**30


def fit(trainer: "Trainer", ctx: "TrainContext") -> dict[str, float]:
    """Trains to the last step, reporting each; a trainer that is already there is not stepped again.

    Returns:
        Final metrics: ``loss`` and TRL's metrics as means of the last steps, ``steps``, ``num_tokens``,
        ``train_seconds`` (of all attempts), ``tokens_per_second``.

    Raises:
        StoppedError: it was asked to end before its last step; a checkpoint of the step before is committed.
    """
    before = _seconds_before(ctx)
    start = time.perf_counter()
    if trainer.state.global_step < trainer.args.max_steps:
        _train(trainer, ctx, before)
    else:
        logger.info("steps=%d state=finished nothing left to train", trainer.state.global_step)
    return summary(trainer.state, before + time.perf_counter() - start)


def _train(trainer: "Trainer", ctx: "TrainContext", seconds_before: float) -> None:
    checkpointing = Checkpointing(trainer, ctx, seconds_before)
    trainer.remove_callback(PrinterCallback)
    for callback in (TokenCount(trainer), Recorder(ctx), checkpointing):
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


def summary(state: "TrainerState", seconds: float) -> dict[str, float]:
    """Final metrics of a training from the log of its steps."""
    steps = [entry for entry in state.log_history if "loss" in entry]
    last = steps[-WINDOW_STEPS:]
    names = [name for name in last[-1] if name not in UNREPORTED | {"step", "learning_rate", "num_tokens"}]
    means = {name: sum(float(entry[name]) for entry in last) / len(last) for name in names}
    num_tokens = float(steps[-1]["num_tokens"])
    return {
        **means,
        "steps": float(state.global_step),
        "num_tokens": num_tokens,
        "train_seconds": seconds,
        "tokens_per_second": num_tokens / seconds if seconds else 0.0,
    }
