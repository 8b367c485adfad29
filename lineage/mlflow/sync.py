"""Writes what a store has and MLflow lacks: ``Mirror.sync``, for a stage that runs, has ended, or was lost there."""

import json
from dataclasses import replace
from pathlib import Path

from mlflow.entities import DatasetInput, LoggedModelInput, LoggedModelOutput, Metric, Param, Run
from mlflow.exceptions import MlflowException

from lineage.artifact import SOURCE
from lineage.diagnosis.rules import as_line, live_findings
from lineage.graph.places import artifact_at
from lineage.mlflow.address import is_server
from lineage.mlflow.entities import (
    Key,
    Recorded,
    Reports,
    Tag,
    accepted,
    input_tags,
    is_model,
    is_model_source,
    metrics_of_models,
    model_name,
    model_tags,
    output_models,
    parameters,
    process_tags,
    produces,
    recorded_of,
    source_data,
    stage_data,
)  # fmt: skip
from lineage.mlflow.executions import EXISTS, KILLED_CAUSE, Executions, present, where
from lineage.record.attempts import attempts, resumed_at
from lineage.record.metrics_file import BENCHMARKS_FILE
from lineage.record.run_file import UNNAMED, RunFile, is_gone
from lineage.record.tracker import FINAL
from lineage.source.model_files import read_json
from lineage.store import Entry, InputRecord, Manifest, Store, rows_read

SAMPLES, NUM_SAMPLES = "samples.parquet", 10  # completions with their rewards, which reinforcement stages write
_SAMPLES_TABLE = "samples.json"


class Mirror:
    """MLflow as the mirror of one store.

    Args:
        runs: those of executions, and how runs are written.

    Attributes:
        finished: the runs that are known to be complete.
        versions: registered ones that are known.
    """

    def __init__(self, runs: Executions) -> None:
        self.runs, self.client = runs, runs.client
        self.root, self.store = runs.root, Store(runs.root)
        self.finished: dict[Key, Recorded] = {}
        self.versions: dict[Key, int] = {}
        self._open: dict[Path, tuple[float, Run, Reports]] = {}  # entry -> start of the attempt, run
        self._diagnosed: dict[Path, str] = {}  # entry -> tag
        self._labels: dict[tuple[str, str], set[str]] = {}

    # Stages.

    def sync(self, entry: Entry) -> Recorded | None:
        """Writes what the start record, the reports and the manifest of a stage contain and MLflow lacks.

        Idempotent, and one process at a time: several that miss the same run write it once. A stage without a manifest
        is written by the process that runs it, or by any other once that one is gone. None: nothing is recorded.
        """
        with self.runs.lock:
            try:
                manifest, note = entry.manifest(), RunFile.read(entry.path)
                if manifest:
                    return self._sync_finished(entry, manifest, note)
                return self._sync_unfinished(entry, note, note.start) if note and note.start else None
            except BaseException:
                self._open.pop(entry.path, None)  # the next call reads from MLflow what this one has written
                raise

    def recorded(self, manifest: Manifest) -> Recorded:
        """The finished run of an output."""
        found = self.finished.get(Key.of(manifest)) or self.sync(self._entry(manifest))
        return found or self._sync_finished(self._entry(manifest), manifest, None)

    def _sync_unfinished(self, entry: Entry, note: RunFile, start: Manifest) -> Recorded | None:
        if note.status == "RUNNING" and not self.runs.is_ours(note):
            if not note.writer or not is_gone(note.writer, self.runs.silent):
                return None
            note = replace(note, status="KILLED", cause=KILLED_CAUSE)
            note.write(entry.path)
        elif note.status != "RUNNING" and entry.path not in self._open and note.uri == self.runs.uri:
            run = self.runs.find(note.run_id)
            if run and run.info.status == note.status:  # already ended
                return recorded_of(run)
        run, reports = self._opened(entry, start, note)
        run_id = str(run.info.run_id)
        self.client.log_batch(run_id, metrics=reports.new())
        self._diagnose(entry, run_id)
        if note.status != "RUNNING":
            self.runs.end(run_id, note.status, note.cause)
            del self._open[entry.path]
        return Recorded(run_id=run_id, experiment_id=str(run.info.experiment_id))

    def _diagnose(self, entry: Entry, run_id: str) -> None:
        """Tags a run with the findings on its curves, if they have changed."""
        found = "\n".join(map(as_line, live_findings(entry.path)))
        if found != self._diagnosed.get(entry.path, ""):
            self.runs.tag(run_id, {Tag.DIAGNOSIS: found})
            self._diagnosed[entry.path] = found

    def _sync_finished(self, entry: Entry, manifest: Manifest, note: RunFile | None) -> Recorded:
        """Completes a finished stage: the remaining reports, final metrics, sources with their rows, the model."""
        key, opened = Key.of(manifest), self._open.get(entry.path)
        if key in self.finished and (opened is None or opened[1].info.run_id == self.finished[key].run_id):
            return self.finished[key]
        for parent in self.parents(manifest).values():
            self.recorded(parent)
        found = self._finished_run(entry, manifest, note)
        recorded = self._whole(manifest, found) if found else None
        if recorded is None:
            recorded = self._complete(entry, manifest, note, found)
            self.runs.added["runs"] += 1
        if recorded.model_id:
            self._register(entry, manifest, recorded)
        self.finished[key] = recorded
        self._open.pop(entry.path, None)
        return recorded

    def _complete(self, entry: Entry, manifest: Manifest, note: RunFile | None, found: Run | None) -> Recorded:
        end = int(manifest.provenance.end * 1000)
        run, reports = self._opened(entry, manifest, note, found)
        run_id, experiment = str(run.info.run_id), str(run.info.experiment_id)
        metrics = reports.new()
        last = reports.last_step
        final = [Metric(accepted(name), value, end, last) for name, value in manifest.metrics.items()]
        # Of a curve that ends with another value, such as a mean over steps: beside the curve, by a name of its own.
        apart = [Metric(f"{FINAL}{each.key}", each.value, end, last) for each in final if reports.ends_apart(each)]
        metrics += [each for each in (*final, *apart) if each.key not in reports.logged]
        labels, origins = self.labels(manifest), self._origins(manifest)
        tags = {Tag.DIGEST: manifest.output_digest, Tag.LABELS: json.dumps(labels), Tag.NOTE: origins}
        if manifest.provenance.resumed_at:
            tags[Tag.RESUMED_AT] = json.dumps(manifest.provenance.resumed_at)
        if manifest.provenance.git_commit:
            tags[Tag.GIT_COMMIT] = manifest.provenance.git_commit
        self.client.log_batch(run_id, metrics=metrics)
        self.runs.tag(run_id, tags)
        self._diagnose(entry, run_id)
        rows = rows_read(manifest, entry.output)
        sources = {slot: each for slot, each in manifest.inputs.items() if each.artifact.startswith(SOURCE)}
        self._add_inputs(
            run_id,
            [source_data(slot, each, rows.get(slot)) for slot, each in sources.items() if not is_model_source(each)],
            [],
        )
        self._add_samples(run_id, entry.output / SAMPLES)
        model_id = None
        if is_model(manifest):
            about = {**model_tags(manifest, entry.output.absolute(), labels), Tag.NOTE: origins}
            model_id = self._model(manifest.stage, experiment, run_id, produces(manifest), about)
            if model_id not in output_models(self.client.get_run(run_id)):
                self.client.log_outputs(run_id, [LoggedModelOutput(model_id, last)])
        data, models = self._inputs(manifest, experiment)
        shown = [reports.latest.get(each.key, each) for each in final] + apart  # as the run has them, where they go too
        settings = [read_json(each, BENCHMARKS_FILE) for each in (entry.output, *entry.path.glob("evaluation/step-*"))]
        named = {accepted(str(name)) for each in settings if isinstance(each, dict) for name in each}
        measured = metrics_of_models(shown, model_id, models, data, {"lm_eval", *named})
        self.client.log_batch(run_id, metrics=measured)
        tags = self.client.get_run(run_id).data.tags
        if Tag.CAUSE in tags:  # of the previous attempt
            self.client.delete_tag(run_id, Tag.CAUSE)
        self.client.set_terminated(run_id, "FINISHED", end)
        parents = {stage: self.recorded(parent) for stage, parent in self.parents(manifest).items()}
        self.runs.reuse(tags[Tag.PARENT_RUN], parents)
        return Recorded(run_id=run_id, experiment_id=experiment, model_id=model_id, num_inputs=len(manifest.inputs))

    def _opened(
        self, entry: Entry, start: Manifest, note: RunFile | None, run: Run | None = None
    ) -> tuple[Run, Reports]:
        """The run of an attempt, found or created, with everything that is known at the start."""
        opened = self._open.get(entry.path)
        began = note.start.provenance.start if note and note.start else start.provenance.start
        if opened and opened[0] == began:
            return opened[1:]
        run = run or self._unfinished_run(start, note)
        tags = self._start_tags(entry, start, note)
        if run is None:
            title = (note.title if note else "") or start.stage
            recorded = {Tag.RECORDED_RUN: start.mlflow_run_id} if start.mlflow_run_id else {}
            names = note.names if note else UNNAMED
            run = self.runs.create(start.pipeline, title, {**tags, **recorded}, start.provenance.start, names)
        else:
            self.runs.tag(run.info.run_id, {**(note.names.tags if note else {}), **tags})
            if note and note.status == "RUNNING" and not start.output_digest:
                self.client.update_run(run.info.run_id, status="RUNNING")
                if Tag.CAUSE in run.data.tags:
                    self.client.delete_tag(run.info.run_id, Tag.CAUSE)
        run_id = str(run.info.run_id)
        execution = tags[Tag.PARENT_RUN]

        def opened_here(now: RunFile) -> RunFile:  # its stage may have ended meanwhile, or another process taken it
            is_it = note and (now.start, now.writer) == (note.start, note.writer)
            return replace(now, uri=self.runs.uri, run_id=run_id, execution_id=execution) if is_it else now

        RunFile.change(entry.path, opened_here)
        params = [Param(*each) for each in parameters(start.recipe) if each[0] not in run.data.params]
        self.client.log_batch(run_id, params=params)
        data, models = self._inputs(start, str(run.info.experiment_id))
        self._add_inputs(run_id, [*data.values()], [each for each in dict.fromkeys(models.values()) if each])
        histories = {name: self.client.get_metric_history(run_id, name) for name in run.data.metrics}
        logged = {name: max(each.step for each in history) for name, history in histories.items()}
        self._open[entry.path] = began, run, Reports(entry.metrics, logged)
        return self._open[entry.path][1:]

    def _start_tags(self, entry: Entry, start: Manifest, note: RunFile | None) -> dict[str, str]:
        tags = {
            Tag.FINGERPRINT: start.fingerprint, Tag.STAGE: start.stage, Tag.METHOD: start.method,
            Tag.OUTPUT: entry.output.absolute().as_uri(), Tag.PARENT_RUN: self.runs.of(start, note),
            **input_tags(start.inputs),
        }  # fmt: skip
        if note and note.writer:
            tags |= process_tags(note.writer)
        if note and note.resumes:
            tags[Tag.RESUMED_AT] = json.dumps(resumed_at(attempts(entry.path)))
        return tags

    def _unfinished_run(self, start: Manifest, note: RunFile | None) -> Run | None:
        """The run that an attempt continues: the previous attempt's, or its own, whose note a kill prevented."""
        ids = [note.run_id if note and note.uri == self.runs.uri else None, start.mlflow_run_id]
        for run in (self.runs.find(run_id) for run_id in ids if run_id):
            about = (run.data.tags.get(Tag.STAGE), run.data.tags.get(Tag.FINGERPRINT)) if run else None
            if run and run.info.status != "FINISHED" and about == (start.stage, start.fingerprint):
                return run
        these = where({Tag.STORE: str(self.root), Tag.STAGE: start.stage, Tag.FINGERPRINT: start.fingerprint})
        unfinished = f"attributes.status != 'FINISHED' and {these}"
        run = next(self.runs.search(start.pipeline, unfinished, order_by=["attributes.start_time DESC"]), None)
        is_own = run is not None and run.info.start_time == int(start.provenance.start * 1000)
        if run is None or start.output_digest or is_own or (note and note.resumes):
            return run
        if run.info.status == "RUNNING":  # the stage restarts
            self.client.set_terminated(run.info.run_id, "KILLED")
        return None

    def _finished_run(self, entry: Entry, manifest: Manifest, note: RunFile | None) -> Run | None:
        these = where(
            {Tag.FINGERPRINT: manifest.fingerprint, Tag.STAGE: manifest.stage, Tag.DIGEST: manifest.output_digest}
        )
        run = next(self.runs.search(manifest.pipeline, f"attributes.status = 'FINISHED' and {these}"), None)
        opened = self._open.get(entry.path)
        ids = [
            opened[1].info.run_id if opened else None, note.run_id if note and note.uri == self.runs.uri else None,
            manifest.mlflow_run_id,  # None: MLflow did not answer in time
        ]  # fmt: skip
        own = next((found for found in map(self.runs.find, filter(None, ids)) if found), None)
        if run and own and own.info.run_id != run.info.run_id:
            # The stage ran again, since its folder was deleted, and gave the same bytes: its new run may be open.
            return own if own.info.status == "FINISHED" else None
        return self.client.get_run(run.info.run_id) if run else None

    def _whole(self, manifest: Manifest, run: Run) -> Recorded | None:
        """A finished run with its inputs and its model."""
        found = recorded_of(run)
        if (manifest.inputs and not found.num_inputs) or (is_model(manifest) and not found.model_id):
            return None
        if found.model_id and present(self.client.get_logged_model, found.model_id) is None:
            return None
        return found

    def abandon(self, entry: Entry, cause: str) -> None:
        """Ends the run of a stage whose directory another process took, unless that process continues the run."""
        with self.runs.lock:
            opened, writer = self._open.pop(entry.path, None), self.runs.writer
            run = self.runs.find(opened[1].info.run_id) if opened else None
            if (
                run
                and writer
                and run.info.status == "RUNNING"
                and process_tags(writer).items() <= run.data.tags.items()
            ):
                self.runs.end(run.info.run_id, "KILLED", cause)

    # What stages are made from.

    def parents(self, manifest: Manifest) -> dict[str, Manifest]:
        """Stage -> manifest, for the stages that an output was made from and that the store still has."""
        records = [record for record in manifest.inputs.values() if not record.artifact.startswith(SOURCE)]
        found = {each.artifact: self.store.entry(each.artifact, each.fingerprint).manifest() for each in records}
        return {name: parent for name, parent in found.items() if parent}

    def labels(self, manifest: Manifest) -> list[str]:
        """The labels of every source that an output was made from."""
        return sorted(self._all_labels(manifest))

    def _all_labels(self, manifest: Manifest) -> set[str]:
        key = (manifest.stage, manifest.fingerprint)
        if key not in self._labels:
            own = {label for record in manifest.inputs.values() if record.source for label in record.source.labels}
            self._labels[key] = own.union(*(self._all_labels(each) for each in self.parents(manifest).values()))
        return self._labels[key]

    def _origins(self, manifest: Manifest) -> str:
        """Markdown with a link to the input of each slot."""
        parents, lines = self.parents(manifest), []
        for slot, record in manifest.inputs.items():
            parent, place = parents.get(record.artifact), record.source.path if record.source else ""
            lines.append(f"- {slot}: {_link(parent, self.recorded(parent)) if parent else record.artifact} {place}")
        return "\n".join(["Made from", "", *lines]) if lines else "Made from nothing"

    def _inputs(self, start: Manifest, experiment: str) -> tuple[dict[str, DatasetInput], dict[str, str | None]]:
        """By slot, data and models that are known when a stage starts; a source's rows are counted only at its end."""
        parents = self.parents(start)
        data, models = dict[str, DatasetInput](), dict[str, str | None]()
        for slot, record in start.inputs.items():
            parent = parents.get(record.artifact)
            if parent and is_model(parent):
                models[slot] = self.recorded(parent).model_id
            elif parent:
                data[slot] = stage_data(slot, parent, self._entry(parent).output.absolute(), self.labels(parent))
            elif is_model_source(record):
                models[slot] = self._source_model(record, experiment)
        return data, models

    def _add_inputs(self, run_id: str, data: list[DatasetInput], models: list[str]) -> None:
        known = self.client.get_run(run_id).inputs
        names = {(each.dataset.name, each.dataset.digest) for each in known.dataset_inputs}
        data = [each for each in data if (each.dataset.name, each.dataset.digest) not in names]
        linked = {each.model_id for each in known.model_inputs}
        links = [LoggedModelInput(model) for model in models if model not in linked]
        if data or links:
            self.client.log_inputs(run_id, data, links)

    def _add_samples(self, run_id: str, file: Path) -> None:
        """The last samples of a policy with their rewards, as a table."""
        if file.exists() and _SAMPLES_TABLE not in {each.path for each in self.client.list_artifacts(run_id)}:
            import pyarrow.parquet as pq

            rows = pq.read_table(file)
            table = rows.slice(max(0, rows.num_rows - NUM_SAMPLES)).to_pydict()
            self.client.log_table(run_id, table, _SAMPLES_TABLE)

    # Models.

    def _source_model(self, record: InputRecord, experiment: str) -> str | None:
        """The logged model of a source; of a source that an alias names, that of the stage that produced it."""
        source = record.source
        assert source is not None
        place = artifact_at(self.root, source.path)
        manifest = self.store.entry(*place).manifest() if place else None
        if manifest:
            return self.recorded(manifest).model_id
        tags = {
            Tag.FINGERPRINT: record.fingerprint, Tag.STAGE: record.artifact, Tag.LABELS: json.dumps(source.labels),
            Tag.OUTPUT: Path(source.path).as_uri() if source.path.startswith("/") else source.path,
            Tag.DIGEST: record.digest or source.revision or "",
        }  # fmt: skip
        return self._model(record.artifact, experiment, None, source.kind, tags)

    def _model(self, name: str, experiment: str, run_id: str | None, kind: str, tags: dict[str, str]) -> str:
        """The logged model of a run, or of a source; its weights stay where they are."""
        these = where({Tag.FINGERPRINT: tags[Tag.FINGERPRINT], Tag.STAGE: tags[Tag.STAGE]})
        found = self.client.search_logged_models([experiment], filter_string=these)
        mine = [each for each in found if each.source_run_id == run_id]
        model = mine[0] if mine else self.client.create_logged_model(
            experiment, name=model_name(name), source_run_id=run_id, tags={**tags, Tag.EXTERNAL_MODEL: "true"},
            params={"output": tags[Tag.OUTPUT], "digest": tags[Tag.DIGEST], "fingerprint": tags[Tag.FINGERPRINT]},
            model_type=kind,
        )  # fmt: skip
        if not mine:
            self.runs.added["models"] += 1
            self.client.finalize_logged_model(model.model_id, "READY")
        return str(model.model_id)

    def _register(self, entry: Entry, manifest: Manifest, recorded: Recorded) -> None:
        """A version of the pipeline's registered model; a model of the same bytes has one already."""
        key, name = Key.of(manifest), manifest.pipeline
        if key not in self.versions:
            self._find_versions(key, name)
        if key not in self.versions:
            tags = model_tags(manifest, entry.output.absolute(), self.labels(manifest))
            link = f"#/experiments/{recorded.experiment_id}/models/{recorded.model_id}"
            # A server takes no path of a file system as a source; the tag has it there.
            on_server = is_server(self.client.tracking_uri)
            version = self.client.create_model_version(
                name, f"models:/{recorded.model_id}" if on_server else tags[Tag.OUTPUT], run_id=recorded.run_id,
                tags=tags, description=f"[{manifest.stage}]({link}) of `{tags[Tag.OUTPUT]}`", await_creation_for=0,
                model_id=recorded.model_id if on_server else None,
            )  # fmt: skip
            self.runs.added["versions"] += 1
            self.versions[key] = int(version.version)
            if not on_server:  # which does it itself
                link_back = json.dumps([{"name": version.name, "version": version.version}])
                self.client.set_logged_model_tags(recorded.model_id, {Tag.MODEL_VERSIONS: link_back})
        # Beside the output: `impact` need not ask MLflow.
        note = RunFile.read(entry.path) or RunFile(
            uri="", run_id=recorded.run_id, execution_id=manifest.execution_run_id or "", cli_args=[]
        )
        if note.version != self.versions[key]:
            replace(note, version=self.versions[key]).write(entry.path)

    def _find_versions(self, key: Key, name: str) -> None:
        try:
            self.client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != EXISTS:
                raise
        for version in self.client.search_model_versions(
            f"name = '{name}' and {where({Tag.FINGERPRINT: key.fingerprint})}"
        ):
            if (version.tags.get(Tag.STAGE), version.tags.get(Tag.DIGEST)) == (key.stage, key.digest):
                self.versions[key] = int(version.version)

    def _entry(self, manifest: Manifest) -> Entry:
        return self.store.entry(manifest.stage, manifest.fingerprint)


def _link(manifest: Manifest, recorded: Recorded) -> str:
    place = f"models/{recorded.model_id}" if recorded.model_id else f"runs/{recorded.run_id}"
    return f"[{manifest.stage}](#/experiments/{recorded.experiment_id}/{place})"
