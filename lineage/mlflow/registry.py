"""The model registry for other commands: aliases, and what MLflow knows of a store. Imports no mlflow until asked."""

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from lineage.errors import ArtifactError
from lineage.fingerprint import short
from lineage.holder import Holder
from lineage.mlflow.address import require_reachable, shown, sqlite_file, tracking_uri
from lineage.secrets import redacted

if TYPE_CHECKING:
    from lineage.mlflow.client import PatientClient
    from lineage.mlflow.lookup import Links
    from lineage.mlflow.rebuild import Rebuilt

_GONE = "RESOURCE_DOES_NOT_EXIST"


def set_alias(uri: str | None, pipeline: str, alias: str, fingerprint: str | None, stage: str | None = None) -> None:
    """Gives an alias of a pipeline's registered model to the newest version of a fingerprint; None takes it away.

    Args:
        uri: as ``tracking.uri`` states it.
        stage: where two stages share a fingerprint.

    Raises:
        ConfigError: ``uri`` is no address of an MLflow that answers.
        ArtifactError: MLflow has no such version, or refuses.
    """
    from lineage.mlflow.client import MlflowException

    client = _client(uri)
    try:
        move_alias(client, pipeline, alias, fingerprint, stage)
    except MlflowException as error:
        raise ArtifactError(
            f"MLflow at {shown(client.tracking_uri)} does not move the alias {alias}: {error}"
        ) from error


def move_alias(
    client: "PatientClient", pipeline: str, alias: str, fingerprint: str | None, stage: str | None = None
) -> None:
    """As ``set_alias``, with a client that is there."""
    from lineage.mlflow.client import MlflowException
    from lineage.mlflow.lookup import versions_of

    if fingerprint is None:
        try:
            client.delete_registered_model_alias(pipeline, alias)
        except MlflowException as error:
            if error.error_code != _GONE:
                raise
        return
    found = versions_of(client, pipeline, fingerprint, stage)
    if not found:
        raise ArtifactError(
            f"registered model {pipeline} of MLflow at {shown(client.tracking_uri)} has no version of "
            f"{stage or 'a model'}@{short(fingerprint)}; `posttrain rebuild` adds what its manifests say"
        )
    client.set_registered_model_alias(pipeline, alias, found[-1])


def unregister_gone(uri: str | None, pipeline: str, folder: Path) -> None:
    """Deletes the versions of a pipeline's registered model that lay below a folder and are gone; then the empty model.

    Raises:
        ConfigError: ``uri`` is no address of an MLflow that answers.
        ArtifactError: MLflow refuses.
    """
    from lineage.mlflow.client import FAILURES
    from lineage.mlflow.lookup import registered_versions
    from lineage.mlflow.names import OUTPUT

    client = _client(uri)
    try:
        versions = list(registered_versions(client, pipeline))
        places = [Path(unquote(urlsplit(each.tags.get(OUTPUT, "")).path)) for each in versions]
        gone = [
            each for each, place in zip(versions, places, strict=True)
            if place.is_relative_to(folder) and not place.exists()
        ]  # fmt: skip
        for version in gone:
            client.delete_model_version(pipeline, str(version.version))
        if gone and len(gone) == len(versions):
            client.delete_registered_model(pipeline)
    except FAILURES as error:
        raise ArtifactError(
            f"MLflow at {shown(client.tracking_uri)} does not delete the versions of registered model {pipeline} whose "
            f"weights are gone: {_first_line(error)}"
        ) from error


def links(uri: str | None, pipelines: Collection[str]) -> "Links":
    """All that MLflow says of the artifacts of some pipelines, in a few calls.

    Raises:
        ConfigError: ``uri`` is no address of an MLflow that answers.
        ArtifactError: MLflow's database cannot be read.
    """
    from lineage.mlflow.client import FAILURES
    from lineage.mlflow.lookup import read_links

    client = _client(uri)
    try:
        return read_links(client, pipelines)
    except FAILURES as error:
        raise ArtifactError(f"MLflow at {shown(client.tracking_uri)} cannot be read: {_first_line(error)}") from error


def aliases(uri: str | None, pipelines: Collection[str]) -> dict[tuple[str, str], str]:
    """Stage and fingerprint of every model that an alias of these pipelines' registered models names; and that alias.

    Raises:
        ConfigError: ``uri`` is no address of an MLflow that answers.
        ArtifactError: MLflow's database cannot be read.
    """
    from lineage.mlflow.client import FAILURES
    from lineage.mlflow.lookup import aliased

    client = _client(uri)
    try:
        return dict(aliased(client, pipelines))
    except FAILURES as error:
        raise ArtifactError(f"MLflow at {shown(client.tracking_uri)} cannot be read: {_first_line(error)}") from error


def refill(uri: str | None, store: Path, silent: Collection[Holder] = ()) -> "Rebuilt":
    """Writes to MLflow all that the manifests of a store say and it does not know.

    Args:
        silent: as in ``rebuild``.

    Raises:
        ConfigError: ``uri`` is no address of an MLflow that answers.
        ArtifactError: MLflow refuses.
    """
    from lineage.mlflow.client import FAILURES, write_without_waiting
    from lineage.mlflow.rebuild import rebuild

    file = sqlite_file(tracking_uri(uri))
    if file and not file.exists():
        write_without_waiting()
    client = _client(uri)
    try:
        return rebuild(client, store, silent)
    except FAILURES as error:
        raise ArtifactError(f"MLflow at {shown(client.tracking_uri)} is not refilled: {_first_line(error)}") from error


def _client(uri: str | None) -> "PatientClient":
    address = tracking_uri(uri)
    require_reachable(address, uri)
    from lineage.mlflow.client import FAILURES, connect

    try:
        return connect(address)
    except FAILURES as error:
        raise ArtifactError(
            f"MLflow at {shown(address)} cannot be opened: {_first_line(error)}; move a damaged database file away, "
            "and `posttrain rebuild` makes a new one"
        ) from error
    except ImportError as error:
        raise ArtifactError(
            f"MLflow at {shown(address)} cannot be opened: {_first_line(error)}; install the driver of its database"
        ) from error


def _first_line(error: Exception) -> str:
    return redacted(str(error).strip().partition("\n")[0])
