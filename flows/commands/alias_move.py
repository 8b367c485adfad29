"""What ``promote`` and ``rollback`` do after the record is written: MLflow's mirror, and what they print."""

import json
import sys
from typing import TYPE_CHECKING

from lineage.errors import PipelineError
from lineage.fingerprint import short

if TYPE_CHECKING:
    from flows.pipeline import Pipeline
    from flows.promote import Moved
    from lineage.manifest import Manifest
    from lineage.promotions import Event
    from lineage.store import Entry


def report(pipeline: "Pipeline", moved: "Moved", *, as_json: bool) -> None:
    """Mirrors the alias in MLflow's registry and says what was done; the move stands, whatever MLflow answers."""
    model = f"{moved.manifest.stage}@{short(moved.manifest.fingerprint)}"
    if pipeline.tracking.mlflow:
        _mirror(pipeline, moved.alias)
    if as_json:
        print(json.dumps(_document(moved, model), indent=2))
        return
    before = _name(moved.before)
    if moved.event is None:
        print(f"alias {moved.alias} names {model} already: {moved.entry.output}")
        return
    forced = " (forced: no passing verdict)" if moved.event.forced else ""
    print(f"alias {moved.alias}: {before or 'nothing'} -> {model}{forced}: {moved.entry.output}")


def _mirror(pipeline: "Pipeline", alias: str) -> None:
    """Shows who holds the alias by now: of two moves at once the later one, whichever comes here last."""
    from lineage.mlflow.registry import set_alias
    from lineage.promotions import locked, read_events, stacks
    from lineage.store import Store

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


def _manifest(entry: "Entry") -> "Manifest | None":
    try:
        return entry.manifest()
    except PipelineError:  # of an earlier holder: it names no pipeline any more
        return None


def _document(moved: "Moved", model: str) -> dict[str, object]:
    event = moved.event
    return {
        "alias": moved.alias,
        "action": event.action if event else None,
        "model": model,
        "fingerprint": moved.manifest.fingerprint,
        "output": str(moved.entry.output),
        "before": _name(moved.before),
        "verdict": event.verdict if event else None,
        "forced": event.forced if event else False,
        "labels": event.labels if event else [],
        "who": event.who if event else None,
        "why": event.why if event else None,
    }


def _name(event: "Event | None") -> str | None:
    return f"{event.stage}@{short(event.fingerprint)}" if event else None
