"""``posttrain verify``."""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from flows.commands.arguments import add_json
from flows.wording import printable_text

if TYPE_CHECKING:
    from flows.declare.operation import Tracking
    from lineage.verify.store import Checked, Finding


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ref", nargs="?", metavar="REF", help="an artifact: it and its ancestry; none: the whole store")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="e.g. store=elsewhere")
    parser.add_argument("--config-dir", type=Path, help="a directory of your own groups: model/, source/ ...")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """0: the record is intact; 1: something is missing, changed or orphaned."""
    from flows.declare.config import load_pipeline
    from lineage.store import require_store
    from lineage.verify.store import Checked, Fault, read_store

    if options.ref and "=" in options.ref:  # `posttrain verify store=elsewhere`
        options.overrides, options.ref = [options.ref, *options.overrides], None
    pipeline = load_pipeline(options.overrides, options.config_dir)
    everything, findings = read_store(require_store(pipeline.store))
    chosen = _ancestry(options.ref, pipeline.store) if options.ref else set(everything)
    checked = Checked(all=everything, chosen=sorted(chosen & everything.keys()))
    if options.ref:
        findings = [finding for finding in findings if finding.what in chosen]
    findings += _findings(pipeline.store, pipeline.tracking, checked)
    faults = [finding for finding in findings if finding.fault != Fault.NOTE]
    if options.json:
        shown = [asdict(each) for each in findings]
        print(json.dumps({"checked": len(checked.chosen), "intact": not faults, "findings": shown}, indent=2))
    else:
        print(printable_text(_text(findings, len(faults), checked)))
    return 1 if faults else 0


def _ancestry(ref: str, store: Path) -> set[str]:
    from lineage.errors import ConfigError
    from lineage.graph.ancestry import ancestry
    from lineage.graph.index import Index
    from lineage.graph.refs import resolve

    with Index(store) as index:
        found = resolve(ref, index)
        if found.entry is None:
            raise ConfigError(
                f"{ref} is the source {found.node}, whose bytes the store does not keep; name an artifact"
            )
        return set(ancestry(index, found.node).nodes)


def _findings(store: Path, tracking: "Tracking", checked: "Checked") -> Iterator["Finding"]:
    from lineage.digest import DigestCache
    from lineage.verify.store import (
        check_certificates,
        check_links,
        check_lock,
        check_outputs,
        check_promotions,
        check_sources,
        check_view,
    )

    cache = DigestCache(store / "digests.json")
    yield from check_outputs(checked)
    yield from check_links(checked)
    yield from check_sources(checked, cache)
    yield from check_certificates(store, checked)
    yield from check_view(store, checked)
    if checked.is_whole:
        yield from check_promotions(store, checked)
    if tracking.mlflow:
        from lineage.verify.mlflow import check_mlflow

        yield from check_mlflow(tracking.uri, store, checked)
    if checked.is_whole and tracking.dvc:
        yield from check_lock(Path.cwd(), store, cache)


def _text(findings: list["Finding"], num_faults: int, checked: "Checked") -> str:
    lines = [f"{each.fault:9} {each.what}: {each.why}\n          {each.mend}" for each in findings]
    count = f"{len(checked.chosen)} artifacts"
    lines.append(f"{count} checked: {num_faults} faults" if num_faults else f"{count} checked: intact")
    return "\n".join(lines)
