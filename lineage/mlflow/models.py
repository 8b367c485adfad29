"""Models in MLflow: one logged model and one registered version per committed model; weights stay where they are."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from lineage.manifest import InputRecord, Manifest
from lineage.mlflow.address import is_server
from lineage.mlflow.client import LoggedModel, LoggedModelOutput, MlflowException, PatientClient
from lineage.mlflow.lookup import Key, Recorded
from lineage.mlflow.names import (
    DIGEST,
    EXTERNAL_MODEL,
    FINGERPRINT,
    LABELS,
    MODEL_VERSIONS,
    NOTE,
    OUTPUT,
    STAGE,
    model_name,
    produces,
)

EXISTS = "RESOURCE_ALREADY_EXISTS"


class Models:
    """Writes models; ``added`` counts what was new."""

    def __init__(self, client: PatientClient, added: Counter[str]) -> None:
        self._client = client
        self._added = added
        self._registered: set[str] = set()
        self._sources: dict[tuple[str, str], str] = {}
        self.versions: dict[Key, int] = {}  # those that are known
        self._knows_all_versions = False  # else MLflow is asked for each

    def expect_versions(self, versions: Mapping[Key, int]) -> None:
        """All versions that there are, so that MLflow need not be asked for each."""
        self.versions.update(versions)
        self._knows_all_versions = True

    def of_stage(
        self,
        manifest: Manifest,
        run_id: str,
        experiment_id: str,
        output: Path,
        labels: list[str],
        step: int,
        origins: str,
    ) -> str:
        """The logged model that a run has made, and its version."""
        tags = model_tags(manifest, output, labels)
        model = self._create(manifest.stage, experiment_id, run_id, produces(manifest), {**tags, NOTE: origins})
        self._client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step)])
        recorded = Recorded(run_id=run_id, experiment_id=experiment_id, model_id=str(model.model_id))
        self.register(manifest, recorded, tags)
        return str(model.model_id)

    def of_source(self, record: InputRecord, experiment_id: str) -> str:
        """The logged model of a source, in the experiment that reads it."""
        key = (experiment_id, record.fingerprint)
        if key not in self._sources:
            found = self._client.search_logged_models(
                [experiment_id], filter_string=f"tags.`{FINGERPRINT}` = '{record.fingerprint}'", max_results=1
            )
            self._sources[key] = str((found[0] if found else self._create_source(record, experiment_id)).model_id)
        return self._sources[key]

    def _create_source(self, record: InputRecord, experiment_id: str) -> LoggedModel:
        source = record.source
        assert source is not None
        place = Path(source.path).as_uri() if source.path.startswith("/") else source.path
        tags = {
            FINGERPRINT: record.fingerprint, STAGE: record.artifact, OUTPUT: place,
            DIGEST: record.digest or source.revision or "", LABELS: json.dumps(source.labels),
        }  # fmt: skip
        return self._create(record.artifact, experiment_id, None, source.kind, tags)

    def _create(
        self, name: str, experiment_id: str, run_id: str | None, kind: str, tags: dict[str, str]
    ) -> LoggedModel:
        model = self._client.create_logged_model(
            experiment_id, name=model_name(name), source_run_id=run_id, tags={**tags, EXTERNAL_MODEL: "true"},
            params={"output": tags[OUTPUT], "digest": tags[DIGEST], "fingerprint": tags[FINGERPRINT]}, model_type=kind,
        )  # fmt: skip
        self._added["models"] += 1
        self._client.finalize_logged_model(model.model_id, "READY")
        return model

    def register(self, manifest: Manifest, recorded: Recorded, tags: Mapping[str, str]) -> None:
        """A version of the pipeline's registered model; a model of the same bytes has one already."""
        self._ensure_registered(manifest.pipeline)
        key = Key.of(manifest)
        if key in self.versions or self._is_registered(key, manifest.pipeline):
            return
        link = f"#/experiments/{recorded.experiment_id}/models/{recorded.model_id}"
        # A server takes no path of a file system as a source; the tag has it there.
        on_server = is_server(self._client.tracking_uri)
        version = self._client.create_model_version(
            manifest.pipeline, f"models:/{recorded.model_id}" if on_server else tags[OUTPUT], run_id=recorded.run_id,
            tags=dict(tags), description=f"[{manifest.stage}]({link}) of `{tags[OUTPUT]}`", await_creation_for=0,
            model_id=recorded.model_id if on_server else None,
        )  # fmt: skip
        self._added["versions"] += 1
        self.versions[key] = int(version.version)
        if not on_server:  # which does it itself
            link_back = json.dumps([{"name": version.name, "version": version.version}])
            self._client.set_logged_model_tags(recorded.model_id, {MODEL_VERSIONS: link_back})

    def _ensure_registered(self, pipeline: str) -> None:
        if pipeline in self._registered:
            return
        try:
            self._client.create_registered_model(pipeline)
        except MlflowException as error:
            if error.error_code != EXISTS:
                raise
        self._registered.add(pipeline)

    def _is_registered(self, key: Key, pipeline: str) -> bool:
        if self._knows_all_versions:
            return False
        where = f"name = '{pipeline}' and tags.`{FINGERPRINT}` = '{key.fingerprint}'"
        for version in self._client.search_model_versions(where):
            if (version.tags.get(STAGE), version.tags.get(DIGEST)) == (key.stage, key.digest):
                self.versions[key] = int(version.version)
        return key in self.versions


def model_tags(manifest: Manifest, output: Path, labels: list[str]) -> dict[str, str]:
    """What a logged model and a registered version say of a manifest's weights, and where they lie."""
    return {
        FINGERPRINT: manifest.fingerprint, STAGE: manifest.stage, DIGEST: manifest.output_digest,
        OUTPUT: output.as_uri(), LABELS: json.dumps(labels),
    }  # fmt: skip
