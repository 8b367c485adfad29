"""What a method is: a frozen dataclass of hyperparameters, and how it runs. ``docs/add_a_method.md`` shows one."""

from abc import abstractmethod
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
    from torch import Tensor
    from transformers import Trainer

    from tasks.train.pair_loss import Logps
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
    "PairLoss",
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


@dataclass(frozen=True, kw_only=True)
class PairLoss(Training):
    """A method on preference pairs whose loss is a function of the answers' log-probabilities.

    Prompt and answers go through one forward that computes no padding, and no logits beside those of the answers. Where
    ``models`` has a FROZEN_POLICY, that the reference is the policy is proven at step 0.
    """

    @abstractmethod
    def loss(self, chosen: "Logps", rejected: "Logps") -> "tuple[Tensor, dict[str, Tensor]]":
        """The loss of a micro batch, a mean over its pairs, and metrics: of each pair (B), or a number."""

    def trainer(self, run: "TrainingRun") -> "Trainer":
        """TRL's loop around ``loss``."""
        from trl import SFTConfig

        from tasks.train.pair_loss import pair_trainer

        return run.trl(pair_trainer(self.loss), SFTConfig)
