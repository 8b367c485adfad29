"""When a training saves and when it stops: at the end of an optimizer step, on all workers at the same one."""

import logging
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from lineage.checkpoints import Checkpoint
from lineage.errors import ConfigError
from tasks.checkpoints.best import HELD_OUT_LOSS, Best, kept_steps
from tasks.context import TrainContext
from tasks.steps.alive import Doing
from tasks.steps.reports import step_metrics

if TYPE_CHECKING:
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

logger = logging.getLogger(__name__)

# Pickled, read by nobody: what it says is in the recipe and in the manifest.
_UNREAD = ("training_args.bin", "zero_to_fp32.py", "zero_to_torch.py")


class Checkpointing(TrainerCallback):
    """Lets transformers write a checkpoint aside, and commits it once every worker has written its part.

    Args:
        best: which models compete for the output; the best of them is kept.

    Attributes:
        stopped_at: the step at which the training was asked to end early; None: it was not.
    """

    def __init__(self, trainer: "Trainer", ctx: TrainContext, best: Best | None, seconds_before: float) -> None:
        self.trainer = trainer
        self.ctx = ctx
        self.best = best
        self.store = ctx.checkpoints
        self.stopped_at: int | None = None
        self.metrics_known = False
        self.seconds_before = seconds_before
        self.start = self.last_save = time.monotonic()

    def on_train_begin(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kwargs: object
    ) -> None:
        self.start = self.last_save = time.monotonic()
        if self.store and self.ctx.rank == 0:  # what comes after is damaged: it was gone back behind
            self.store.keep(step for step in self.store.steps() if step <= state.global_step)

    def on_step_end(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kwargs: object
    ) -> None:
        if state.global_step >= state.max_steps:
            return  # it ends here anyway, and its output follows
        save, stop = self._agreed(state.global_step)
        if stop:
            self.stopped_at = state.global_step
            control.should_training_stop = True
        control.should_save = (save or stop) and self.store is not None

    def on_log(
        self,
        args: "TrainingArguments",
        state: "TrainerState",
        control: "TrainerControl",
        logs: dict[str, float],
        **kwargs: object,
    ) -> None:
        """At the first step: refuses a best by a metric that is not reported. What execution keeps decides nothing."""
        if control.should_save:  # which is decided by now, and is what comes next
            self.ctx.mark(state.global_step, Doing.SAVING)
        if "loss" not in logs or self.metrics_known:
            return
        found = set(step_metrics(state, state.global_step))
        if self.best and self.best.metric == HELD_OUT_LOSS:
            found.add(HELD_OUT_LOSS)
        known = f"is not measured; there are: {', '.join(sorted(found))}"
        if self.best and self.best.metric not in found:
            raise ConfigError(f"{self.best.key}.metric={self.best.metric}: {known}")
        keep_best = self.ctx.resources.keep_best
        if keep_best and keep_best.metric not in found:
            logger.warning("%s.metric=%s: %s; none is kept for it", keep_best.key, keep_best.metric, known)
        self.metrics_known = True

    def on_save(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kwargs: object
    ) -> None:
        self.trainer.accelerator.wait_for_everyone()
        if self.ctx.rank == 0:
            self._commit(Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}", state)
        self.trainer.accelerator.wait_for_everyone()
        self.ctx.mark(state.global_step, Doing.BETWEEN)
        self.last_save = time.monotonic()

    def _agreed(self, step: int) -> tuple[bool, bool]:
        """Whether to save and to stop after this step: rank 0 says it, or each worker would at a step of its own."""
        stop = self.ctx.rank == 0 and self.ctx.should_stop()
        flags = torch.tensor([self._is_due(step), stop], dtype=torch.int32, device=self.trainer.args.device)
        if self.ctx.world_size > 1:
            torch.distributed.broadcast(flags, src=0)
        save, stop = (bool(flag) for flag in flags.tolist())
        return save, stop

    def _is_due(self, step: int) -> bool:
        resources = self.ctx.resources
        by_step = resources.save_steps is not None and step % resources.save_steps == 0
        waited = time.monotonic() - self.last_save
        return by_step or (resources.save_minutes is not None and waited >= 60 * resources.save_minutes)

    def _commit(self, draft: Path, state: "TrainerState") -> None:
        assert self.store is not None
        for name in _UNREAD:
            (draft / name).unlink(missing_ok=True)
        start = time.monotonic()
        checkpoint = Checkpoint(
            step=state.global_step, time=time.time(), train_seconds=self.seconds_before + start - self.start,
            num_workers=self.ctx.world_size, zero_stage=self.ctx.resources.zero_stage,
            micro_batch_size=self.ctx.resources.micro_batch_size, cpus_per_worker=self.ctx.resources.cpus_per_worker,
            metrics=step_metrics(state, state.global_step),
        )  # fmt: skip
        path = self.store.commit(draft, checkpoint)
        resources = self.ctx.resources
        self.store.keep(kept_steps(self.store.records(), resources.keep_last, resources.keep_best, self.best))
        logger.info("checkpoint=%s state=committed seconds=%.1f", path, time.monotonic() - start)


def discard_drafts(work_dir: Path) -> None:
    """Removes what an attempt that ended in the middle of a save has left."""
    for draft in work_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        shutil.rmtree(draft, ignore_errors=True)
