"""Optimizers by name: the trainer's arguments that choose one, from the fields of a method."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tasks.recipe import TrainingRecipe

Arguments = dict[str, object]

# What a row returns are fields of transformers' TrainingArguments. One that transformers cannot build by name returns
# ``optimizer_cls_and_kwargs``, a parameter of its Trainer.
OPTIMIZERS: Mapping[str, Callable[["TrainingRecipe"], Arguments]] = {
    # Loshchilov and Hutter 2019, arXiv:1711.05101
    "adamw": lambda method: {"weight_decay": method.weight_decay},
}
DEFAULT = "adamw"  # what every method trains with, until a recipe can name another


def optimizer_args(method: "TrainingRecipe") -> Arguments:
    """Of the optimizer that a method trains with."""
    return OPTIMIZERS[DEFAULT](method)
