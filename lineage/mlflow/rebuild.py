"""Refills MLflow from the manifests of a store."""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from lineage.errors import ArtifactError
from lineage.holder import Holder
from lineage.manifest import Manifest
from lineage.mlflow.client import PatientClient
from lineage.mlflow.executions import end_dead_runs
from lineage.mlflow.lookup import Key, Links, read_links
from lineage.mlflow.names import is_model
from lineage.mlflow.record import Record
from lineage.mlflow.registry import move_alias
from lineage.promotions import read_events, stacks
from lineage.store import Store

_COUNTED = ("executions", "runs", "models", "versions", "aliases")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Rebuilt:
    """What was added, and how many runs were there before."""

    added: Mapping[str, int]
    present: int


def rebuild(client: PatientClient, store: Path, silent: Collection[Holder] = ()) -> Rebuilt:
    """Writes every run, model, version and alias that the store knows and MLflow does not; what is there stays.

    Args:
        silent: processes of other hosts of which nothing is heard any more: the runs that they left open are closed.
    """
    manifests = _manifests(store)
    pipelines = {manifest.pipeline for manifest in manifests}
    record = Record(client, store)
    with record.lock:
        experiments = [record.runs.experiment(pipeline) for pipeline in sorted(pipelines)]
        for experiment in experiments:
            end_dead_runs(client, experiment, silent)
        there = read_links(client, pipelines)
        record.known.update(there.runs)
        record.runs.models.expect_versions({key: number for key, (_, number) in there.versions.items()})
        missing = [manifest for manifest in manifests if not _is_there(manifest, there)]
        record.rebuilt.expect(missing)
        for manifest in missing:  # of those committed a moment ago their own process is about to write it
            record.recorded(manifest) if manifest.mlflow_run_id in there.living else record.write(manifest)
        record.rebuilt.close()
        for manifest in manifests:
            if is_model(manifest):
                record.register(manifest)
        counted = {**record.runs.added, "aliases": _aliases(client, store, manifests, there)}
    added = {name: counted.get(name, 0) for name in _COUNTED}
    return Rebuilt(added=added, present=len(manifests) - len(missing))


def _is_there(manifest: Manifest, there: Links) -> bool:
    key = Key.of(manifest)
    is_linked = key in there.runs and (there.runs[key].num_inputs > 0 or not manifest.inputs)
    return is_linked and (key in there.models or not is_model(manifest))


def _manifests(store: Path) -> list[Manifest]:
    """In order of their end: as they were registered, a parent before what was made from it."""
    found = []
    for _, entry in Store(store).entries():
        try:
            manifest = entry.manifest()
        except ArtifactError as error:
            logger.warning("%s", error)
            continue
        if manifest:
            found.append(manifest)
    return sorted(found, key=lambda manifest: manifest.provenance.end)


def _aliases(client: PatientClient, store: Path, manifests: list[Manifest], there: Links) -> int:
    """Gives each alias to its holder, in the registered model of the holder's pipeline."""
    pipelines = {(manifest.stage, manifest.fingerprint): manifest.pipeline for manifest in manifests}
    digests = {(manifest.stage, manifest.fingerprint): manifest.output_digest for manifest in manifests}
    moved = 0
    for alias, stack in stacks(read_events(store)).items():
        holder = stack[-1] if stack else None
        if holder is None:
            continue
        known = {stage: name for (stage, fingerprint), name in pipelines.items() if fingerprint == holder.fingerprint}
        stage = holder.stage or next(iter(known), None)
        if stage not in known:
            logger.warning("alias=%s fingerprint=%s state=lost: the store has no such model", alias, holder.fingerprint)
            continue
        if holder.digest and digests[stage, holder.fingerprint] != holder.digest:
            logger.warning(
                "alias=%s fingerprint=%s state=changed: other bytes were promoted", alias, holder.fingerprint
            )
            continue
        now = there.aliases.get(known[stage], {}).get(alias)
        if now is None or now != (stage, holder.fingerprint, digests[stage, holder.fingerprint]):
            move_alias(client, known[stage], alias, holder.fingerprint, stage)
            moved += 1
    return moved
