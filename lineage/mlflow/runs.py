"""Runs in MLflow: opened, filled from what a stage reports, closed with what its manifest says."""

import getpass
import json
from collections import Counter
from collections.abc import Iterable, Mapping

from lineage.artifact import SOURCE
from lineage.manifest import Manifest
from lineage.mlflow.client import (
    Dataset,
    DatasetInput,
    InputTag,
    LoggedModelInput,
    Metric,
    MlflowException,
    PatientClient,
    RunTag,
)
from lineage.mlflow.follow import Follower, Point
from lineage.mlflow.lookup import Recorded
from lineage.mlflow.models import EXISTS, Models
from lineage.mlflow.names import (
    DATA_CONTEXT,
    DIGEST,
    EXPERIMENT_KIND,
    GIT_COMMIT,
    LABELS,
    NOTE,
    RESUMED_AT,
    SOURCE_NAME,
    SOURCE_TYPE,
    STORE,
    USER,
    DataSet,
    accepted,
    is_model,
    is_model_source,
    source_data,
)
from lineage.mlflow.shelf import Shelf


class Runs:
    """Writes runs; ``added`` counts what was new."""

    def __init__(self, client: PatientClient, shelf: Shelf) -> None:
        self.client = client
        self.added: Counter[str] = Counter()
        self.models = Models(client, self.added)
        self._shelf = shelf
        self._experiments: dict[str, str] = {}

    def experiment(self, pipeline: str) -> str:
        """Id of a pipeline's experiment, made or brought back where it is not there."""
        if pipeline not in self._experiments:
            self._experiments[pipeline] = self._experiment(pipeline)
        return self._experiments[pipeline]

    def _experiment(self, pipeline: str) -> str:
        found = self.client.get_experiment_by_name(pipeline)
        if found is None:
            try:
                return str(self.client.create_experiment(pipeline, tags={EXPERIMENT_KIND: "custom_model_development"}))
            except MlflowException as error:  # another run was faster
                if error.error_code != EXISTS:
                    raise
                found = self.client.get_experiment_by_name(pipeline)
        if found.lifecycle_stage != "active":
            self.client.restore_experiment(found.experiment_id)
        return str(found.experiment_id)

    def create_run(self, pipeline: str, name: str, tags: Mapping[str, str], start: float) -> str:
        """Opens a run; ``start`` in seconds since the epoch."""
        common = {STORE: str(self._shelf.root), USER: _user(), SOURCE_NAME: "posttrain", SOURCE_TYPE: "LOCAL"}
        run = self.client.create_run(
            self.experiment(pipeline), start_time=int(start * 1000), tags={**common, **tags}, run_name=name
        )
        return str(run.info.run_id)

    def log_inputs(self, run_id: str, data: Mapping[str, DataSet], models: Iterable[str] = ()) -> None:
        """Links a run to the data and models that it reads."""
        datasets = [
            DatasetInput(
                Dataset(each.name, each.digest, each.source_type, each.source, profile=each.profile),
                [InputTag(DATA_CONTEXT, slot)],
            )
            for slot, each in data.items()
        ]
        links = [LoggedModelInput(model) for model in models]
        if datasets or links:
            self.client.log_inputs(run_id, datasets, links)

    def log(self, run_id: str, follower: Follower) -> None:
        """Writes what a stage has reported since the last time."""
        reading = follower.read()
        self.client.log_batch(run_id, metrics=[_metric(point) for point in reading.points])
        follower.keep(reading)

    def close(self, run_id: str, manifest: Manifest, follower: Follower, origins: str) -> Recorded:
        """Writes what is known at the commit: final metrics, sources with their rows, the model; then ends the run.

        Args:
            origins: what it was made from, in Markdown.
        """
        reading = follower.read()
        follower.keep(reading)
        end = int(manifest.provenance.end * 1000)
        metrics = [_metric(point) for point in reading.points]
        final = {accepted(name): value for name, value in manifest.metrics.items()}
        metrics += [
            Metric(name, value, end, follower.last_step) for name, value in final.items() if name not in follower.names
        ]
        labels = self._shelf.labels(manifest)
        tags = {DIGEST: manifest.output_digest, LABELS: json.dumps(labels), NOTE: origins}
        if manifest.provenance.resumed_at:
            tags[RESUMED_AT] = json.dumps(manifest.provenance.resumed_at)
        if manifest.provenance.git_commit:
            tags[GIT_COMMIT] = manifest.provenance.git_commit
        self.client.log_batch(run_id, metrics=metrics, tags=[RunTag(name, value) for name, value in tags.items()])
        self.log_inputs(run_id, _sources(manifest))
        experiment, model_id = self.experiment(manifest.pipeline), None
        if is_model(manifest):
            output, step = self._shelf.output(manifest), follower.last_step
            model_id = self.models.of_stage(manifest, run_id, experiment, output, labels, step, origins)
        self.client.set_terminated(run_id, "FINISHED", end)
        self.added["runs"] += 1
        return Recorded(run_id=run_id, experiment_id=experiment, model_id=model_id)


def _metric(point: Point) -> Metric:
    return Metric(point.name, point.value, point.time, point.step)


def _sources(manifest: Manifest) -> dict[str, DataSet]:
    rows = manifest.metrics.get("rows")
    sources = {slot: record for slot, record in manifest.inputs.items() if record.artifact.startswith(SOURCE)}
    return {slot: source_data(record, rows) for slot, record in sources.items() if not is_model_source(record)}


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return "unknown"
