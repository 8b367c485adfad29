"""MLflow for other commands: its links, its aliases, and rebuilding it from the manifests."""

import contextlib
import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from sqlalchemy.exc import SQLAlchemyError

from lineage.errors import ArtifactError
from lineage.filesystem.owner import Owner
from lineage.fingerprint import short
from lineage.gc import deleted, record_deleted
from lineage.mlflow.address import connect, require_reachable, shown, tracking_uri
from lineage.mlflow.entities import Key, Recorded, Tag, is_model, recorded_of
from lineage.mlflow.executions import Executions, experiments, is_dead, pages, pipeline_of, where
from lineage.mlflow.sync import Mirror
from lineage.promotions import read_events, stacks
from lineage.record.run_file import RunFile
from lineage.secrets import redacted
from lineage.store import Entry, Manifest, Store

_COUNTED = ("executions", "runs", "models", "versions", "aliases")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Rebuilt:
    """What was added, how many runs were there before, and how many are of outputs that are now recorded as deleted."""

    added: Mapping[str, int]
    present: int
    lost: int = 0


@dataclass(frozen=True, kw_only=True)
class Links:
    """Everything that MLflow records about the artifacts of some pipelines.

    Args:
        runs: finished ones.
        stores: artifact -> the store that it was recorded from.
        models: artifact -> id of the logged model.
        versions: artifact -> number of the registered version.
        aliases: registered model -> alias -> artifact; None: a version that is none of ours.
        live, dead: ids of open runs, whose process writes them still, or is gone.
    """

    runs: Mapping[Key, Recorded]
    stores: Mapping[Key, str]
    models: Mapping[Key, str]
    versions: Mapping[Key, int]
    aliases: Mapping[str, Mapping[str, Key | None]]
    live: Collection[str]
    dead: Collection[str]

    def lacking(self, manifest: Manifest) -> list[str]:
        """What MLflow does not have of an artifact."""
        key = Key.of(manifest)
        run, is_registered = self.runs.get(key), is_model(manifest)
        lacks = {
            "finished run": run is None,
            "link from what it was made from to the run": run is not None and manifest.inputs and not run.num_inputs,
            "logged model": is_registered and key not in self.models,
            "registered version": is_registered and key not in self.versions,
        }
        return [what for what, is_lacking in lacks.items() if is_lacking]


@contextlib.contextmanager
def _client(uri: str | None, refusal: str) -> Iterator[MlflowClient]:
    """A client of the configured MLflow; its errors are ours.

    Raises:
        ConfigError: ``uri`` is no address of an MLflow that answers.
        ArtifactError: its database cannot be opened, or a call fails.
    """
    address = tracking_uri(uri)
    require_reachable(address, uri)
    place, doing = f"MLflow at {shown(address)}", "cannot be opened"
    remedy = "; move a damaged database file away, and `posttrain rebuild` makes a new one"
    try:
        client = connect(address)
        doing, remedy = refusal, ""
        yield client
    except (MlflowException, SQLAlchemyError) as error:
        cause = redacted(str(error).strip().partition("\n")[0])
        raise ArtifactError(f"{place} {doing}: {cause}{remedy}") from error
    except ImportError as error:
        raise ArtifactError(f"{place} cannot be opened: {error}; install the driver of its database") from error


def links(uri: str | None, pipelines: Collection[str]) -> Links:
    """Everything that MLflow records about the artifacts of some pipelines, in a few calls. Raises as ``_client``."""
    with _client(uri, "cannot be read") as client:
        return _links(client, pipelines)


def aliases(uri: str | None, pipelines: Collection[str]) -> dict[tuple[str, str], str]:
    """Stage and fingerprint of every model that these pipelines' registered models name, and the alias."""
    with _client(uri, "cannot be read") as client:
        _, named = _registered(client, pipelines)
        found = [(key, alias) for of_model in named.values() for alias, key in of_model.items() if key]
        return {(key.stage, key.fingerprint): alias for key, alias in found}


def set_alias(uri: str | None, pipeline: str, alias: str, fingerprint: str | None, stage: str | None = None) -> None:
    """Gives an alias of a pipeline's registered model to the newest version of a fingerprint; None takes it away.

    Args:
        uri: as ``tracking.uri`` has it.
        stage: where two stages share a fingerprint.

    Raises:
        ConfigError: ``uri`` is no address of an MLflow that answers.
        ArtifactError: MLflow has no such version, or refuses.
    """
    with _client(uri, f"does not move the alias {alias}") as client:
        _move_alias(client, pipeline, alias, fingerprint, stage)


def unregister_gone(uri: str | None, pipeline: str, folder: Path) -> None:
    """Deletes the versions of a pipeline's registered model that lay below a folder and are gone; then the empty model.

    Raises as ``_client``.
    """
    with _client(uri, f"does not delete the versions of registered model {pipeline} whose weights are gone") as client:
        versions = _versions(client, f"name = '{pipeline}'")
        places = [Path(unquote(urlsplit(each.tags.get(Tag.OUTPUT, "")).path)) for each in versions]
        gone = [
            each for each, place in zip(versions, places, strict=True)
            if place.is_relative_to(folder) and not place.exists()
        ]  # fmt: skip
        for version in gone:
            client.delete_model_version(pipeline, str(version.version))
        if gone and len(gone) == len(versions):
            client.delete_registered_model(pipeline)


def refill(uri: str | None, store: Path, silent: Collection[Owner] = ()) -> Rebuilt:
    """Writes every run, model, version and alias that the store has and MLflow lacks.

    Runs that nothing writes any more are closed, and finished ones whose outputs are gone are recorded as deleted.

    Args:
        silent: processes of other hosts whose heartbeats timed out: their open runs are closed.

    Raises as ``_client``.
    """
    with _client(uri, "is not refilled") as client:
        runs = Executions(client, store, silent=silent)
        mirror = Mirror(runs)
        finished, unfinished = _entries(store)
        manifests = [manifest for _, manifest in finished]
        pipelines = sorted({manifest.pipeline for manifest in manifests})
        there = _links(client, pipelines)
        mirror.versions.update(there.versions)
        whole = [Key.of(each) for each in manifests if not there.lacking(each)]
        mirror.finished.update({key: there.runs[key] for key in whole})
        for each in sorted(manifests, key=lambda manifest: manifest.provenance.start, reverse=True):
            runs.began[str(each.execution_run_id)] = each.provenance.start
        for entry in [*(entry for entry, _ in finished), *unfinished]:
            mirror.sync(entry)
        runs.close_rebuilt()
        for experiment in {*experiments(client, pipelines), *_experiments_of(client, store)}:
            runs.close_dead(experiment)
        held, entry_of = {(each.stage, each.fingerprint) for each in manifests}, Store(store).entry
        keys = {(key.stage, key.fingerprint) for key in lost_outputs(there, store, held)}
        lost = sorted(key for key in keys if not entry_of(*key).path.exists())  # else its manifest is damaged
        for key in lost:
            record_deleted(store, *key)
        moved = _restore_aliases(client, store, manifests, there)
    counted = {**runs.added, "aliases": moved}
    present = len(manifests) - counted.get("runs", 0)
    return Rebuilt(added={name: counted.get(name, 0) for name in _COUNTED}, present=present, lost=len(lost))


def close_left(uri: str | None, store: Path, directories: Collection[str], silent: Collection[Owner] = ()) -> None:
    """Ends what a killed command left open, as its stages ended. Raises as ``_client``.

    Args:
        directories: of its stages.
        silent: as in ``refill``.
    """
    with _client(uri, "is not completed") as client:
        runs = Executions(client, store, silent=silent)
        mirror = Mirror(runs)
        for path in map(Path, directories):
            note = RunFile.read(path)
            if note and note.uri == runs.uri:
                mirror.sync(Entry(path))
        runs.close_rebuilt()
        for experiment in _experiments_of(client, store):
            runs.close_dead(experiment)


def _experiments_of(client: MlflowClient, store: Path) -> list[str]:
    """The experiments with an open run of a store, also of pipelines of which the store has nothing any more."""
    known = [each.experiment_id for each in pages(client.search_experiments)]
    opened = f"attributes.status = 'RUNNING' and {where({Tag.STORE: str(store)})}"
    return sorted({str(run.info.experiment_id) for run in pages(client.search_runs, known, opened)})


def lost_outputs(found: Links, store: Path, held: Collection[tuple[str, str]]) -> Iterator[Key]:
    """The artifacts with a run from a store that no longer has them, and that `gc` has not deleted.

    Args:
        held: stage and fingerprint of those that it has.
    """
    known = {*held, *deleted(store)}
    for key in found.runs:
        if found.stores[key] == str(store) and (key.stage, key.fingerprint) not in known:
            yield key


def _entries(store: Path) -> tuple[list[tuple[Entry, Manifest]], list[Entry]]:
    """Finished ones in the order of their end, as they were registered, a parent before its children; and the rest."""
    finished, unfinished = [], []
    for _, entry in Store(store).entries():
        try:
            manifest = entry.manifest()
        except ArtifactError as error:
            logger.warning("%s", error)
            continue
        if manifest:
            finished.append((entry, manifest))
        else:
            unfinished.append(entry)
    return sorted(finished, key=lambda each: each[1].provenance.end), unfinished


def _restore_aliases(client: MlflowClient, store: Path, manifests: list[Manifest], there: Links) -> int:
    """Gives each alias to its owner, in the registered model of the owner's pipeline; returns how many moved."""
    moved = 0
    for alias, stack in stacks(read_events(store)).items():
        owner = stack[-1] if stack else None
        if owner is None:
            continue
        found = [each for each in manifests if each.fingerprint == owner.fingerprint]
        found = [each for each in found if owner.stage in (None, each.stage)]
        if not found:
            logger.warning("alias=%s fingerprint=%s state=lost: the store has no such model", alias, owner.fingerprint)
        elif owner.digest and found[0].output_digest != owner.digest:
            logger.warning("alias=%s fingerprint=%s state=changed: other bytes now", alias, owner.fingerprint)
        elif there.aliases.get(found[0].pipeline, {}).get(alias) != Key.of(found[0]):
            _move_alias(client, found[0].pipeline, alias, owner.fingerprint, found[0].stage)
            moved += 1
    return moved


def _move_alias(client: MlflowClient, pipeline: str, alias: str, fingerprint: str | None, stage: str | None) -> None:
    if fingerprint is None:
        try:
            client.delete_registered_model_alias(pipeline, alias)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
        return
    found = _versions(client, f"name = '{pipeline}' and tags.`{Tag.FINGERPRINT}` = '{fingerprint}'")
    numbers = [int(version.version) for version in found if stage in (None, version.tags.get(Tag.STAGE))]
    if not numbers:
        raise ArtifactError(
            f"registered model {pipeline} of MLflow at {shown(client.tracking_uri)} has no version of "
            f"{stage or 'a model'}@{short(fingerprint)}; `posttrain rebuild` adds what its manifests say"
        )
    client.set_registered_model_alias(pipeline, alias, str(max(numbers)))


def _links(client: MlflowClient, pipelines: Collection[str]) -> Links:
    known = experiments(client, pipelines)
    runs: dict[Key, Recorded] = {}
    stores: dict[Key, str] = {}
    models: dict[Key, str] = {}
    opened = []
    if known:
        finished = f"attributes.status = 'FINISHED' and tags.`{Tag.FINGERPRINT}` LIKE '%'"
        ended = pages(client.search_runs, [*known], finished, order_by=["attributes.end_time ASC"])  # the newest wins
        for run in (each for each in ended if pipeline_of(each, known) in pipelines):
            # A search does not tell the input models: where a run read no data, the run itself is asked for.
            whole = run if run.inputs and run.inputs.dataset_inputs else client.get_run(run.info.run_id)
            runs[Key.tagged(run.data.tags)] = recorded_of(whole)
            stores[Key.tagged(run.data.tags)] = str(run.data.tags.get(Tag.STORE))
        logged = (each for each in pages(client.search_logged_models, [*known]) if Tag.FINGERPRINT in each.tags)
        models = {Key.tagged(model.tags): str(model.model_id) for model in logged}
        opened = list(pages(client.search_runs, [*known], "attributes.status = 'RUNNING'"))
    dead = {str(run.info.run_id) for run in opened if is_dead(run)}
    live = {str(run.info.run_id) for run in opened} - dead
    versions, named = _registered(client, pipelines)
    return Links(runs=runs, stores=stores, models=models, versions=versions, aliases=named, live=live, dead=dead)


def _registered(
    client: MlflowClient, pipelines: Collection[str]
) -> tuple[dict[Key, int], dict[str, dict[str, Key | None]]]:
    """Artifact -> number of its newest version; registered model -> alias -> artifact."""
    versions: dict[Key, int] = {}
    named: dict[str, dict[str, Key | None]] = {}
    for name in pipelines:
        ours = [each for each in _versions(client, f"name = '{name}'") if Tag.FINGERPRINT in each.tags]
        numbers = {int(each.version): Key.tagged(each.tags) for each in ours}
        versions |= {key: number for number, key in sorted(numbers.items())}
        for registered in client.search_registered_models(f"name = '{name}'"):
            named[name] = {alias: numbers.get(int(number)) for alias, number in registered.aliases.items()}
    return versions, named


def _versions(client: MlflowClient, filters: str) -> list[ModelVersion]:
    return list(pages(client.search_model_versions, filters))
