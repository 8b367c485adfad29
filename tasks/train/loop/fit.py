"""The training loop: transformers' own, with callbacks that measure, report, save and end it."""

import contextlib
import gc
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from transformers import PrinterCallback, Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from lineage.checkpoints import Checkpoints
from lineage.errors import PipelineError, StoppedError
from tasks.train.best import HELD_OUT_LOSS, VAL_LOSS, Patience
from tasks.train.kernels.machine import fast_products, start_scaler
from tasks.train.loop.callbacks import NewRandomState, Recorder, StepCounts, StepMarks, has_diverged, summary
from tasks.train.loop.checkpointing import (
    BestModel,
    Checkpointing,
    Divergence,
    Saver,
    agreed,
    discard_drafts,
    held_out_loss,
    held_out_rows,
)
from tasks.train.loop.speed import Speed
from tasks.train.models.quantized_base import step_in_fp32
from tasks.train.optim.own_optimizers import count_measured
from tasks.train.optim.schedules import Event, LossWatch
from tasks.train.sharding import name_accumulation

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import TrainerControl as Control
    from transformers import TrainerState as State
    from transformers import TrainingArguments as Args

    from tasks.context import TrainContext
    from tasks.recipe import Inputs, TrainingRecipe

    Logs = dict[str, float]

logger = logging.getLogger(__name__)

_RANKS_FILE = "rank_budget.safetensors"
_KEPT_SCORES = ("exp_avg_ipt", "exp_avg_unc")  # of PEFT's allocator: means over the steps


class RankBudget(TrainerCallback):
    """Scores the ranks of AdaLoRA after each step, and sets the weakest to zero: arXiv:2303.10512.

    The adapter keeps its shape, so that checkpoints load: PEFT would save it without the pruned ranks, and not the
    scores. A pruned rank adds nothing to the output.
    """

    def __init__(self, model: "PeftModel", ctx: "TrainContext") -> None:
        self.model, self.ctx = model, ctx
        self.allocator = model.base_model.rankallocator
        self.pattern: dict[str, list[bool]] | None = None

    def on_train_begin(self, args: "Args", state: "State", control: "Control", **kwargs: object) -> None:
        if self.ctx.resume_from is None:
            return
        saved = load_file(self.ctx.resume_from / _RANKS_FILE)
        for kept in _KEPT_SCORES:
            found = {name.removeprefix(f"{kept}:"): each for name, each in saved.items() if name.startswith(f"{kept}:")}
            device = self.model.device
            setattr(self.allocator, kept, {name: each.to(device) for name, each in found.items()})
        self.allocator.ipt = dict.fromkeys(self.allocator.exp_avg_ipt)
        pattern = {name: each.tolist() for name, each in saved.items() if ":" not in name}
        self.pattern = pattern or None

    def on_optimizer_step(self, args: "Args", state: "State", control: "Control", **kwargs: object) -> None:
        """Gradients are still there; a step without a signal has none, and scores ranks by zeros."""
        for parameter in self.model.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        config = self.model.peft_config["default"]
        config.rank_pattern = self.pattern
        self.model.base_model.update_and_allocate(state.global_step + 1)
        self.pattern, config.rank_pattern = config.rank_pattern, None

    def on_save(self, args: "Args", state: "State", control: "Control", **kwargs: object) -> None:
        if self.ctx.rank != 0:
            return
        draft = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        scores = {
            f"{kept}:{name}": each for kept in _KEPT_SCORES for name, each in getattr(self.allocator, kept).items()
        }
        pattern = {name: torch.tensor(each) for name, each in (self.pattern or {}).items()}
        save_file({name: each.contiguous() for name, each in {**scores, **pattern}.items()}, draft / _RANKS_FILE)


class AdaptiveRate(TrainerCallback, ExportableState):
    """Multiplies the schedule's learning rate by the factor of a ``LossWatch``; its state is in every checkpoint.

    It watches the loss, or minus the reward where that is the method's ``progress``. It runs before the callbacks that
    measure and report, and after those that complete the log of a step.

    Args:
        best: the model to go back to; None: ``divergence_z`` is not set.
    """

    def __init__(
        self, trainer: "Trainer", method: "TrainingRecipe", ctx: "TrainContext", best: "BestModel | None"
    ) -> None:
        setting = method.schedule.adaptive
        assert setting and method.progress
        self.trainer, self.ctx, self.best, self.measure = trainer, ctx, best, method.progress
        self.watch = LossWatch(setting=setting)

    def state(self) -> dict[str, object]:
        """What transformers writes into a checkpoint."""
        return {"args": {}, "attributes": self.watch.state()}

    def on_train_begin(self, args: "Args", state: "State", control: "Control", **kwargs: object) -> None:
        saved = state.stateful_callbacks.get(type(self).__name__)
        if saved and state.global_step:
            self.watch.load(saved["attributes"])

    def on_step_begin(self, args: "Args", state: "State", control: "Control", **kwargs: object) -> None:
        scheduled = self.trainer.lr_scheduler.get_last_lr()
        for group, rate in zip(self.trainer.optimizer.param_groups, scheduled, strict=True):
            group["lr"] = rate * self.watch.factor

    def on_log(self, args: "Args", state: "State", control: "Control", logs: "Logs", **kwargs: object) -> None:
        if "loss" not in logs:
            return
        step, entry = state.global_step, state.log_history[-1]
        if "learning_rate" in logs:  # transformers logs that of the schedule
            logs["learning_rate"] = entry["learning_rate"] = logs["learning_rate"] * self.watch.factor
        measured = -logs["reward"] if self.measure == "reward" else logs["loss"]
        is_finite = not has_diverged(logs)
        loss = agreed(measured if is_finite else math.nan, args)
        z = self.watch.z(loss)
        can_return = self.best is not None and self.best.step is not None and step < state.max_steps
        event = self.watch.observe(step, loss, can_return=can_return)
        logs["adaptive/factor"] = self.watch.factor
        if event is None:
            return
        logs[f"adaptive/{event}"] = 1.0
        logger.warning(
            "[adaptive] step %d | %s | %s %.4f | z %.2f | learning rate x %.4g",
            step, event, self.measure, logs[self.measure], z, self.watch.factor,
        )  # fmt: skip
        if event is not Event.DIVERGENCE:
            return
        assert self.best is not None
        self.best.restore()
        self.trainer._tr_loss.zero_()  # transformers subtracts it from itself, which leaves nan as it is
        logger.warning("[adaptive] step %d | back to the model of step %d", step, self.best.step)
        if not is_finite:  # so that later callbacks ignore this step
            self.ctx.report(step, {name: value for name, value in logs.items() if name.startswith("adaptive/")})
            for each in (logs, entry):
                del each["loss"]

    @property
    def metrics(self) -> dict[str, float]:
        """For the manifest: how many interventions there were, and the factor after each."""
        each = {f"adaptive/{event}/step_{step}": factor for step, event, factor in self.watch.events}
        return {"adaptive/interventions": float(len(self.watch.events)), **each}


class Validating(TrainerCallback):
    """Adds the held-out loss to the log of the steps that ``validation`` or ``best`` name, and of the last one.

    It runs before the callbacks that read the loss. A resume finds the measurements in the log of the checkpoint.

    Args:
        rows: the held-out rows, of which the first ``max_rows`` are measured.
        num_rows: number of training rows in an epoch.

    Attributes:
        ended_at: the step after which ``patience`` ended the training; None: it did not.
    """

    def __init__(
        self, trainer: Trainer, method: "TrainingRecipe", ctx: "TrainContext", rows: Dataset, num_rows: int
    ) -> None:
        self.trainer, self.method, self.ctx, self.num_rows = trainer, method, ctx, num_rows
        max_rows = method.validation.max_rows if method.validation else None
        self.rows = rows.select(range(min(len(rows), max_rows or len(rows))))
        self.patience = Patience()
        self.ended_at: int | None = None

    def on_train_begin(self, args: "Args", state: "State", control: "Control", **kwargs: object) -> None:
        for entry in state.log_history:
            if HELD_OUT_LOSS in entry and self._validates(entry["step"]):
                self.patience.add(entry[HELD_OUT_LOSS])

    def on_log(self, args: "Args", state: "State", control: "Control", logs: "Logs", **kwargs: object) -> None:
        step, is_last = state.global_step, state.global_step == state.max_steps
        if "loss" not in logs or has_diverged(logs) or not (is_last or self._validates(step) or self._competes(step)):
            return
        # Both the report of this step and the log that a resume loads get the loss.
        logs[HELD_OUT_LOSS] = loss = held_out_loss(self.trainer, self.rows, self.ctx)
        state.log_history[-1][HELD_OUT_LOSS] = loss
        if self.method.validation is None or not (is_last or self._validates(step)):
            return
        logs[VAL_LOSS] = loss
        if self.ctx.rank == 0:
            epoch = (step * self.method.global_batch_size - 1) // self.num_rows
            logger.info("[val] step %d | epoch %d | loss %.4f", step, epoch, loss)
        if is_last:
            return
        count_measured(self.trainer, loss)
        self.patience.add(loss)
        if self.method.validation.patience and self.patience.waited >= self.method.validation.patience:
            self._end(state, control)

    def _end(self, state: "State", control: "Control") -> None:
        logger.info(
            "step=%d state=ended early: no val/loss below %g in %d measurements (validation.patience)",
            state.global_step, self.patience.least, self.patience.waited,
        )  # fmt: skip
        self.ended_at = state.max_steps = state.global_step  # this is the last step: other callbacks read max_steps
        control.should_training_stop = True
        control.should_save = False  # as after any last step, the weights become the output

    def _validates(self, step: int) -> bool:
        validation = self.method.validation
        return validation is not None and validation.is_due(step, self.num_rows, self.method.rows_per_step)

    def _competes(self, step: int) -> bool:
        best = self.method.best
        return (
            best is not None and best.metric == HELD_OUT_LOSS and best.every_steps is not None and best.competes(step)
        )


_COLLECT_SECONDS = 10.0
_NOT_DETERMINISTIC = "does not have a deterministic implementation"  # in torch's error message
_FLASH = "FLASH_ATTENTION_DETERMINISTIC"


def fit(
    method: "TrainingRecipe", trainer: Trainer, inputs: "Inputs", ctx: "TrainContext", num_rows: int,
    held_out: Dataset | None = None,
) -> dict[str, float]:  # fmt: skip
    """Trains to the last step and reports each step; a trainer that is already there takes none.

    The trainer then holds the weights of the stage's output: those of the last step, or of the best.

    Args:
        num_rows: that are trained on in a pass.
        held_out: the rows of ``validation``; None: they are read where it measures them.

    Returns:
        Final metrics: ``loss`` and TRL's metrics as means of the last steps, ``steps``, ``num_tokens``,
        ``train_seconds`` (of all attempts), ``tokens_per_second``, the same ``_per_worker``, ``mfu``. If the best model
        is the output, its ``best_step``, and the means up to that step; if the training diverged and stopped early,
        ``diverged_at_step``; if ``validation.patience`` ended it, ``ended_early_at_step``.

    Raises:
        StoppedError: a stop was requested before the last step; a checkpoint of the step before is committed.
        PipelineError: the loss is non-finite, or an operation is not deterministic, which ``deterministic`` forbids.
        DataError: models are measured on held-out rows, and there are none.
    """
    if method.adapter:
        step_in_fp32(trainer.model)
    before, start = seconds_before(ctx), time.perf_counter()
    speed = Speed.of(method, ctx.resources, trainer.model.config, inputs)
    validation = None
    if method.measures_held_out:
        validation = Validating(trainer, method, ctx, held_out or held_out_rows(method, inputs, ctx), num_rows)
    best = BestModel(trainer, method.best, ctx) if method.best else None
    adaptive = method.schedule.adaptive
    rate = AdaptiveRate(trainer, method, ctx, best if adaptive.divergence_z else None) if adaptive else None
    divergence = Divergence(ctx.checkpoints, best if method.on_divergence == "best" else None)
    if trainer.state.global_step < trainer.args.max_steps:
        try:
            checkpointing = Checkpointing(trainer, ctx, method, Saver(ctx, method, before, num_rows))
            watching = [*filter(None, (rate, validation, best)), divergence, Recorder(ctx, speed)]
            on_gpu = ctx.resources.gpus_per_worker > 0
            fast, collecting = fast_products(method.precision, on_gpu=on_gpu), collecting_between_steps(enabled=on_gpu)
            with deterministic_kernels(ctx.resources.is_deterministic), fast, collecting as collect:
                _train(trainer, ctx, watching, checkpointing, collect)
            if checkpointing.stopped_at is not None and not (validation and validation.ended_at):
                raise StoppedError(f"stopped at step {checkpointing.stopped_at} of {trainer.args.max_steps}")
        except Exception:
            if ctx.rank == 0:  # rank 0 writes checkpoints; another rank's failure must not delete its draft
                discard_drafts(ctx.work_dir)
            raise
    else:
        logger.info("steps=%d state=finished", trainer.state.global_step)
    num_steps, notes = trainer.state.global_step, dict[str, float]()
    if best and (method.output == "best" or divergence.step is not None):
        notes["best_step"] = float(best.end_at_best())
    notes |= rate.metrics if rate else {}
    ended = {"ended_early_at_step": validation and validation.ended_at, "diverged_at_step": divergence.step}
    notes |= {name: float(at) for name, at in ended.items() if at is not None}
    seconds, step = before + time.perf_counter() - start, int(notes.get("best_step", num_steps))
    metrics = summary(trainer.state.log_history, seconds, speed, num_steps=num_steps, output_step=step)
    held_out_loss = {VAL_LOSS: metrics[HELD_OUT_LOSS]} if method.validation and HELD_OUT_LOSS in metrics else {}
    return {**metrics, **notes, **held_out_loss}


def _train(
    trainer: Trainer, ctx: "TrainContext", watching: Sequence[TrainerCallback], checkpointing: Checkpointing,
    collect: Callable[[], None],
) -> None:  # fmt: skip
    name_accumulation(trainer)
    if trainer.accelerator.ddp_handler is not None:  # without it, each worker holds all gradients twice
        trainer.accelerator.ddp_handler.gradient_as_bucket_view = True
        # They are constants. A worker without memory does not come to the exchange before a forward pass.
        trainer.accelerator.ddp_handler.broadcast_buffers = False
    trainer.remove_callback(PrinterCallback)
    # In this order: measure, report, save.
    for callback in (NewRandomState(ctx), StepCounts(trainer)):
        trainer.add_callback(callback)
    start_scaler(trainer)
    for callback in (*watching, StepMarks(ctx, collect), checkpointing):
        trainer.add_callback(callback)
    if ctx.resume_from:
        logger.info("checkpoint=%s state=resumed", ctx.resume_from)
    trainer.train(resume_from_checkpoint=str(ctx.resume_from) if ctx.resume_from else None)
    if callable(getattr(trainer.optimizer, "eval", None)):
        trainer.optimizer.eval()  # switches an averaging optimizer to the average, which is the output


def seconds_before(ctx: "TrainContext") -> float:
    """Training time of earlier attempts."""
    return Checkpoints.at(ctx.resume_from).train_seconds if ctx.resume_from else 0.0


@contextlib.contextmanager
def collecting_between_steps(*, enabled: bool) -> Iterator[Callable[[], None]]:
    """Keeps Python's garbage collector out of the steps, in which it would keep a GPU waiting.

    Yields:
        A function to call between steps, which collects every few seconds. What was there before is not searched.
    """
    if not (enabled and gc.isenabled()):
        yield lambda: None
        return
    last = time.monotonic()

    def collect() -> None:
        nonlocal last
        if time.monotonic() - last > _COLLECT_SECONDS:
            gc.collect()
            last = time.monotonic()

    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield collect
    finally:
        gc.enable()
        gc.unfreeze()


@contextlib.contextmanager
def deterministic_kernels(enabled: bool) -> Iterator[None]:
    """Deterministic kernels: without them repeated runs differ in the last bits.

    cuBLAS also needs ``CUBLAS_WORKSPACE_CONFIG``, which is set when a stage's process starts.

    Raises:
        PipelineError: an operation has no deterministic kernel.
    """
    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(enabled)
    os.environ[_FLASH] = str(int(enabled))  # of flash-attn, which does not ask torch
    # Filling takes time, and training never reads memory that it has not written.
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    except RuntimeError as error:
        if _NOT_DETERMINISTIC not in str(error):
            raise
        operation = str(error).partition(_NOT_DETERMINISTIC)[0].strip()
        raise PipelineError(
            f"{operation} is not deterministic, so a resumed run would not end with the weights of an uninterrupted "
            "one; deterministic operations are accepted; set resources.deterministic=false to train with it"
        ) from error
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
        os.environ[_FLASH] = "0"
        torch.utils.deterministic.fill_uninitialized_memory = fills
