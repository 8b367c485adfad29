"""What MLflow holds of our artifacts, found by tag: run ids change when a database is rebuilt."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from lineage.lease import Holder
from lineage.manifest import Manifest
from lineage.mlflow.client import LoggedModel, PatientClient, Run
from lineage.mlflow.names import DIGEST, FINGERPRINT, HOST, PID, STAGE, STARTED, STORE
from lineage.mlflow.open_records import is_gone

_PAGE = 1000
_MODELS_PAGE = 100
ABSENT = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")  # what MLflow says of a run that it has not
_OURS = f"tags.`{FINGERPRINT}` LIKE '%'"


class Version(Protocol):
    """What is read of a registered version."""

    version: str | int
    tags: Mapping[str, str]


class Key(NamedTuple):
    """One artifact: two stages may share a fingerprint, and a stage that ran again may have given other bytes."""

    stage: str
    fingerprint: str
    digest: str

    @staticmethod
    def of(manifest: Manifest) -> "Key":
        return Key(manifest.stage, manifest.fingerprint, manifest.output_digest)


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """The finished run of an artifact, and the model that it gave."""

    run_id: str
    experiment_id: str
    model_id: str | None
    num_inputs: int = 0


@dataclass(frozen=True, kw_only=True)
class Links:
    """All that MLflow says of the artifacts of some pipelines.

    Args:
        runs: finished ones.
        stores: artifact -> the store that it was recorded from.
        models: artifact -> id of the logged model.
        versions: artifact -> registered model and version.
        aliases: registered model -> alias -> artifact; None: a version that is none of ours.
        living, dead: ids of open runs, whose process writes them still, or is gone.
    """

    runs: Mapping[Key, Recorded]
    stores: Mapping[Key, str]
    models: Mapping[Key, str]
    versions: Mapping[Key, tuple[str, int]]
    aliases: Mapping[str, Mapping[str, Key | None]]
    living: Collection[str]
    dead: Collection[str]


def read_links(client: PatientClient, pipelines: Collection[str]) -> Links:
    """Reads everything in a few calls, however many artifacts there are."""
    experiments = [experiment_of(client, name) for name in pipelines]
    known = [experiment for experiment in experiments if experiment]
    finished = list(_finished_runs(client, known))
    runs = {_key(run.data.tags): recorded_of(_with_models(client, run)) for run in finished}
    stores = {_key(run.data.tags): str(run.data.tags.get(STORE)) for run in finished}
    models = {_key(model.tags): str(model.model_id) for model in _models(client, known)}
    versions: dict[Key, tuple[str, int]] = {}
    aliases: dict[str, dict[str, Key | None]] = {}
    for name in pipelines:
        by_version: dict[str, Key] = {}
        for version in sorted(registered_versions(client, name), key=lambda version: int(version.version)):
            if FINGERPRINT in version.tags:
                by_version[str(version.version)] = key = _key(version.tags)
                versions[key] = (name, int(version.version))
        for registered in client.search_registered_models(f"name = '{name}'"):
            aliases[name] = {alias: by_version.get(str(number)) for alias, number in registered.aliases.items()}
    opened = [run for experiment in known for run in running(client, experiment)]
    dead = {str(run.info.run_id) for run in opened if is_dead(run)}
    living = {str(run.info.run_id) for run in opened} - dead
    return Links(
        runs=runs, stores=stores, models=models, versions=versions, aliases=aliases, living=living, dead=dead
    )  # fmt: skip


def aliased(client: PatientClient, pipelines: Collection[str]) -> Iterator[tuple[tuple[str, str], str]]:
    """Stage and fingerprint of each model of ours that has an alias, and the alias."""
    for name in pipelines:
        for registered in client.search_registered_models(f"name = '{name}'"):
            for alias in registered.aliases:
                tags = client.get_model_version_by_alias(name, alias).tags
                if FINGERPRINT in tags:
                    yield (tags.get(STAGE, ""), tags[FINGERPRINT]), alias


def versions_of(client: PatientClient, pipeline: str, fingerprint: str, stage: str | None = None) -> list[str]:
    """Numbers of the versions of a fingerprint, the newest last."""
    found = client.search_model_versions(f"name = '{pipeline}' and tags.`{FINGERPRINT}` = '{fingerprint}'")
    numbers = [int(version.version) for version in found if stage is None or version.tags.get(STAGE) == stage]
    return [str(number) for number in sorted(numbers)]


def experiment_of(client: PatientClient, pipeline: str) -> str | None:
    """Id of a pipeline's experiment, where there is one."""
    found = client.get_experiment_by_name(pipeline)
    return str(found.experiment_id) if found and found.lifecycle_stage == "active" else None


def finished_run(client: PatientClient, experiment_id: str, manifest: Manifest) -> Recorded | None:
    """The finished run of a manifest's output."""
    wanted = {FINGERPRINT: manifest.fingerprint, STAGE: manifest.stage, DIGEST: manifest.output_digest}
    where = " and ".join(f"tags.`{name}` = '{value}'" for name, value in wanted.items())
    runs = client.search_runs([experiment_id], f"attributes.status = 'FINISHED' and {where}", max_results=1)
    return recorded_of(runs[0]) if runs else None


def unfinished_run(client: PatientClient, experiment_id: str, store: Path, stage: str, fingerprint: str) -> Run | None:
    """The newest run of a stage in this store that did not finish: a kill may come before its id is written down."""
    wanted = {STORE: store, STAGE: stage, FINGERPRINT: fingerprint}
    where = " and ".join(f"tags.`{name}` = '{value}'" for name, value in wanted.items())
    order = ["attributes.start_time DESC"]
    runs = client.search_runs(
        [experiment_id], f"attributes.status != 'FINISHED' and {where}", order_by=order, max_results=1
    )
    return runs[0] if runs else None


def running(client: PatientClient, experiment_id: str) -> list[Run]:
    """The runs of an experiment that nobody has closed."""
    return list(_pages(client, [experiment_id], "attributes.status = 'RUNNING'"))


def is_dead(run: Run, silent: Collection[Holder] = ()) -> bool:
    """Whether the process that writes a run is gone; ``silent``: those of other hosts that are."""
    tags = run.data.tags
    if not {HOST, PID, STARTED} <= tags.keys():
        return False
    return is_gone(Holder(host=tags[HOST], pid=int(tags[PID]), started=float(tags[STARTED]), token=""), silent)


def recorded_of(run: Run) -> Recorded:
    """A finished run with the model that it gave."""
    outputs = run.outputs.model_outputs if run.outputs else []
    model_id = str(outputs[0].model_id) if outputs else None
    given = [*run.inputs.model_inputs, *run.inputs.dataset_inputs] if run.inputs else []
    return Recorded(
        run_id=str(run.info.run_id), experiment_id=str(run.info.experiment_id), model_id=model_id, num_inputs=len(given)
    )


def _with_models(client: PatientClient, run: Run) -> Run:
    """A search does not tell which models a run was given: where it was given no data, the run itself is asked for."""
    return run if run.inputs and run.inputs.dataset_inputs else client.get_run(run.info.run_id)


def _finished_runs(client: PatientClient, experiments: list[str]) -> Iterator[Run]:
    """Oldest first, so that of two runs of one artifact the newest is told."""
    where = f"attributes.status = 'FINISHED' and {_OURS}"
    yield from _pages(client, experiments, where, order_by=["attributes.end_time ASC"]) if experiments else ()


def _pages(
    client: PatientClient, experiments: list[str], where: str, order_by: list[str] | None = None
) -> Iterator[Run]:
    token = None
    while True:
        page = client.search_runs(experiments, where, max_results=_PAGE, order_by=order_by, page_token=token)
        yield from page
        token = page.token
        if not token:
            return


def _models(client: PatientClient, experiments: list[str]) -> Iterator[LoggedModel]:
    token = None
    while experiments:
        page = client.search_logged_models(experiments, max_results=_MODELS_PAGE, page_token=token)
        yield from (model for model in page if FINGERPRINT in model.tags)
        token = page.token
        if not token:
            return


def registered_versions(client: PatientClient, name: str) -> Iterator[Version]:
    """All versions of a registered model; none where there is no such model."""
    token = None
    while True:
        page = client.search_model_versions(f"name = '{name}'", max_results=_PAGE, page_token=token)
        yield from page
        token = page.token
        if not token:
            return


def _key(tags: Mapping[str, str]) -> Key:
    return Key(tags.get(STAGE, ""), tags[FINGERPRINT], tags.get(DIGEST, ""))
