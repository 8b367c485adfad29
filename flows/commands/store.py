"""``posttrain verify``, ``gc`` and ``rebuild``."""

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from flows.reports.wording import on_screen
from lineage.errors import ConfigError

if TYPE_CHECKING:
    from flows.declare.pipeline import Pipeline
    from lineage.gc import Garbage, Size
    from lineage.verify.store import Checked, Finding

_UNITS = {"d": 86400.0, "h": 3600.0, "": 86400.0}  # of an age, in seconds


def add_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ref", nargs="?", metavar="REF", help="an artifact: it and its ancestry; none: the whole store")


def run_verify(options: argparse.Namespace) -> int:
    """Returns 0 if the record is intact; 1 if something is missing, changed or orphaned."""
    from flows.declare.config import load_pipeline
    from lineage.store import require_store
    from lineage.verify.store import Checked, Fault, read_store

    pipeline = load_pipeline(options.overrides, options.config_dir)
    everything, findings = read_store(require_store(pipeline.store))
    chosen = _chosen(options.ref, pipeline.store) if options.ref else set(everything)
    checked = Checked(all=everything, chosen=sorted(chosen & everything.keys()))
    if options.ref:
        findings = [finding for finding in findings if finding.what in chosen]
    findings += _all_findings(pipeline, checked)
    faults = [finding for finding in findings if finding.fault != Fault.NOTE]
    if options.json:
        shown = [asdict(each) for each in findings]
        print(json.dumps({"checked": len(checked.chosen), "intact": not faults, "findings": shown}, indent=2))
    else:
        lines = [f"{each.fault:9} {each.what}: {each.why}\n          {each.mend}" for each in findings]
        verdict = f"{len(faults)} faults" if faults else "intact"
        print(on_screen("\n".join([*lines, f"{len(checked.chosen)} artifacts checked: {verdict}"])))
    return 1 if faults else 0


def _chosen(ref: str, store: Path) -> set[str]:
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


def _all_findings(pipeline: "Pipeline", checked: "Checked") -> Iterator["Finding"]:
    from flows.progress.tracking import recorded_uri
    from lineage.filesystem.digest import DigestCache
    from lineage.verify.store import (
        check_certificates,
        check_exports,
        check_links,
        check_lock,
        check_outputs,
        check_promotions,
        check_sources,
        check_view,
    )

    store, tracking = pipeline.store, pipeline.tracking
    cache = DigestCache(store / "digests.json")
    yield from check_outputs(checked)
    yield from check_links(checked)
    yield from check_sources(checked, cache)
    yield from check_certificates(store, checked)
    yield from check_exports(store, checked)
    yield from check_view(store, checked)
    if checked.is_whole:
        yield from check_promotions(store, checked)
    if tracking.mlflow:
        from lineage.verify.mlflow import check_mlflow

        yield from check_mlflow(recorded_uri(pipeline), store, checked)
    if checked.is_whole and tracking.dvc:
        yield from check_lock(Path.cwd(), store, cache)


def add_gc(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--yes", action="store_true", help="delete without asking")
    parser.add_argument("--dry-run", action="store_true", help="only show it")
    parser.add_argument("--keep", action="append", default=[], metavar="REF", help="keep this, with its ancestors")
    parser.add_argument(
        "--older-than", type=_seconds, default=_seconds("7d"), metavar="AGE",
        help="only what was unused for this long, such as 30d or 12h; default 7d",
    )  # fmt: skip


def run_gc(options: argparse.Namespace) -> int:
    """Returns 0, even if nothing is deleted (PipelineError: the roots are unknown, so that nothing is deleted)."""
    from flows.declare.config import load_pipeline
    from flows.declare.store_root import asked_store
    from flows.operate.gc_roots import add_present, find_roots
    from lineage.gc import delete, find, size

    store = asked_store(options.overrides, options.config_dir)
    roots = find_roots(store, load_pipeline(options.overrides, options.config_dir), options.keep)
    garbage, young = find(store, roots, options.older_than)
    sizes = [size([each]) for each in (*garbage, *young)]  # before the deletion
    whole = size(garbage)
    if not options.json:
        _print_garbage(store, garbage, young, [each.num_bytes for each in sizes], whole)
    agreed = bool(garbage) and not options.dry_run and (options.yes or _confirmed(options.json))
    done = [each for each in garbage if agreed and delete(store, each, partial(add_present, store, roots))]
    if options.json:
        rows = [
            {
                "what": each.what, "why": each.why, "paths": list(map(str, each.paths)), "bytes": found.num_bytes,
                "fingerprint": each.fingerprint, "freed_bytes": found.freed, "last_used": each.last_used,
            }
            for each, found in zip((*garbage, *young), sizes, strict=True)
        ]  # fmt: skip
        shown = {
            "store": str(store), "garbage": rows[: len(garbage)], "bytes": whole.num_bytes, "freed_bytes": whole.freed,
            "too_young": rows[len(garbage) :], "needed": roots, "freed": [each.what for each in done],
        }  # fmt: skip
        print(json.dumps(shown, indent=2))
    elif agreed:
        rest = len(garbage) - len(done)
        print(f"deleted {len(done)} of {len(garbage)}" + (f"; {rest} were used or deleted meanwhile" if rest else ""))
    return 0


def _print_garbage(
    store: Path, garbage: "Sequence[Garbage]", young: "Sequence[Garbage]", sizes: Sequence[int], whole: "Size"
) -> None:
    from rich.filesize import decimal

    from flows.reports.wording import counted, empty_table, plain_text

    lines, table = [], empty_table("what", "size", "why", numbers=("size",))
    for each, num_bytes in zip(garbage, sizes, strict=False):
        table.add_row(each.what, decimal(num_bytes), each.why)
    if garbage:
        lines.append(plain_text(table))
    if whole.freed < whole.num_bytes:
        lines.append(f"{decimal(whole.num_bytes - whole.freed)} stay on the disk: hard links from elsewhere share them")
    if young:
        names = ", ".join(each.what for each in young[:5])
        used = f"{counted(len(young), 'thing')} ({decimal(sum(sizes[len(garbage) :]))}) used lately"
        lines.append(f"{used} stay: {names}; --older-than 0 takes them too")
    total = f"{counted(len(garbage), 'thing')} to delete in {store}: {decimal(whole.freed)}"
    lines.append(total if garbage else f"nothing to delete in {store}")
    print(on_screen("\n".join(lines)))


def _confirmed(as_json: bool) -> bool:
    if as_json or not sys.stdin.isatty():
        if not as_json:
            print("nothing is deleted: there is no terminal for the question; --yes deletes it")
        return False
    return input("delete it? [y/N] ").strip().lower() in ("y", "yes")


def _seconds(word: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([dh]?)", word)
    if not match:
        raise argparse.ArgumentTypeError(f"{word}: not a valid age; give days or hours, such as 30d, 12h, 0")
    return float(match[1]) * _UNITS[match[2]]


def run_rebuild(options: argparse.Namespace) -> int:
    from flows.declare.config import load_pipeline
    from flows.progress.tracking import rebuild, recorded_uri
    from lineage.store import require_store

    pipeline = load_pipeline(options.overrides, options.config_dir)
    if not pipeline.tracking.mlflow:
        raise ConfigError(
            "tracking.mlflow=false: there is no MLflow to refill; leave tracking as it is, or set tracking.uri"
        )
    require_store(pipeline.store)
    rebuilt = rebuild(pipeline, recorded_uri(pipeline))
    if options.json:
        print(json.dumps({"added": rebuilt.added, "present": rebuilt.present, "lost": rebuilt.lost}))
        return 0
    counts = ", ".join(f"{count} {name}" for name, count in rebuilt.added.items())
    print(f"MLflow: added {counts}; {rebuilt.present} runs were present")
    if rebuilt.lost:
        print(f"recorded as deleted: {rebuilt.lost} outputs that MLflow has runs of and the store no longer has")
    return 0
