"""What ``promote`` and ``rollback`` do after the record is written: MLflow's mirror, and what they print."""

import json
import sys
from typing import TYPE_CHECKING

from lineage.errors import PipelineError
from lineage.fingerprint import short

if TYPE_CHECKING:
    from flows.pipeline import Pipeline
    from flows.promote import Moved
    from lineage.promotions import Event


def report(pipeline: "Pipeline", moved: "Moved", *, as_json: bool) -> None:
    """Mirrors the alias in MLflow's registry and says what was done; the move stands, whatever MLflow answers."""
    model = f"{moved.manifest.stage}@{short(moved.manifest.fingerprint)}"
    if pipeline.tracking.mlflow:
        _mirror(pipeline, moved)
    if as_json:
        print(json.dumps(_document(moved, model), indent=2))
        return
    before = _name(moved.before)
    if moved.event is None:
        print(f"alias {moved.alias} names {model} already: {moved.entry.output}")
        return
    forced = " (forced: no passing verdict)" if moved.event.forced else ""
    print(f"alias {moved.alias}: {before or 'nothing'} -> {model}{forced}: {moved.entry.output}")


def _mirror(pipeline: "Pipeline", moved: "Moved") -> None:
    from lineage.mlflow.registry import set_alias
    from lineage.store import Store

    manifest, uri = moved.manifest, pipeline.tracking.uri
    try:
        if moved.before and moved.before.stage:
            before = Store(pipeline.store).entry(moved.before.stage, moved.before.fingerprint).manifest()
            if before and before.pipeline != manifest.pipeline:  # there, too, it would name a model
                set_alias(uri, before.pipeline, moved.alias, None)
        set_alias(uri, manifest.pipeline, moved.alias, manifest.fingerprint, manifest.stage)
    except PipelineError as error:
        print(
            f"posttrain: the alias is moved, and MLflow does not show it: {error}; repair: posttrain rebuild",
            file=sys.stderr,
        )


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
