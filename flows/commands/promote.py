"""``posttrain promote``."""

import argparse

from flows.commands.alias_move import report
from flows.commands.arguments import add_json, add_overrides


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ref", metavar="REF", help="a model: fingerprint, PIPELINE/STAGE, its path, alias:NAME")
    parser.add_argument("--alias", required=True, metavar="NAME", help="champion, production ...")
    parser.add_argument("--why", default="", metavar="TEXT", help="kept with the promotion")
    parser.add_argument("--force", action="store_true", help="without a passing verdict; that is recorded")
    add_overrides(parser)
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    from flows.declare.config import load_pipeline
    from flows.promotion.promote import promote
    from lineage.store import require_store

    pipeline = load_pipeline(options.overrides, options.config_dir)
    require_store(pipeline.store)
    moved = promote(pipeline, options.ref, options.alias, why=options.why, force=options.force)
    report(pipeline, moved, as_json=options.json)
    return 0
