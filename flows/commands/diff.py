"""``posttrain diff``."""

import argparse
import json

from flows.commands.arguments import add_json, add_overrides
from flows.declare.store_root import asked_store


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", metavar="A", help="such as cpt-sft-dpo/dpo, or digits of a fingerprint")
    parser.add_argument("second", metavar="B", help="such as alias:champion")
    add_overrides(parser)
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    from flows.reports.diff import diff_text
    from lineage.errors import ConfigError
    from lineage.graph.diff import diff
    from lineage.graph.index import Index
    from lineage.graph.refs import resolve

    words = [options.first, options.second, *options.overrides]
    refs = [word for word in words if "=" not in word]
    if len(refs) != 2:
        raise ConfigError(f"diff: {len(refs)} REFs are given ({', '.join(refs)}); give two, as: posttrain diff A B")
    with Index(asked_store([word for word in words if "=" in word], options.config_dir)) as index:
        found = diff(index, *(resolve(ref, index).node for ref in refs))
    print(json.dumps(found.to_dict(), indent=2) if options.json else diff_text(found))
    return 0
