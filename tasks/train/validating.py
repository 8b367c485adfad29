"""Measures the loss on held-out rows while a stage trains, for its log, its best model, its schedule and its end."""

import logging
from typing import TYPE_CHECKING

from transformers import TrainerCallback

from tasks.best import HELD_OUT_LOSS
from tasks.train.callbacks import has_diverged
from tasks.train.checkpointing import held_out_loss, held_out_rows
from tasks.train.own_optimizers import count_measured
from tasks.train.validation import VAL_LOSS, Patience

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import Trainer
    from transformers import TrainerControl as Control
    from transformers import TrainerState as State
    from transformers import TrainingArguments as Args

    from tasks.context import TrainContext
    from tasks.recipe import Inputs, TrainingRecipe

    Logs = dict[str, float]

logger = logging.getLogger(__name__)


class Validating(TrainerCallback):
    """Adds the held-out loss to the log of the steps that ``validation`` or ``best`` name, and of the last one.

    It runs before the callbacks that read the loss. A resume finds the measurements in the log of the checkpoint.

    Args:
        rows: to measure on.
        num_rows: that are trained on in a pass.

    Attributes:
        ended_at: the step after which ``patience`` ended the training, which is its last then; None: it did not.
    """

    def __init__(
        self, trainer: "Trainer", method: "TrainingRecipe", ctx: "TrainContext", rows: "Dataset", num_rows: int
    ) -> None:
        self.trainer, self.method, self.ctx, self.rows, self.num_rows = trainer, method, ctx, rows, num_rows
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
        # For the report of this step, and for the log that a resume loads.
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
        self.ended_at = state.max_steps = state.global_step  # the last step: others compare with max_steps
        control.should_training_stop = True
        control.should_save = False  # as after the last step, its weights are the output

    def _validates(self, step: int) -> bool:
        validation = self.method.validation
        return validation is not None and validation.is_due(step, self.num_rows, self.method.rows_per_step)

    def _competes(self, step: int) -> bool:
        best = self.method.best
        return (
            best is not None and best.metric == HELD_OUT_LOSS and best.every_steps is not None and best.competes(step)
        )


def validating(
    method: "TrainingRecipe",
    trainer: "Trainer",
    inputs: "Inputs",
    ctx: "TrainContext",
    num_rows: int,
    rows: "Dataset | None" = None,
) -> Validating | None:
    """The measurement that a recipe asks for; None: it asks for none.

    Args:
        rows: the held-out rows; None: they are read.

    Raises:
        DataError: there are no held-out rows.
    """
    if not method.measures_held_out:
        return None
    rows = rows or held_out_rows(method, inputs, ctx)
    max_rows = method.validation.max_rows if method.validation else None
    return Validating(trainer, method, ctx, rows.select(range(min(len(rows), max_rows or len(rows)))), num_rows)
