"""``posttrain tune``."""

import argparse
import json
from typing import TYPE_CHECKING

from flows.commands.arguments import add_json, add_overrides, name_among, recorded_cli_args

if TYPE_CHECKING:
    from flows.sweep.tune import Tuner


def add_tune(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="STAGE", help="a stage that trains")
    add_overrides(parser)
    add_json(parser)
    parser.add_argument("--rounds", type=int, default=4, metavar="N", help="default: 4")
    parser.add_argument("--steps", type=int, metavar="N", help="steps of each trial; default: as the stage declares")
    parser.add_argument("--metric", help="STAGE/METRIC, or one of the stage; default: its loss on held-out rows")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument(
        "--budget-steps", type=int, metavar="N", help="stop before the trials exceed this number of steps"
    )
    budget.add_argument("--budget-money", type=float, metavar="X", help="stop before the trials cost more")
    parser.add_argument("--dry-run", action="store_true", help="print the first round; run nothing")


def run_tune(options: argparse.Namespace) -> int:
    from flows.reports.sweep import sweep_dict, sweep_summary
    from flows.sweep.run import conduct
    from flows.sweep.tune import Tuner, Tuning, read_tuning
    from lineage.errors import ConfigError

    name, options.overrides = name_among(options.name, options.overrides)
    chosen, budget = [], None
    for option in ("metric", "rounds", "steps", "budget_steps", "budget_money"):
        value, written = getattr(options, option), f"--{option.replace('_', '-')}"
        if value is not None:
            chosen += [written, str(value)]
        if isinstance(value, int | float) and value <= 0:
            raise ConfigError(f"{written} {value}: a number above 0 is accepted")
        if option.startswith("budget_") and value is not None:
            budget = option.removeprefix("budget_"), value
    asked = Tuning(stage=name, metric=options.metric, rounds=options.rounds, steps=options.steps, budget=budget)
    sweep = read_tuning(asked, options.overrides, options.config_dir)
    tuner = Tuner(sweep, asked)
    if options.dry_run:
        print(_first_round(tuner, as_json=options.json))
        return 0
    done = conduct(
        sweep, [name, *chosen, *recorded_cli_args(options)], tuner.begin, command="tune", accepts_failures=True
    )
    if options.json:
        found = sweep_dict(sweep, done.files, done.seconds, done.execution_id)
        print(json.dumps(found | tuner.to_dict(), indent=2), flush=True)
    else:
        stopped = [f"stopped before {tuner.stopped}"] if tuner.stopped else []
        parts = [tuner.text().rstrip(), *stopped, sweep_summary(sweep, done.files, done.seconds)]
        print("\n\n".join(parts), flush=True)
    done.require_success()
    return 0


def _first_round(tuner: "Tuner", *, as_json: bool) -> str:
    """The trials of the first round with their estimated needs."""
    from flows.reports.tables import empty_table, plain_text
    from flows.reports.wording import clock
    from flows.sweep.folder import overrides

    found = tuner.first_round()
    if as_json:
        rows = [
            {"params": params, "why": why, **need._asdict(), "over": over or None} for params, why, need, over in found
        ]
        return json.dumps(rows, indent=2)
    table = empty_table("trial", "steps", "time", "cost", "parameters", "why", numbers=("trial", "steps"))
    for number, (params, why, need, over) in enumerate(found):
        time = "" if need.seconds is None else clock(need.seconds)
        cost = "" if need.money is None else f"{need.money:.2f}"
        reason = f"{why}; {over}" if over else why
        table.add_row(str(number), f"{need.steps:,}", time, cost, " ".join(overrides(params)), reason)
    return plain_text(table)
