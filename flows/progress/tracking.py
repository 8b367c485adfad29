"""Use of MLflow by commands: create the tracker, complete the record of killed runs, mirror aliases."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from flows.declare.operation import Tracking
from flows.declare.pipeline import Pipeline
from flows.progress.run_record import latest, left_open, silent_drivers
from lineage.errors import PipelineError
from lineage.mlflow.address import require_reachable, shown, sqlite_file, tracking_uri
from lineage.mlflow.tracker import MlflowTracker
from lineage.promotions import locked, read_events, stacks
from lineage.record.tracker import Tracker
from lineage.store import Entry, Store

if TYPE_CHECKING:
    from lineage.mlflow.registry import Rebuilt


def make_tracker(tracking: Tracking, seconds_left: Callable[[], float] = float) -> Tracker:
    """The MLflow tracker, or one that records nothing; with the other trackers beside it.

    Args:
        seconds_left: that a stop may still take.

    Raises:
        ConfigError: MLflow's address is invalid or does not answer; another tracker is not installed or has no account.
    """
    found, others = Tracker(), tracking.others
    if tracking.mlflow:
        uri = tracking_uri(tracking.uri)
        require_reachable(uri, tracking.uri)
        found = MlflowTracker(uri, tracking.names())
    if not others:
        return found
    from flows.progress.trackers import OPENERS, StageTracker, Trackers

    return Trackers(found, [StageTracker(name, OPENERS[name], tracking.names(), seconds_left) for name in others])


def recorded_uri(pipeline: Pipeline) -> str | None:
    """``tracking.uri`` for a command that reads or mends a record: where nothing sets it, that of the last run.

    None: as a run reads it, ``mlflow.db`` in the working directory. So it is of a store that was moved or copied, whose
    runs were recorded in a file elsewhere.
    """
    if pipeline.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI"):
        return pipeline.tracking.uri
    last = next((run for run in latest(pipeline.store, sys.maxsize) if run.links.mlflow), None)
    places = [Path(each.directory) for each in last.stages.values() if each.directory] if last else []
    moved = bool(places) and not any(place.is_relative_to(pipeline.store.absolute()) for place in places)
    uri = last.links.mlflow if last else None
    return None if uri and moved and sqlite_file(uri) else uri


def complete_record(pipeline: Pipeline) -> None:
    """Closes runs in MLflow that a killed command left open, and adds what it committed."""
    store = pipeline.store
    if pipeline.tracking.mlflow and (any(each.open_mlflow for each in left_open(store)) or _of_earlier_versions(store)):
        try:
            rebuild(pipeline, pipeline.tracking.uri)
        except PipelineError as error:
            print(f"posttrain: the record of an earlier run stays incomplete: {error}", file=sys.stderr)


def rebuild(pipeline: Pipeline, uri: str | None) -> "Rebuilt":
    """Writes everything to MLflow that the store has and MLflow lacks, and ends what is open in another. Raises as
    ``refill``.

    Args:
        uri: as ``tracking.uri`` has it.
    """
    from lineage.mlflow.registry import close_left, refill  # imports mlflow, which takes a second

    store, here = pipeline.store, shown(tracking_uri(uri))
    left, notes, silent = left_open(store), _of_earlier_versions(store), silent_drivers(store)
    rebuilt = refill(uri, store, silent)
    for record in left:
        if record.open_mlflow and record.links.mlflow not in (None, here):  # it ran with another tracking.uri
            close_left(record.links.mlflow, store, [stage.directory for stage in record.stages.values()], silent)
        record.reported(store, to_mlflow=True)
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

    uri, store = recorded_uri(pipeline), Store(pipeline.store)
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
