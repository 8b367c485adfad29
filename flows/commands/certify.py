"""``posttrain certify``."""

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from flows.commands.arguments import add_json, add_overrides, words_of

if TYPE_CHECKING:
    from flows.certify import Certified
    from lineage.certificate import Comparison


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_overrides(parser)
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """0: kills change no bit, other workers nothing beyond the tolerance; 1: one does, or a kill was not compared."""
    from flows.certify import certify
    from flows.declare.config import load_pipeline

    found = certify(load_pipeline(options.overrides, options.config_dir), words_of(options))
    document = {"stages": [{"path": str(each.path), **asdict(each.certificate)} for each in found]}
    print(json.dumps(document, indent=2) if options.json else _text(found), flush=True)
    comparisons = [each.certificate.comparisons for each in found]
    differs = any(each.verdict == "differs" for stage in comparisons for each in stage.values())
    return 1 if differs or any(stage["killed"].verdict == "not compared" for stage in comparisons) else 0


def _text(found: "list[Certified]") -> str:
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
