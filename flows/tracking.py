"""Chooses who records a run, and completes what an earlier one left open."""

import sys

from flows.declare.operation import Tracking
from flows.declare.pipeline import Pipeline
from flows.progress.run_notes import silent_drivers
from lineage.errors import PipelineError
from lineage.mlflow.address import require_reachable, tracking_uri
from lineage.mlflow.open_records import is_left, open_records
from lineage.mlflow.registry import refill
from lineage.mlflow.tracker import MlflowTracker
from lineage.tracker import NoTracker, Tracker


def make_tracker(tracking: Tracking) -> Tracker:
    """MLflow, or nobody.

    Raises:
        ConfigError: MLflow's address is none, or nothing answers there.
    """
    if not tracking.mlflow:
        return NoTracker()
    uri = tracking_uri(tracking.uri)
    require_reachable(uri, tracking.uri)
    return MlflowTracker(uri)


def complete_record(pipeline: Pipeline) -> None:
    """Closes in MLflow what a killed command left open there, and adds what it committed; costs nothing otherwise."""
    if not pipeline.tracking.mlflow:
        return
    opened = open_records(pipeline.store)
    silent = silent_drivers(pipeline.store) if opened else []
    notes = [note for note in opened if is_left(note, silent)]
    if not notes:
        return
    try:
        refill(pipeline.tracking.uri, pipeline.store, silent)
    except PipelineError as error:
        print(f"posttrain: the record of an earlier run stays incomplete: {error}", file=sys.stderr)
        return
    for note in notes:
        note.unlink(missing_ok=True)
