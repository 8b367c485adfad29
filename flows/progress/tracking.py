"""Use of MLflow by commands: create the tracker, complete the record of killed runs, mirror aliases."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from flows.declare.operation import Tracking
from flows.declare.pipeline import Pipeline
from flows.progress.run_record import left_open, silent_drivers
from lineage.errors import PipelineError
from lineage.mlflow.address import require_reachable, tracking_uri
from lineage.mlflow.tracker import MlflowTracker
from lineage.promotions import locked, read_events, stacks
from lineage.record.tracker import Tracker
from lineage.store import Entry, Store

if TYPE_CHECKING:
    from lineage.mlflow.registry import Rebuilt


def make_tracker(tracking: Tracking) -> Tracker:
    """The MLflow tracker, or one that records nothing.

    Raises:
        ConfigError: MLflow's address is invalid or does not answer.
    """
    if not tracking.mlflow:
        return Tracker()
    uri = tracking_uri(tracking.uri)
    require_reachable(uri, tracking.uri)
    return MlflowTracker(uri, tracking.names())


def complete_record(pipeline: Pipeline) -> None:
    """Closes runs in MLflow that a killed command left open, and adds what it committed."""
    store = pipeline.store
    if pipeline.tracking.mlflow and (any(each.open_mlflow for each in left_open(store)) or _of_earlier_versions(store)):
        try:
            rebuild(pipeline)
        except PipelineError as error:
            print(f"posttrain: the record of an earlier run stays incomplete: {error}", file=sys.stderr)


def rebuild(pipeline: Pipeline) -> "Rebuilt":
    """Writes everything to MLflow that the store has and MLflow lacks. Raises as ``refill``."""
    from lineage.mlflow.registry import refill  # imports mlflow, which takes a second

    left, notes = left_open(pipeline.store), _of_earlier_versions(pipeline.store)
    rebuilt = refill(pipeline.tracking.uri, pipeline.store, silent_drivers(pipeline.store))
    for record in left:
        record.reported(pipeline.store, to_mlflow=True)
    for note in notes:
        note.unlink(missing_ok=True)
    return rebuilt


def _of_earlier_versions(store: Path) -> list[Path]:
    """Files of runs that were not wholly recorded."""
    return list((store / "logs" / "mlflow-open").glob("*.json"))


def mirror_alias(pipeline: Pipeline, alias: str) -> None:
    """Sets an alias in MLflow's registry to its current model; of two concurrent moves the later one wins.

    MLflow's errors are only printed: the move is recorded in the store.
    """
    if not pipeline.tracking.mlflow:
        return
    from lineage.mlflow.registry import set_alias

    uri, store = pipeline.tracking.uri, Store(pipeline.store)
    try:
        with locked(pipeline.store):
            events = read_events(pipeline.store)
            last = stacks(events)[alias][-1]
            model = store.entry(str(last.stage), last.fingerprint).manifest()
            assert model is not None  # it was read a moment ago
            named = [store.entry(str(event.stage), event.fingerprint) for event in events if event.alias == alias]
            others = {each.pipeline for each in map(Entry.readable_manifest, named) if each} - {model.pipeline}
            for pipeline_name in others:
                set_alias(uri, pipeline_name, alias, None)  # else it would name a model there too
            set_alias(uri, model.pipeline, alias, model.fingerprint, model.stage)
    except PipelineError as error:
        print(
            f"posttrain: the alias is moved, and MLflow does not show it: {error}; repair: posttrain rebuild",
            file=sys.stderr,
        )
