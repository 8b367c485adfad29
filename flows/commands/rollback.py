"""``posttrain rollback``."""

import argparse

from flows.commands.alias_move import report
from flows.commands.arguments import add_json, add_overrides


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--alias", required=True, metavar="NAME", help="champion, production ...")
    parser.add_argument("--why", default="", metavar="TEXT", help="kept with the rollback")
    add_overrides(parser)
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    from flows.declare.config import load_pipeline
    from flows.promotion.promote import roll_back
    from lineage.store import require_store

    pipeline = load_pipeline(options.overrides, options.config_dir)
    require_store(pipeline.store)
    report(pipeline, roll_back(pipeline, options.alias, why=options.why), as_json=options.json)
    return 0
