"""A training that ends with its best model: those that compete are measured, the best is saved, and loaded last."""

import logging
import math
from typing import TYPE_CHECKING

import torch
from accelerate.utils import broadcast, broadcast_object_list
from transformers import TrainerCallback

from lineage.checkpoints import Checkpoints
from lineage.errors import ArtifactError, PipelineError
from tasks.checkpoints.best import HELD_OUT_LOSS, Best
from tasks.checkpoints.held_out_loss import held_out_loss
from tasks.context import TrainContext
from tasks.steps.reports import has_diverged, step_metrics

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

logger = logging.getLogger(__name__)


class BestModel(TrainerCallback):
    """Has a model saved that is better than all that competed before it.

    Args:
        held_out: rows that the models are measured on; None: the metric is one that the training reports.

    Attributes:
        step: of the best model so far; None: none has competed.
    """

    def __init__(self, trainer: "Trainer", best: Best, ctx: TrainContext, held_out: "Dataset | None") -> None:
        assert ctx.checkpoint_dir, "the best model is kept as a checkpoint"
        self.trainer, self.best, self.ctx, self.held_out = trainer, best, ctx, held_out
        self.store = Checkpoints(ctx.checkpoint_dir)
        self.step: int | None = None
        self.value: float | None = None

    def on_train_begin(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kwargs: object
    ) -> None:
        """Finds the best so far again in the log, which every worker has from the checkpoint that it goes on from.

        Raises:
            ArtifactError: its checkpoint is damaged: no step is spent on a training that cannot end with it.
        """
        for step in (entry["step"] for entry in state.log_history if "loss" in entry):
            value = step_metrics(state, step).get(self.best.metric, math.nan) if self.best.competes(step) else math.nan
            if self.best.is_better(value, self.value):
                self.step, self.value = step, value
        if self.step is not None:
            logger.info("best_step=%d %s=%g state=resumed", self.step, self.best.metric, self.value)
            self._require_intact(self.step)

    def on_log(
        self,
        args: "TrainingArguments",
        state: "TrainerState",
        control: "TrainerControl",
        logs: dict[str, float],
        **kwargs: object,
    ) -> None:
        step = state.global_step
        if "loss" not in logs or has_diverged(logs) or not (self.best.competes(step) or step == state.max_steps):
            return
        if self.held_out:
            # In the report of this step, and in the log that a checkpoint brings back.
            logs[HELD_OUT_LOSS] = held_out_loss(self.trainer, self.held_out, self.ctx)
            state.log_history[-1][HELD_OUT_LOSS] = logs[HELD_OUT_LOSS]
        value = self._agreed(step_metrics(state, step).get(self.best.metric, math.nan))
        if not self.best.is_better(value, self.value):
            return
        logger.info("best_step=%d %s=%g before=%s", step, self.best.metric, value, self.value)
        self.step, self.value = step, value
        if step < state.max_steps:  # the last one is in memory when it is needed
            control.should_save = True

    def end_at_best(self) -> int:
        """Loads the best model, where it is not the last; returns its step.

        Raises:
            PipelineError: the metric was no number at any step that competed.
            ArtifactError: its checkpoint is damaged.
        """
        if self.step is None:
            raise PipelineError(
                f"output=best: {self.best.metric} was no number at every step that competed, so that none is the best; "
                "lower learning_rate, or state another best.metric"
            )
        if self.step != self.trainer.state.global_step:
            self._require_intact(self.step)
            self.trainer.state.best_model_checkpoint = str(self.store.path(self.step))
            self.trainer._load_best_model()
        logger.info("output=best best_step=%d %s=%g", self.step, self.best.metric, self.value)
        return self.step

    def _require_intact(self, step: int) -> None:
        """Rank 0 reads every byte, and all workers end together.

        Raises:
            ArtifactError: it is not what was committed.
        """
        damage = [self.store.damage(step) if self.ctx.rank == 0 else []]
        for found in filter(None, broadcast_object_list(damage)):
            stage = self.store.directory.parents[1].name
            raise ArtifactError(
                f"the best model is that of step {step}, and its checkpoint is not what was committed: "
                f"{'; '.join(found[:3])}; restore the files, or begin again with restart=[{stage}]"
            )

    def _agreed(self, value: float) -> float:
        """What rank 0 found: workers that took another for the best would not save together."""
        found = torch.tensor(value, dtype=torch.float64, device=self.trainer.args.device)
        return float(broadcast(found))
