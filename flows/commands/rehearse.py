"""``posttrain rehearse``."""

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from flows.commands.arguments import add_json, add_overrides, words_of

if TYPE_CHECKING:
    from flows.rehearsal import Rehearsal

_NUMBERS = ("seconds", "memory GiB", "checkpoint MB", "real run")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_overrides(parser)
    add_json(parser)
    parser.add_argument("--keep", action="store_true", help="keep what it makes, until the next rehearsal")


def run(options: argparse.Namespace) -> int:
    from flows.declare.config import load_pipeline
    from flows.rehearsal import rehearse

    pipeline = load_pipeline(options.overrides, options.config_dir)
    found = rehearse(pipeline, words_of(options), keep=options.keep)
    if options.json:
        error = str(found.error) if found.error else None
        document = {"store": str(found.place), "stages": [asdict(row) for row in found.rows], "error": error}
        print(json.dumps(document, indent=2), flush=True)
    else:
        print(_text(found), flush=True)
    if found.error:
        raise found.error
    return 0


def _text(rehearsal: "Rehearsal") -> str:
    """A line per stage, and an estimate of the real run."""
    from flows.reports.tables import empty_table, plain_text
    from flows.wording import clock

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
