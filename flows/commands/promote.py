"""``posttrain promote`` and ``rollback``."""

import argparse
import json
from typing import TYPE_CHECKING

from lineage.fingerprint import short

if TYPE_CHECKING:
    from flows.declare.pipeline import Pipeline
    from flows.promotion.promote import Moved
    from lineage.promotions import Event


def add_promote(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ref", metavar="REF", help="a model: fingerprint, PIPELINE/STAGE, its path, alias:NAME")
    parser.add_argument("--alias", required=True, metavar="NAME", help="champion, production ...")
    parser.add_argument("--why", default="", metavar="TEXT", help="kept with the promotion")
    parser.add_argument("--force", action="store_true", help="without a passing verdict; that is recorded")


def run_promote(options: argparse.Namespace) -> int:
    from flows.declare.config import load_pipeline
    from flows.promotion.promote import promote
    from lineage.store import require_store

    pipeline = load_pipeline(options.overrides, options.config_dir)
    require_store(pipeline.store)
    moved = promote(pipeline, options.ref, options.alias, why=options.why, force=options.force)
    _report(pipeline, moved, as_json=options.json)
    return 0


def add_rollback(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--alias", required=True, metavar="NAME", help="champion, production ...")
    parser.add_argument("--why", default="", metavar="TEXT", help="kept with the rollback")


def run_rollback(options: argparse.Namespace) -> int:
    from flows.declare.config import load_pipeline
    from flows.promotion.promote import roll_back
    from lineage.store import require_store

    pipeline = load_pipeline(options.overrides, options.config_dir)
    require_store(pipeline.store)
    _report(pipeline, roll_back(pipeline, options.alias, why=options.why), as_json=options.json)
    return 0


def _report(pipeline: "Pipeline", moved: "Moved", *, as_json: bool) -> None:
    """Mirrors the alias in MLflow's registry and prints what was done; MLflow's errors do not undo the move."""
    from flows.progress.tracking import mirror_alias

    model = f"{moved.manifest.stage}@{short(moved.manifest.fingerprint)}"
    mirror_alias(pipeline, moved.alias)
    if as_json:
        print(json.dumps(_moved_dict(moved, model), indent=2))
        return
    before = _name(moved.before)
    if moved.event is None:
        print(f"alias {moved.alias} names {model} already: {moved.entry.output}")
        return
    forced = " (forced: no passing verdict)" if moved.event.forced else ""
    print(f"alias {moved.alias}: {before or 'nothing'} -> {model}{forced}: {moved.entry.output}")


def _moved_dict(moved: "Moved", model: str) -> dict[str, object]:
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
