"""Checks of what a pipeline says of its data: made with the plan, before a row is read."""

from flows.declare.pipeline import Pipeline, Stage, nearest
from lineage.artifact import Kind
from lineage.errors import ConfigError
from tasks.method import Training


def check_data(pipeline: Pipeline) -> None:
    """That what is stated by name of a stage or a slot names one.

    Raises:
        ConfigError: names the field, and what there is.
    """
    training = [name for name, stage in pipeline.stages.items() if isinstance(stage.method, Training)]
    for name in pipeline.accept_label_drop:
        if name not in training:
            raise ConfigError(
                f"accept_label_drop: no stage that trains is named {name}; there are: {', '.join(training)}"
                f"{nearest(name, training)}"
            )
    for name, stage in pipeline.stages.items():
        _check_mixture(name, stage)


def _check_mixture(name: str, stage: Stage) -> None:
    """Proportions name every slot of rows and nothing else."""
    proportions = stage.method.recipe().get("proportions")
    if not isinstance(proportions, dict):
        return
    consumes = stage.method.consumes
    slots = [slot for slot in stage.inputs if consumes.get(slot, consumes.get("*")) == Kind.ROWS]
    if set(proportions) != set(slots):
        raise ConfigError(
            f"stages.{name}.method.proportions: it names {', '.join(proportions)} and the slots of rows are "
            f"{', '.join(slots)}; state one share for each of them, with the sum 1.0"
        )
