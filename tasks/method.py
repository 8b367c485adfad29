"""A method: a frozen dataclass of hyperparameters, and how it runs. ``docs/add_a_method.md`` shows one."""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar

from lineage.errors import ConfigError
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
    "LOOP_FIELDS",
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


# The fields that transformers' trainer applies; in a loop of its own, ``tasks.train.own_loop.Optimization`` does.
LOOP_FIELDS = frozenset({"precision", "weight_decay", "lr_schedule", "warmup_ratio", "max_grad_norm"})


@dataclass(frozen=True, kw_only=True)
class Training(TrainingRecipe):
    """A method that takes optimizer steps. It defines its fields, ``reads``, ``models`` and its ``trainer``.

    A method with a loop of its own defines ``loop`` instead (``tasks.train.own_loop``).

    Class attributes:
        applies: the fields of ``LOOP_FIELDS`` that a loop of its own applies. The others must keep their defaults, and
            are not in its recipe.
    """

    applies: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        cls.has_own_loop = cls.loop is not Training.loop

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.has_own_loop:
            self._check_own_loop()

    def recipe(self) -> dict[str, object]:
        """As of every training; without the fields that a loop of its own does not apply."""
        ignored = LOOP_FIELDS - self.applies if self.has_own_loop else frozenset()
        return {name: value for name, value in super().recipe().items() if name not in ignored}

    def _check_own_loop(self) -> None:
        """Refuses a value that the training would ignore."""
        name = type(self).__name__
        if self.best is not None:
            raise ConfigError(
                f"method.best: {name} has a loop of its own, which measures no competing models; set best=null"
            )
        defaults = {each.name: each.default for each in fields(self)}
        for field in sorted(LOOP_FIELDS - self.applies):
            found, default = getattr(self, field), defaults[field]
            if found != default:
                raise ConfigError(
                    f"{field}={found}: {name} has a loop of its own, which does not apply it; set {field}={default}, "
                    f'or apply it in {name}.loop (Optimization does) and add "{field}" to {name}.applies'
                )

    def run(self, inputs: Inputs, ctx: TrainContext) -> Metrics:
        """Trains, and writes the output."""
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
        raise NotImplementedError(f"{type(self).__qualname__} defines neither trainer(run) nor loop(run)")
