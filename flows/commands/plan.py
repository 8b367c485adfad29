"""``posttrain plan``."""

import argparse
import json
from dataclasses import replace

from flows.commands.arguments import add_json, add_overrides, add_sweep, read_overrides


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_overrides(parser)
    add_sweep(parser)
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    read_overrides(options)
    if options.multirun:
        from flows.reports.sweep import union_dict, union_text
        from flows.sweep.plan import read_sweep

        sweep = read_sweep(options.overrides, options.config_dir)
        print(json.dumps(union_dict(sweep), indent=2) if options.json else union_text(sweep))
        return 0
    from flows.declare.config import load_pipeline
    from flows.declared import adopt_view
    from flows.planning.checks import bf16_notes
    from flows.planning.disk_capacity import share_notes
    from flows.planning.plan import make_plan
    from flows.promotion.retrain import pending
    from flows.reports.run import plan_table

    pipeline = load_pipeline(options.overrides, options.config_dir)
    adopt_view(pipeline)
    plan = make_plan(pipeline)
    faster = bf16_notes({planned.name: planned.stage for planned in plan.stale})
    shares = share_notes(plan, plan.stale)
    plan = replace(plan, notes=[*plan.notes, *shares, *faster, *pending(plan)])
    print(json.dumps(plan.to_dict(), indent=2) if options.json else plan_table(plan))
    return 0
