"""``posttrain rehearse``, ``certify`` and ``tune``."""

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from flows.commands.arguments import add_json, add_overrides, name_among, recorded_cli_args

if TYPE_CHECKING:
    from flows.operate.certify import Certified
    from flows.operate.rehearsal import Rehearsal
    from flows.sweep.tune import Tuner
    from lineage.record.certificate import Comparison

_NUMBERS = ("seconds", "memory GiB", "checkpoint MB", "real run")


def add_rehearse(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--keep", action="store_true", help="keep the outputs until the next rehearsal")


def run_rehearse(options: argparse.Namespace) -> int:
    from flows.declare.config import load_pipeline
    from flows.operate.rehearsal import rehearse

    pipeline = load_pipeline(options.overrides, options.config_dir)
    found = rehearse(pipeline, recorded_cli_args(options), keep=options.keep)
    if options.json:
        error = str(found.error) if found.error else None
        document = {"store": str(found.place), "stages": [asdict(row) for row in found.rows], "error": error}
        print(json.dumps(document, indent=2), flush=True)
    else:
        print(_rehearsal_text(found), flush=True)
    if found.error:
        raise found.error
    return 0


def _rehearsal_text(rehearsal: "Rehearsal") -> str:
    """A line per stage, and an estimate of the real run."""
    from flows.reports.wording import clock, empty_table, plain_text

    def number(value: float | None, digits: int) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    table = empty_table("stage", "exercised", *_NUMBERS, "verdict", numbers=_NUMBERS)
    for row in rehearsal.rows:
        size = None if row.checkpoint_bytes is None else row.checkpoint_bytes / 1e6
        table.add_row(
            row.stage, ", ".join(row.exercised), number(row.seconds, 1), number(row.memory_gib, 2), number(size, 1),
            "" if row.real_seconds is None else f"about {clock(row.real_seconds)}", row.verdict,
        )  # fmt: skip
    lines = [plain_text(table), ""]
    known = [row.real_seconds for row in rehearsal.rows if row.real_seconds is not None]
    if known:
        total = clock(sum(known))
        lines.append(f"the real run, one stage after another: about {total} or less, since first steps are slow")
    if rehearsal.place.is_dir():
        lines.append(f"kept until the next rehearsal: {rehearsal.place}")
    return "\n".join(lines)


def add_certify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workers", type=int, metavar="N", help="resume with N workers; default: half as many, or 2 instead of 1"
    )


def run_certify(options: argparse.Namespace) -> int:
    """Returns 0 if kills change no bit and other workers stay within the tolerance; 1 if not, or if not compared."""
    from flows.declare.config import load_pipeline
    from flows.operate.certify import certify

    pipeline = load_pipeline(options.overrides, options.config_dir)
    found = certify(pipeline, recorded_cli_args(options), options.workers)
    document = {"stages": [{"path": str(each.path), **asdict(each.certificate)} for each in found]}
    print(json.dumps(document, indent=2) if options.json else _certified_text(found), flush=True)
    comparisons = [each.certificate.comparisons for each in found]
    differs = any(each.verdict == "differs" for stage in comparisons for each in stage.values())
    return 1 if differs or any(stage["killed"].verdict == "not compared" for stage in comparisons) else 0


def _certified_text(found: "list[Certified]") -> str:
    """A line per stage and interruption, then the files."""
    from flows.reports.wording import empty_table, plain_text

    table = empty_table("stage", "interruption", "verdict", "what was found")
    for each in found:
        for how, comparison in each.certificate.comparisons.items():
            before, after = comparison.num_workers
            workers = f", workers {before} to {after}" if before != after else ""
            table.add_row(each.certificate.stage, how + workers, comparison.verdict, _detail(comparison))
    paths = "\n".join(f"{each.certificate.stage}: {each.path}" for each in found)
    return f"{plain_text(table)}\n\n{paths}"


def _detail(comparison: "Comparison") -> str:
    steps = ", ".join(str(step) for step in comparison.resumed_at)
    loss, weights = comparison.loss_difference, comparison.weight_difference
    parts = [
        comparison.detail,
        f"losses apart by {loss:.2g}" if loss else "",
        f"weights apart by {weights:.2g} of what the training moved them" if weights else "",
        f"resumed from step {steps}" if steps else "",
    ]
    return "; ".join(filter(None, parts))


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
    from flows.reports.wording import clock, empty_table, plain_text
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
