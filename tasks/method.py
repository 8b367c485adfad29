"""What a method is: a frozen dataclass of hyperparameters, and how it runs. ``docs/add_a_method.md`` shows one."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tasks.context import Metrics, TrainContext
from tasks.recipe import (
    ALL_LINEAR,
    FROZEN_POLICY,
    POLICY,
    REWARD_HEAD,
    REWARD_MODEL,
    TEACHER,
    VALUE_MODEL,
    Input,
    Inputs,
    LoRA,
    Method,
    Role,
    TrainingRecipe,
)

if TYPE_CHECKING:
    from transformers import Trainer

    from tasks.train.run import TrainingRun

__all__ = [
    "ALL_LINEAR",
    "FROZEN_POLICY",
    "POLICY",
    "REWARD_HEAD",
    "REWARD_MODEL",
    "TEACHER",
    "VALUE_MODEL",
    "Input",
    "Inputs",
    "LoRA",
    "Method",
    "Role",
    "Training",
]


@dataclass(frozen=True, kw_only=True)
class Training(TrainingRecipe):
    """A method that takes optimizer steps. It states its fields, ``reads``, ``models`` and its ``trainer``.

    A method with a loop of its own states ``loop`` instead (``tasks.train.own_loop``).
    """

    def run(self, inputs: Inputs, ctx: TrainContext) -> Metrics:
        """Loads what the method states, trains, and writes the output."""
        from tasks.train.run import TrainingRun

        run = TrainingRun(self, inputs, ctx)
        metrics = self.loop(run)
        run.save()
        return {**run.rows.metrics, **metrics}

    def loop(self, run: "TrainingRun") -> Metrics:
        """Trains ``run.policy.model`` to its last step; returns final metrics."""
        return run.fit(self.trainer(run))

    def trainer(self, run: "TrainingRun") -> "Trainer":
        """The trainer of a method that transformers' loop trains: ``run.trl(Trainer, Config, **own)``."""
        raise NotImplementedError(f"{type(self).__qualname__} states neither trainer(run) nor loop(run)")
