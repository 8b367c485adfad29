"""``posttrain certify``."""

import argparse
import json

from flows.commands.arguments import add_json, add_overrides, words_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_overrides(parser)
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """0: kills change no bit, other workers nothing beyond the tolerance; 1: one does, or a kill was not compared."""
    from flows.declare.config import load_pipeline
    from flows.rehearsal.certify import certify
    from flows.reports.certificate import certificate_dict, certificate_table

    found = certify(load_pipeline(options.overrides, options.config_dir), words_of(options))
    print(json.dumps(certificate_dict(found), indent=2) if options.json else certificate_table(found), flush=True)
    comparisons = [each.certificate.comparisons for each in found]
    differs = any(each.verdict == "differs" for stage in comparisons for each in stage.values())
    return 1 if differs or any(stage["killed"].verdict == "not compared" for stage in comparisons) else 0
