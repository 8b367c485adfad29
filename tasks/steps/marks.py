"""Marks each step of a transformers training, for whoever looks whether its workers go on."""

from typing import TYPE_CHECKING

from transformers import TrainerCallback

from tasks.steps.alive import Doing

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from tasks.context import TrainContext


class StepMarks(TrainerCallback):
    """Says on every worker that a step begins, goes on, or is done; ``Checkpointing`` says that it saves."""

    def __init__(self, ctx: "TrainContext") -> None:
        self.mark = ctx.mark

    def on_train_begin(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kwargs: object
    ) -> None:
        self.mark(state.global_step, Doing.BETWEEN)

    def on_step_begin(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kwargs: object
    ) -> None:
        self.mark(state.global_step, Doing.STEPPING)

    def on_substep_end(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kwargs: object
    ) -> None:
        self.mark(state.global_step, Doing.STEPPING)

    def on_step_end(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kwargs: object
    ) -> None:
        self.mark(state.global_step, Doing.BETWEEN)

    def on_train_end(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kwargs: object
    ) -> None:
        self.mark(state.global_step, Doing.DONE)
