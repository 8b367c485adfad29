"""``posttrain run``."""

import argparse

from flows.commands.arguments import add_json, add_overrides


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_overrides(parser)
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    from flows.config import load_pipeline
    from flows.plan import make_plan
    from flows.run import run_plan

    words = [*(["--config-dir", str(options.config_dir)] if options.config_dir else []), *options.overrides]
    return run_plan(make_plan(load_pipeline(options.overrides, options.config_dir)), words, as_json=options.json)
