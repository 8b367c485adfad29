"""All facts of this machine, for the pipeline that a configuration states."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from flows.declare.pipeline import Pipeline
from flows.doctor.facts import Facts, Surroundings
from flows.doctor.gather_machine import gather_machine
from flows.doctor.gather_packages import gather_packages
from flows.doctor.gather_services import (
    absent_variables,
    exposed_servers,
    mlflow_service,
    prefect_service,
    ray_service,
)
from lineage.errors import ConfigError
from lineage.mlflow.address import tracking_uri


def gather(overrides: Sequence[str], config_dir: Path | None) -> Facts:
    """Looks at everything once.

    Raises:
        ConfigError: the configuration is wrong, in another way than that it names a variable that is not set.
    """
    from flows.declare.config import load_pipeline

    pipeline, absent = None, {}
    try:
        pipeline = load_pipeline(overrides, config_dir)
    except ConfigError:
        absent = absent_variables(dict(_stated(overrides, config_dir)), os.environ)
        if not absent:
            raise
    return Facts(
        packages=gather_packages(),
        machine=gather_machine(pipeline.store if pipeline else Path.cwd(), pipeline.stages if pipeline else ()),
        surroundings=_surroundings(pipeline, absent),
    )


def _stated(overrides: Sequence[str], config_dir: Path | None) -> Iterator[tuple[str, str]]:
    from flows.declare.compose import composed_files

    yield from (("an override", word) for word in overrides)
    for path, _ in composed_files(overrides, config_dir):
        yield str(path), path.read_text()


def _surroundings(pipeline: Pipeline | None, absent: dict[str, str]) -> Surroundings:
    tracking = pipeline.tracking if pipeline else None
    uri = tracking_uri(tracking.uri) if tracking and tracking.mlflow else None
    return Surroundings(
        exposed=exposed_servers(),
        prefect=prefect_service(os.environ),
        mlflow=mlflow_service(uri, bool(tracking and tracking.uri), os.environ),
        ray=ray_service(os.environ),
        notify=pipeline.operation.notify if pipeline else None,
        absent=absent,
    )
