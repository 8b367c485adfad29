"""The record of stages in MLflow: one way of writing, whether they run now or are read from their manifests."""

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from filelock import FileLock

from lineage.graph.places import artifact_at
from lineage.manifest import InputRecord, Manifest
from lineage.mlflow.address import shown
from lineage.mlflow.client import Param, PatientClient, Run
from lineage.mlflow.executions import RebuiltExecutions
from lineage.mlflow.follow import Follower
from lineage.mlflow.lookup import Key, Recorded, finished_run, is_dead, running, unfinished_run
from lineage.mlflow.models import model_tags
from lineage.mlflow.names import (
    FINGERPRINT,
    METHOD,
    OUTPUT,
    PARENT_RUN,
    PID,
    RECORDED_RUN,
    STAGE,
    DataSet,
    input_tags,
    is_model,
    is_model_source,
    parameters,
    stage_data,
)
from lineage.mlflow.reopened import half_recorded, has_inputs, process_tags, reopen
from lineage.mlflow.runs import Runs
from lineage.mlflow.shelf import Shelf
from lineage.run_file import RunFile
from lineage.store import Entry
from lineage.tracker import StageStart

_LOCK = "mlflow.lock"
_MAKER_SECONDS = 30.0  # for the run of a parent that another process has committed and is still writing to MLflow


class Record:
    """Writes stages, each after what it was made from."""

    def __init__(self, client: PatientClient, store: Path) -> None:
        self.client = client
        self.shelf = Shelf(store)
        self.runs = Runs(client, self.shelf)
        self.known: dict[Key, Recorded] = {}
        self.rebuilt = RebuiltExecutions(self.runs, self.shelf)
        self.lock = FileLock(store / _LOCK)  # two processes that miss the same run would both write it

    def open_stage(
        self, start: StageStart, pipeline: str, execution_id: str, began: float, tags: Mapping[str, str]
    ) -> str:
        """Opens the run of a stage: its recipe, and what it reads."""
        about = {
            FINGERPRINT: start.fingerprint, STAGE: start.stage, METHOD: start.method,
            OUTPUT: (start.directory.absolute() / "output").as_uri(), PARENT_RUN: execution_id,
        }  # fmt: skip
        run_id = self.runs.create_run(
            pipeline, start.title or start.stage, {**about, **input_tags(start.inputs), **tags}, began
        )
        self._describe(run_id, start, pipeline)
        return run_id

    def unfinished(self, start: StageStart, pipeline: str) -> Run | None:
        """The run of an attempt that did not finish."""
        return unfinished_run(
            self.client, self.runs.experiment(pipeline), self.shelf.root, start.stage, start.fingerprint
        )

    def reopen_stage(self, run: Run, start: StageStart, pipeline: str, tags: Mapping[str, str]) -> Mapping[str, int]:
        """Opens a run that did not finish; what it lacks of its description is added. Returns its last steps."""
        if not has_inputs(run):
            self._describe(str(run.info.run_id), start, pipeline)
        return reopen(self.client, run, tags)

    def _describe(self, run_id: str, start: StageStart, pipeline: str) -> None:
        """Its recipe, and what it reads."""
        self.client.log_batch(run_id, params=[Param(name, value) for name, value in parameters(start.recipe)])
        parents = {slot: start.parents.get(record.artifact) for slot, record in start.inputs.items()}
        models = [self.recorded(parent).model_id for parent in parents.values() if parent and is_model(parent)]
        models += [self._source_model(record, pipeline) for record in start.inputs.values() if is_model_source(record)]
        data = {slot: self._stage_data(parent) for slot, parent in parents.items() if parent and not is_model(parent)}
        self.runs.log_inputs(run_id, data, [model for model in dict.fromkeys(models) if model])

    def close_stage(self, run_id: str, manifest: Manifest, follower: Follower) -> Recorded:
        """Ends the run of a stage that was committed."""
        self.known[Key.of(manifest)] = recorded = self.runs.close(run_id, manifest, follower, self._origins(manifest))
        self._note_version(manifest, recorded)
        return recorded

    def _note_version(self, manifest: Manifest, recorded: Recorded) -> None:
        """Beside the output: `posttrain impact` need not ask MLflow, and `gc` knows which ones it has to ask."""
        directory, version = self.shelf.entry(manifest).path, self.runs.models.versions.get(Key.of(manifest))
        unknown = RunFile(uri="", run_id=recorded.run_id, execution_id=manifest.execution_run_id or "", words=[])
        note = RunFile.read(directory) or unknown
        registries = list(dict.fromkeys([*note.registered_in, shown(self.client.tracking_uri)]))
        noted = replace(note, version=version, registries=registries)
        if version is not None and noted != note:
            noted.write(directory)

    def _origins(self, manifest: Manifest) -> str:
        """Markdown: what fills each slot, one click away."""
        parents = self.shelf.parents(manifest)
        lines = []
        for slot, record in manifest.inputs.items():
            parent = parents.get(record.artifact)
            place = record.source.path if record.source else ""
            lines.append(f"- {slot}: {_link(parent, self.recorded(parent)) if parent else record.artifact} {place}")
        return "\n".join(["Made from", "", *lines]) if lines else "Made from nothing"

    def _source_model(self, record: InputRecord, pipeline: str) -> str | None:
        """The logged model of a source: of one that an alias names, that of the stage that made it."""
        place = artifact_at(self.shelf.root, record.source.path) if record.source else None
        manifest = Entry(self.shelf.root / place[0] / place[1]).manifest() if place else None
        if manifest:
            return self.recorded(manifest).model_id
        return self.runs.models.of_source(record, self.runs.experiment(pipeline))

    def _stage_data(self, parent: Manifest) -> DataSet:
        return stage_data(parent, self.shelf.output(parent), self.shelf.labels(parent))

    def recorded(self, manifest: Manifest) -> Recorded:
        """The finished run of an output; where MLflow has none it is written now, from the manifest."""
        key = Key.of(manifest)
        if key not in self.known:
            experiment = self.runs.experiment(manifest.pipeline)
            found = finished_run(self.client, experiment, manifest) or self._wait_for_maker(experiment, manifest)
            self.known[key] = found or self._backfill(experiment, manifest)
        return self.known[key]

    def _wait_for_maker(self, experiment: str, manifest: Manifest) -> Recorded | None:
        deadline = time.monotonic() + _MAKER_SECONDS
        while time.monotonic() < deadline:
            makers = [run for run in running(self.client, experiment) if run.info.run_id == manifest.mlflow_run_id]
            if not makers or is_dead(makers[0]) or makers[0].data.tags.get(PID) == str(os.getpid()):
                break
            time.sleep(0.5)
        return finished_run(self.client, experiment, manifest)

    def _backfill(self, experiment: str, manifest: Manifest) -> Recorded:
        with self.lock:
            return finished_run(self.client, experiment, manifest) or self.write(manifest)

    def register(self, manifest: Manifest) -> None:
        """Adds the registered version that a recorded model lacks."""
        recorded = self.recorded(manifest)
        tags = model_tags(manifest, self.shelf.output(manifest), self.shelf.labels(manifest))
        if recorded.model_id:
            self.runs.models.register(manifest, recorded, tags)
            self._note_version(manifest, recorded)

    def write(self, manifest: Manifest) -> Recorded:
        """Writes the run of an output that was made before, as its manifest tells it; ends one that was left open."""
        start = self.shelf.start_of(manifest)
        for parent in start.parents.values():
            self.recorded(parent)
        execution = self.rebuilt.of(manifest)
        tags = {RECORDED_RUN: manifest.mlflow_run_id} if manifest.mlflow_run_id else {}
        own = half_recorded(self.client, manifest)
        if own:
            run_id = str(own.info.run_id)
            logged = self.reopen_stage(own, start, manifest.pipeline, process_tags())
        else:
            run_id, logged = self.open_stage(start, manifest.pipeline, execution, manifest.provenance.start, tags), {}
        recorded = self.close_stage(run_id, manifest, Follower(start.directory / "metrics.jsonl", logged))
        self.rebuilt.add(
            execution, manifest, recorded, {name: self.recorded(each) for name, each in start.parents.items()}
        )
        return recorded


def _link(manifest: Manifest, recorded: Recorded) -> str:
    place = f"models/{recorded.model_id}" if recorded.model_id else f"runs/{recorded.run_id}"
    return f"[{manifest.stage}](#/experiments/{recorded.experiment_id}/{place})"
