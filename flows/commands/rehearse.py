"""``posttrain rehearse`` and ``certify``."""

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from flows.commands.arguments import recorded_cli_args

if TYPE_CHECKING:
    from flows.operate.certify import Certified
    from flows.operate.rehearsal import Rehearsal
    from lineage.record.certificate import Comparison

_NUMBERS = ("seconds", "memory GiB", "checkpoint MB", "real run")


def add_rehearse(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--keep", action="store_true", help="keep the outputs until the next rehearsal")


def run_rehearse(options: argparse.Namespace) -> int:
    from flows.declare.config import load_pipeline
    from flows.operate.rehearsal import rehearse

    pipeline = load_pipeline(options.overrides, options.config_dir)
    found = rehearse(pipeline, recorded_cli_args(options), keep=options.keep)
    if options.json:
        error = str(found.error) if found.error else None
        document = {"store": str(found.place), "stages": [asdict(row) for row in found.rows], "error": error}
        print(json.dumps(document, indent=2), flush=True)
    else:
        print(_rehearsal_text(found), flush=True)
    if found.error:
        raise found.error
    return 0


def _rehearsal_text(rehearsal: "Rehearsal") -> str:
    """A line per stage, and an estimate of the real run."""
    from flows.reports.tables import empty_table, plain_text
    from flows.reports.wording import clock

    def number(value: float | None, digits: int) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    table = empty_table("stage", "exercised", *_NUMBERS, "verdict", numbers=_NUMBERS)
    for row in rehearsal.rows:
        size = None if row.checkpoint_bytes is None else row.checkpoint_bytes / 1e6
        table.add_row(
            row.stage, ", ".join(row.exercised), number(row.seconds, 1), number(row.memory_gib, 2), number(size, 1),
            "" if row.real_seconds is None else f"about {clock(row.real_seconds)}", row.verdict,
        )  # fmt: skip
    lines = [plain_text(table), ""]
    known = [row.real_seconds for row in rehearsal.rows if row.real_seconds is not None]
    if known:
        total = clock(sum(known))
        lines.append(f"the real run, one stage after another: about {total} or less, since first steps are slow")
    if rehearsal.place.is_dir():
        lines.append(f"kept until the next rehearsal: {rehearsal.place}")
    return "\n".join(lines)


def run_certify(options: argparse.Namespace) -> int:
    """Returns 0 if kills change no bit and other workers stay within the tolerance; 1 if not, or if not compared."""
    from flows.declare.config import load_pipeline
    from flows.operate.certify import certify

    found = certify(load_pipeline(options.overrides, options.config_dir), recorded_cli_args(options))
    document = {"stages": [{"path": str(each.path), **asdict(each.certificate)} for each in found]}
    print(json.dumps(document, indent=2) if options.json else _certified_text(found), flush=True)
    comparisons = [each.certificate.comparisons for each in found]
    differs = any(each.verdict == "differs" for stage in comparisons for each in stage.values())
    return 1 if differs or any(stage["killed"].verdict == "not compared" for stage in comparisons) else 0


def _certified_text(found: "list[Certified]") -> str:
    """A line per stage and interruption, then the files."""
    from flows.reports.tables import empty_table, plain_text

    table = empty_table("stage", "interruption", "verdict", "what was found")
    for each in found:
        for how, comparison in each.certificate.comparisons.items():
            before, after = comparison.num_workers
            workers = f", workers {before} to {after}" if before != after else ""
            table.add_row(each.certificate.stage, how + workers, comparison.verdict, _detail(comparison))
    paths = "\n".join(f"{each.certificate.stage}: {each.path}" for each in found)
    return f"{plain_text(table)}\n\n{paths}"


def _detail(comparison: "Comparison") -> str:
    steps = ", ".join(str(step) for step in comparison.resumed_at)
    loss, weights = comparison.loss_difference, comparison.weight_difference
    parts = [
        comparison.detail,
        f"losses apart by {loss:.2g}" if loss else "",
        f"weights apart by {weights:.2g} of what the training moved them" if weights else "",
        f"resumed from step {steps}" if steps else "",
    ]
    return "; ".join(filter(None, parts))
