"""When a training saves and stops, at the same step on all workers, and when it has diverged."""

import logging
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from lineage.checkpoints import Checkpoint, Checkpoints
from lineage.errors import ConfigError, PipelineError
from tasks.context import Metrics, TrainContext
from tasks.train.best import HELD_OUT_LOSS, completes_epochs, kept_steps
from tasks.train.loop.callbacks import has_diverged, step_metrics
from tasks.train.loop.heartbeat import Phase
from tasks.train.optim.own_optimizers import averaged

if TYPE_CHECKING:
    from transformers import Trainer
    from transformers import TrainerControl as Control
    from transformers import TrainerState as State
    from transformers import TrainingArguments as Args

    from tasks.recipe import TrainingRecipe

    Logs = dict[str, float]
    from tasks.train.loop.evaluation import BestModel

logger = logging.getLogger(__name__)
# Files that are never read: their content is in the recipe and the manifest.
_UNREAD = ("training_args.bin", "zero_to_fp32.py", "zero_to_torch.py")


class Saver:
    """Decides when a training saves and stops, and which checkpoints are kept; for any loop.

    Args:
        method: its ``best`` says which models compete for the output; the best of them is kept.
        seconds_before: training time of earlier attempts.
        num_rows: number of rows in an epoch.
    """

    def __init__(self, ctx: TrainContext, method: "TrainingRecipe", seconds_before: float, num_rows: int) -> None:
        self.ctx, self.method, self.seconds_before, self.num_rows = ctx, method, seconds_before, num_rows
        self.store = ctx.checkpoints
        self.start = self.last_save = time.monotonic()

    def begin(self, step: int) -> None:
        """Starts the clock, and deletes checkpoints after the step: a resume from an earlier one means damage."""
        self.start = self.last_save = time.monotonic()
        if self.store and self.ctx.rank == 0:
            self.store.keep(each for each in self.store.steps() if each <= step)

    def agreed(self, step: int, device: torch.device) -> tuple[bool, bool]:
        """Whether to save and to stop after this step; rank 0 decides, so that all workers do it at the same step."""
        stop = self.ctx.rank == 0 and self.ctx.should_stop()
        flags = torch.tensor([self._is_due(step), stop], dtype=torch.int32, device=device)
        if self.ctx.world_size > 1:
            torch.distributed.broadcast(flags, src=0)
        save, stop = (bool(flag) for flag in flags.tolist())
        return (save or stop) and self.store is not None, stop

    def saves_last(self, device: torch.device) -> bool:
        """Whether to save after the last step, which is the output, too: the output may need a model that changed."""
        changed = torch.tensor(self.ctx.rank == 0 and bool(self.ctx.changed_models()), dtype=torch.int32, device=device)
        if self.ctx.world_size > 1:
            torch.distributed.broadcast(changed, src=0)
        return bool(changed) and self.store is not None

    def commit(self, draft: Path, step: int, metrics: Metrics) -> None:
        """Commits a draft as the checkpoint of its step; rank 0 calls it after every worker has written its part."""
        assert self.store is not None
        start, resources = time.monotonic(), self.ctx.resources
        checkpoint = Checkpoint(
            step=step, time=time.time(), train_seconds=self.seconds_before + start - self.start,
            num_workers=self.ctx.world_size, zero_stage=resources.zero_stage,
            micro_batch_size=None if resources.micro_batch_size == "auto" else resources.micro_batch_size,
            cpus_per_worker=resources.cpus_per_worker, metrics=metrics,
        )  # fmt: skip
        path = self.store.commit(draft, checkpoint)
        self.store.keep(kept_steps(self.store.records(), resources.keep_last, resources.keep_best, self.method.best))
        logger.info("checkpoint=%s state=committed seconds=%.1f", path, time.monotonic() - start)

    def saved(self) -> None:
        """Restarts the clock for the next checkpoint."""
        self.last_save = time.monotonic()

    def _is_due(self, step: int) -> bool:
        resources = self.ctx.resources
        by_step = resources.save_steps is not None and step % resources.save_steps == 0
        by_epoch = resources.save_epochs is not None and completes_epochs(
            resources.save_epochs, step, self.num_rows, self.method.rows_per_step
        )
        waited = time.monotonic() - self.last_save
        return by_step or by_epoch or (resources.save_minutes is not None and waited >= 60 * resources.save_minutes)


class Checkpointing(TrainerCallback):
    """Lets transformers write a draft, and commits it after every worker has written its part.

    Attributes:
        stopped_at: the step after which a stop request ended the training; None: there was none.
    """

    def __init__(self, trainer: "Trainer", ctx: TrainContext, method: "TrainingRecipe", saver: Saver) -> None:
        self.trainer, self.ctx, self.method, self.saver = trainer, ctx, method, saver
        self.stopped_at: int | None = None
        self.metrics_known = False
        self._save = trainer._save_checkpoint
        trainer._save_checkpoint = self._save_averaged

    def on_train_begin(self, args: "Args", state: "State", control: "Control", **kwargs: object) -> None:
        self.saver.begin(state.global_step)

    def on_step_end(self, args: "Args", state: "State", control: "Control", **kwargs: object) -> None:
        if state.global_step >= state.max_steps:
            control.should_save = self.saver.saves_last(self.trainer.args.device)
            return
        control.should_save, stop = self.saver.agreed(state.global_step, self.trainer.args.device)
        if stop:
            self.stopped_at = state.global_step
            control.should_training_stop = True

    def on_log(self, args: "Args", state: "State", control: "Control", logs: "Logs", **kwargs: object) -> None:
        """Refuses a ``best`` metric that the first step does not report; only warns for ``keep_best``."""
        if control.should_save:  # already decided; the save is next
            self.ctx.mark(state.global_step, Phase.SAVING)
        if "loss" not in logs or self.metrics_known:
            return
        found = set(step_metrics(state.log_history, state.global_step))
        best = self.method.best
        if self.method.validation or (best and best.metric == HELD_OUT_LOSS):
            found.add(HELD_OUT_LOSS)
        known = f"is not measured; measured are: {', '.join(sorted(found))}"
        if best and best.metric not in found:
            raise ConfigError(f"{best.key}.metric={best.metric}: {known}; set one of them")
        keep_best = self.ctx.resources.keep_best
        if keep_best and keep_best.metric not in found:
            logger.warning("%s.metric=%s: %s; no checkpoint is kept for it", keep_best.key, keep_best.metric, known)
        self.metrics_known = True

    def _save_averaged(self, *args: object, **kwargs: object) -> None:
        """Replaces the trainer's ``_save_checkpoint``: saves the model that would be the output now."""
        with averaged(self.trainer.optimizer):
            self._save(*args, **kwargs)

    def on_save(self, args: "Args", state: "State", control: "Control", **kwargs: object) -> None:
        self.trainer.accelerator.wait_for_everyone()
        if self.ctx.rank == 0:
            draft = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            for name in _UNREAD:
                (draft / name).unlink(missing_ok=True)
            self.saver.commit(draft, state.global_step, step_metrics(state.log_history, state.global_step))
        self.trainer.accelerator.wait_for_everyone()
        self.ctx.mark(state.global_step, Phase.BETWEEN)
        self.saver.saved()


def discard_drafts(work_dir: Path) -> None:
    """Deletes drafts of an attempt that was killed while it saved."""
    for draft in work_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        shutil.rmtree(draft, ignore_errors=True)


class Divergence(TrainerCallback):
    """Stops a training whose loss or gradient norm is non-finite: it fails, or its best model becomes the output.

    Args:
        checkpoints: of the stage; None: it has none.
        go_back_to: the best model, which becomes the output; None: the training fails.

    Attributes:
        step: the step that diverged; None: none did.
    """

    def __init__(self, checkpoints: Checkpoints | None, go_back_to: "BestModel | None") -> None:
        self.checkpoints, self.go_back_to = checkpoints, go_back_to
        self.step: int | None = None

    def on_log(self, args: "Args", state: "State", control: "Control", logs: "Logs", **kwargs: object) -> None:
        if "loss" not in logs or not has_diverged(logs):
            return
        found, remedy = divergence(
            state.global_step, logs["loss"], logs["grad_norm"], args.learning_rate, args.max_grad_norm
        )
        if self.go_back_to is None or self.go_back_to.step is None:
            competed = "" if self.go_back_to is None else "; on_divergence=best: no model has competed yet"
            raise PipelineError(f"{found}; {last_saved(self.checkpoints)}{competed}; {remedy}")
        logger.error("%s; on_divergence=best: the output is the model of step %d", found, self.go_back_to.step)
        logger.error("to train past it: %s", remedy)
        self.step = state.global_step
        control.should_training_stop = True
        control.should_save = False  # these weights are non-finite


def divergence(step: int, loss: float, grad_norm: float, learning_rate: float, max_grad_norm: float) -> tuple[str, str]:
    """The finding and the remedy, for messages."""
    return (
        f"training diverged: at step {step} loss={loss} grad_norm={grad_norm}",
        f"lower learning_rate (now {learning_rate:g}) or max_grad_norm (now {max_grad_norm:g}), raise warmup_ratio, or "
        "train in precision=fp32",
    )


def last_saved(checkpoints: Checkpoints | None) -> str:
    """The checkpoint that a diverged training would resume from, for messages."""
    last = checkpoints.newest() if checkpoints else None
    if last is None:
        return "nothing was saved"
    loss = f" (loss={last.metrics['loss']:.4g})" if "loss" in last.metrics else ""
    return f"its last good checkpoint is that of step {last.step}{loss}, and the same recipe would diverge from there"


def seconds_before(ctx: "TrainContext") -> float:
    """Training time of earlier attempts."""
    return Checkpoints.at(ctx.resume_from).train_seconds if ctx.resume_from else 0.0
