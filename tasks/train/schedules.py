"""Learning-rate schedules by name: the trainer's arguments that choose one, from the fields of a method."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tasks.recipe import TrainingRecipe

Arguments = dict[str, object]


def _warmup(method: "TrainingRecipe") -> Arguments:
    return {"warmup_steps": method.warmup_ratio}  # below 1, transformers 5 takes it for a ratio


# What a row returns are fields of transformers' TrainingArguments.
SCHEDULES: Mapping[str, Callable[["TrainingRecipe"], Arguments]] = {
    # Transformers' own "constant" has no warmup.
    "constant": lambda method: {"lr_scheduler_type": "constant_with_warmup", **_warmup(method)},
    "linear": lambda method: {"lr_scheduler_type": "linear", **_warmup(method)},
    "cosine": lambda method: {"lr_scheduler_type": "cosine", **_warmup(method)},
}


def schedule_args(method: "TrainingRecipe") -> Arguments:
    """Of the schedule that a method states."""
    return {"learning_rate": method.learning_rate, **SCHEDULES[method.lr_schedule](method)}
