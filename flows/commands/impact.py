"""``posttrain impact``."""

import argparse
import json

from flows.commands.arguments import add_json, add_overrides
from flows.declare.store_root import asked_store


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "ref", metavar="REF",
        help="an artifact or a source as in lineage; label:NAME; source:NAME#ROW-ID; source:NAME#TEXT; a data file",
    )  # fmt: skip
    add_overrides(parser)
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    from flows.reports.impact import impact_text
    from lineage.graph.impact import impact
    from lineage.graph.index import Index

    with Index(asked_store(options.overrides, options.config_dir)) as index:
        found = impact(options.ref, index)
        # In one line: indented, tens of thousands of artifacts would take seconds.
        print(json.dumps(found.to_dict()) if options.json else impact_text(found))
    return 0
