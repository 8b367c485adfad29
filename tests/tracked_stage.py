"""Stages that are reported to the MLflow tracker and never run: what a test says of them is all there is."""

import contextlib
import json
import time
from dataclasses import replace

from lineage.mlflow.tracker import MlflowTracker
from lineage.record.run_file import UNNAMED
from lineage.record.tracker import Event, Execution, StageStart, end_event
from lineage.store import Provenance


def execution(store, reused=(), pipeline="p"):
    reused = {each.stage: each for each in reused}
    return Execution(pipeline=pipeline, store=store.root, cli_args=[f"pipeline={pipeline}"], reused=reused)


def start_of(store, manifest, parents=(), resumes=False):
    """A stage whose output is there, and whose manifest is not committed yet."""
    directory = store.root / manifest.stage / manifest.fingerprint[:16]
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "manifest.json").unlink(missing_ok=True)
    known = replace(
        manifest, files={}, output_digest="", metrics={}, provenance=Provenance(start=time.time()),
    )  # fmt: skip
    return StageStart(
        manifest=known, directory=directory, parents={each.stage: each for each in parents}, resumes=resumes
    )


def report(start, *steps):
    with (start.directory / "metrics.jsonl").open("a") as file:
        for step in steps:
            metrics = {"loss": 1.0 / step, "grad_norm": 0.5}
            file.write(json.dumps({"step": step, "time": 1000.0 + step, "metrics": metrics}) + "\n")


def commit(start, manifest, ids=None):
    """Writes the manifest as a stage does, with the ids of its run."""
    if ids:
        manifest = replace(manifest, mlflow_run_id=ids.stage, execution_run_id=ids.execution)
    (start.directory / "manifest.json").write_text(manifest.to_json())
    return manifest


class Tracked:
    """A stage whose events reach a tracker."""

    def __init__(self, tracker, start):
        self.tracker, self.start = tracker, start
        tracker.on(Event(title=start.manifest.stage, state="running", start=start))

    def run_ids(self):
        return self.tracker.run_ids(self.start.manifest.stage)

    def failed(self, error):
        self.tracker.on(end_event(self.start.manifest.stage, error))

    def finish(self, manifest):
        """Commits it and reports it."""
        manifest = commit(self.start, manifest, self.run_ids())
        self.tracker.on(Event(title=self.start.manifest.stage, state="done", manifest=manifest))


def record(uri, store, manifest, parents=(), names=UNNAMED):
    """One execution with one stage, from start to end."""
    tracker = MlflowTracker(uri, names)
    with tracker.execution(execution(store, pipeline=manifest.pipeline)):
        stage = Tracked(tracker, start_of(store, manifest, parents))
        ids = stage.run_ids()
        stage.finish(manifest)
    return tracker, ids


def attempt(uri, store, start, error, *steps):
    """One execution with one stage that raises after some steps; returns its tracker."""
    tracker = MlflowTracker(uri)
    with contextlib.suppress(type(error)), tracker.execution(execution(store)):
        stage = Tracked(tracker, start)
        stage.run_ids()
        report(start, *steps)
        stage.failed(error)
        raise error
    return tracker
