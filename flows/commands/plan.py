"""``posttrain plan``."""

import argparse
import json

from flows.commands.arguments import add_json, add_overrides


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_overrides(parser)
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    from flows.config import load_pipeline
    from flows.declared import adopt_view
    from flows.plan import make_plan
    from flows.reports.run import plan_table

    pipeline = load_pipeline(options.overrides, options.config_dir)
    adopt_view(pipeline)
    plan = make_plan(pipeline)
    print(json.dumps(plan.to_dict(), indent=2) if options.json else plan_table(plan))
    return 0
