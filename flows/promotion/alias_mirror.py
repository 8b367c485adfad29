"""Shows in MLflow's registry who holds an alias, after the record of it is written."""

import sys

from flows.declare.pipeline import Pipeline
from lineage.errors import PipelineError
from lineage.manifest import Manifest
from lineage.promotions import locked, read_events, stacks
from lineage.store import Entry, Store


def mirror(pipeline: Pipeline, alias: str) -> None:
    """Shows who holds the alias by now: of two moves at once the later one, whichever comes here last.

    The move stands, whatever MLflow answers: that is said on stderr.
    """
    if not pipeline.tracking.mlflow:
        return
    from lineage.mlflow.registry import set_alias

    uri, store = pipeline.tracking.uri, Store(pipeline.store)
    try:
        with locked(pipeline.store):
            events = read_events(pipeline.store)
            last = stacks(events)[alias][-1]
            holder = store.entry(str(last.stage), last.fingerprint).manifest()
            assert holder is not None  # it was read a moment ago
            named = [store.entry(str(event.stage), event.fingerprint) for event in events if event.alias == alias]
            for pipeline_name in {each.pipeline for each in map(_manifest, named) if each} - {holder.pipeline}:
                set_alias(uri, pipeline_name, alias, None)  # there, too, it would name a model
            set_alias(uri, holder.pipeline, alias, holder.fingerprint, holder.stage)
    except PipelineError as error:
        print(
            f"posttrain: the alias is moved, and MLflow does not show it: {error}; repair: posttrain rebuild",
            file=sys.stderr,
        )


def _manifest(entry: Entry) -> Manifest | None:
    try:
        return entry.manifest()
    except PipelineError:  # of an earlier holder: it names no pipeline any more
        return None
