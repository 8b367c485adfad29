"""All facts of this machine, for the pipeline that a configuration states."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from flows.declare.pipeline import Pipeline
from flows.doctor.facts import Configuration, Facts, Surroundings
from flows.doctor.gather_exposed import exposed_servers
from flows.doctor.gather_machine import gather_machine
from flows.doctor.gather_packages import gather_packages
from flows.doctor.gather_services import absent_variables, mlflow_service, prefect_service, ray_service
from lineage.errors import ConfigError
from lineage.mlflow.address import tracking_uri


def gather(overrides: Sequence[str], config_dir: Path | None) -> Facts:
    """Looks at everything once; of a configuration that is wrong, at the machine and what the environment names."""
    from flows.declare.config import load_pipeline

    pipeline, uri, wrong = None, None, Configuration()
    try:
        pipeline = load_pipeline(overrides, config_dir)
        uri = tracking_uri(pipeline.tracking.uri) if pipeline.tracking.mlflow else None
    except ConfigError as error:
        absent = _absent(error, overrides, config_dir)
        wrong = Configuration(refusal="" if absent else str(error), absent=absent)
    return Facts(
        packages=gather_packages(),
        machine=gather_machine(pipeline.store if pipeline else Path.cwd(), pipeline.stages if pipeline else ()),
        surroundings=_surroundings(pipeline, uri),
        configuration=wrong,
    )


def _absent(error: ConfigError, overrides: Sequence[str], config_dir: Path | None) -> dict[str, str]:
    """The variables for which a configuration cannot be read, if it is for them."""
    from omegaconf.errors import InterpolationResolutionError

    if not isinstance(error.__cause__, InterpolationResolutionError):
        return {}  # its files may not even be YAML
    return absent_variables(_stated(overrides, config_dir), os.environ)


def _stated(overrides: Sequence[str], config_dir: Path | None) -> Iterator[tuple[str, str]]:
    from flows.declare.compose import composed_files

    yield from (("an override", word) for word in overrides)
    for path, _ in composed_files(overrides, config_dir):
        yield str(path), path.read_text()


def _surroundings(pipeline: Pipeline | None, uri: str | None) -> Surroundings:
    return Surroundings(
        exposed=exposed_servers(),
        prefect=prefect_service(os.environ),
        mlflow=mlflow_service(uri, bool(pipeline and pipeline.tracking.uri), os.environ),
        ray=ray_service(),
        notify=pipeline.operation.notify if pipeline else None,
    )
