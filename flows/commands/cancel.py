"""``posttrain cancel``."""

import argparse

from flows.commands.arguments import add_overrides, name_among
from flows.declare.store_root import asked_store


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="its id as in posttrain status, or enough of it; or: latest")
    add_overrides(parser)


def run(options: argparse.Namespace) -> int:
    from flows.cancel import cancel, find_run

    run_id, overrides = name_among(options.run, options.overrides)
    store = asked_store(overrides, options.config_dir)
    print(cancel(find_run(run_id, store), store))
    return 0
