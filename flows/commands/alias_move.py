"""What ``promote`` and ``rollback`` do after the record is written: MLflow's mirror, and what they print."""

import json
from typing import TYPE_CHECKING

from lineage.fingerprint import short

if TYPE_CHECKING:
    from flows.declare.pipeline import Pipeline
    from flows.promotion.promote import Moved
    from lineage.promotions import Event


def report(pipeline: "Pipeline", moved: "Moved", *, as_json: bool) -> None:
    """Mirrors the alias in MLflow's registry and says what was done; the move stands, whatever MLflow answers."""
    from flows.tracking import mirror_alias

    model = f"{moved.manifest.stage}@{short(moved.manifest.fingerprint)}"
    mirror_alias(pipeline, moved.alias)
    if as_json:
        print(json.dumps(_document(moved, model), indent=2))
        return
    before = _name(moved.before)
    if moved.event is None:
        print(f"alias {moved.alias} names {model} already: {moved.entry.output}")
        return
    forced = " (forced: no passing verdict)" if moved.event.forced else ""
    print(f"alias {moved.alias}: {before or 'nothing'} -> {model}{forced}: {moved.entry.output}")


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
