"""``posttrain rehearse``."""

import argparse
import json

from flows.commands.arguments import add_json, add_overrides, words_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_overrides(parser)
    add_json(parser)
    parser.add_argument("--keep", action="store_true", help="keep what it makes, until the next rehearsal")


def run(options: argparse.Namespace) -> int:
    from flows.declare.config import load_pipeline
    from flows.rehearsal.rehearse import rehearse
    from flows.reports.rehearsal import rehearsal_dict, rehearsal_table

    pipeline = load_pipeline(options.overrides, options.config_dir)
    found = rehearse(pipeline, words_of(options), keep=options.keep)
    print(json.dumps(rehearsal_dict(found), indent=2) if options.json else rehearsal_table(found), flush=True)
    if found.error:
        raise found.error
    return 0
