"""``posttrain lineage``."""

import argparse
import json
from pathlib import Path

from flows.commands.arguments import add_json, add_overrides
from flows.declare.store_root import asked_store


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "ref", metavar="REF", help="such as cpt-sft-dpo/dpo, alias:champion, or digits of a fingerprint"
    )
    add_overrides(parser)
    add_json(parser)
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page that draws the graph")


def run(options: argparse.Namespace) -> int:
    from flows.reports.lineage import ancestry_tree
    from lineage.errors import ConfigError
    from lineage.graph.ancestry import ancestry
    from lineage.graph.index import Index
    from lineage.graph.refs import resolve

    with Index(asked_store(options.overrides, options.config_dir)) as index:
        graph = ancestry(index, resolve(options.ref, index).node)
    if options.html:
        from flows.reports.page import render

        try:
            options.html.write_text(render(graph.to_dict(options.ref)), encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"--html {options.html}: cannot be written ({error.strerror}); name a file in a folder that exists"
            ) from error
    if options.json:
        print(json.dumps(graph.to_dict(options.ref), indent=2))
    else:
        print(f"wrote {options.html}" if options.html else ancestry_tree(graph))
    return 0
