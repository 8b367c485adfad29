"""``posttrain run``."""

import argparse

from flows.commands.arguments import add_json, add_overrides, add_sweep, read_overrides, words_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_overrides(parser)
    add_sweep(parser)
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    read_overrides(options)
    if options.multirun:
        from flows.sweep.run import run_sweep

        return run_sweep(
            options.overrides, options.config_dir, ["--multirun", *words_of(options)], as_json=options.json
        )
    from flows.declare.config import load_pipeline
    from flows.declared import adopt_view
    from flows.planning.plan import make_plan
    from flows.run import run_plan
    from lineage.store import create_store

    pipeline = load_pipeline(options.overrides, options.config_dir)
    create_store(pipeline.store)
    adopt_view(pipeline)
    return run_plan(make_plan(pipeline), words_of(options), as_json=options.json)
