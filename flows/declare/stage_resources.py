"""What a stage asks of machines, against what its method does."""

from lineage.errors import ConfigError
from tasks.best import HELD_OUT_LOSS
from tasks.context import Launcher, Resources
from tasks.method import Method, Training


def check_resources(name: str, method: Method, resources: Resources) -> None:
    """That a training stage can run on what it asks for.

    Raises:
        ConfigError: names the fields that do not agree.
    """
    where = f"stages.{name}.resources"
    if not isinstance(method, Training):
        return
    try:
        resources.accumulation_steps(method.global_batch_size)
    except ConfigError as error:
        raise ConfigError(f"stages.{name}: {error}") from error
    if resources.num_workers % resources.num_nodes:
        raise ConfigError(
            f"{where}: num_workers={resources.num_workers} does not divide over num_nodes={resources.num_nodes}; "
            "num_workers counts the workers of all nodes: make it a multiple"
        )
    if resources.zero_stage and resources.num_workers == 1:
        raise ConfigError(
            f"{where}: zero_stage={resources.zero_stage} divides gradients and optimizer state over the workers, and "
            "num_workers=1; use num_workers=2 or more, or zero_stage=0"
        )
    if resources.zero_stage and method.has_own_loop:
        raise ConfigError(
            f"{where}: zero_stage={resources.zero_stage} needs transformers' trainer, and {type(method).__name__} has "
            "a loop of its own; set zero_stage=0"
        )
    if resources.num_workers > 1 and not resources.on_cluster:
        raise ConfigError(
            f"{where}: launcher={resources.launcher} runs one worker, num_workers={resources.num_workers} was asked; "
            f"use launcher={Launcher.CLUSTER} (or {Launcher.AUTO}), or num_workers=1"
        )
    keep_best = resources.keep_best
    measures = method.validation or (method.best and method.best.metric == HELD_OUT_LOSS)
    if keep_best and keep_best.metric == HELD_OUT_LOSS and not measures:
        raise ConfigError(
            f"{where}: keep_best.metric={HELD_OUT_LOSS} is measured only where models compete by it; state "
            f"stages.{name}.method.best.every_steps=N or validation.every_steps=N, or another metric, such as loss"
        )
