"""Checks of what a pipeline says of its data: made with the plan, before a row is read."""

from flows.declare.pipeline import Pipeline, nearest
from lineage.errors import ConfigError
from tasks.data.formats.detect import check_direction
from tasks.data.preparing.options import Prepare
from tasks.method import Training


def check_data(pipeline: Pipeline) -> None:
    """That what is stated by name of a stage, a slot or a column names one.

    Raises:
        ConfigError: names the field, and what there is.
    """
    for name, source in pipeline.sources.items():
        check_direction(f"sources.{name}.columns", source.columns, source.format)
    training = [name for name, stage in pipeline.stages.items() if isinstance(stage.method, Training)]
    for field, names in (("accept_label_drop", pipeline.accept_label_drop), ("restart", pipeline.restart)):
        for name in names:
            if name not in training:
                raise ConfigError(
                    f"{field}: no stage that trains is named {name}; there are: {', '.join(training)}"
                    f"{nearest(name, training)}"
                )
    for name, stage in pipeline.stages.items():
        if isinstance(stage.method, Prepare):
            try:
                stage.method.row_slots(stage.inputs)
            except ConfigError as error:
                raise ConfigError(f"stages.{name}.method: {error}") from error
