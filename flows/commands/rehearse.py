"""``posttrain rehearse``, ``certify``, ``canary`` and ``tune``."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from flows.commands.arguments import add_json, add_overrides, recorded_cli_args
from lineage.filesystem.files import local_path
from posttrain import ROOT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flows.operate.canary import Checked, Compared, Moved
    from flows.operate.certify import Certified
    from flows.operate.rehearsal import Rehearsal
    from flows.sweep.tune import Tuner
    from lineage.record.certificate import Comparison

CANARY = Path("canary.json")
SHIPPED = Path(ROOT) / CANARY  # a record with the versions of requirements.lock; in a wheel too
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


def add_canary(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    record = actions.add_parser("record", help="run the recipes, and write what they gave", allow_abbrev=False)
    record.add_argument(
        "--out", type=local_path, default=CANARY, metavar="FILE", help=f"default: {CANARY}, which git keeps"
    )
    record.set_defaults(command=run_canary_record)
    check = actions.add_parser("check", help="run them again, and name what changed", allow_abbrev=False)
    check.add_argument(
        "file", type=local_path, nargs="?", metavar="FILE",
        help=f"default: {CANARY} of this folder, else the record that posttrain ships",
    )  # fmt: skip
    check.add_argument(
        "--isolate", action="store_true", help="name the package that changed results, by environments of uv"
    )
    check.set_defaults(command=run_canary_check)
    for each in (record, check):
        each.add_argument(
            "--only", action="extend", nargs="+", default=[], metavar="NAME", help="these recipes alone; default: all"
        )
        add_json(each)


def run_canary_record(options: argparse.Namespace) -> int:
    from flows.operate.canary import record, require_writable, write
    from flows.reports.wording import counted

    require_writable(options.out)
    found = record(options.only)
    write(found, options.out)
    if options.json:
        print(json.dumps({"file": str(options.out), **asdict(found)}, indent=2))
        return 0
    print(f"{counted(len(found.names), 'recipe')} in {options.out}; compare with it: posttrain canary check")
    print(_left_out(found.left_out), end="")
    return 0


def run_canary_check(options: argparse.Namespace) -> int:
    """Returns 0 if all results are equal or within noise, else 3."""
    from flows.operate.canary import check, read

    file = options.file or (CANARY if CANARY.exists() else SHIPPED)
    found = check(read(file), options.only, where=file, isolates=options.isolate)
    if options.json:
        document = {"file": str(file), "same_machine": found.same_machine, "beyond": found.beyond}
        print(json.dumps({**document, **asdict(found)}, indent=2))
    else:
        print(f"compared with {file}\n{_checked_text(found)}")
    return 3 if found.beyond else 0


def _left_out(reasons: "Mapping[str, str]") -> str:
    return "".join(f"not run: {name} ({reason})\n" for name, reason in reasons.items())


def _checked_text(found: "Checked") -> str:
    """A line per recipe, then what moved beside the results, then the packages that did it."""
    from flows.reports.wording import counted, empty_table, plain_text

    table = empty_table("recipe", "verdict", "what moved most", "seconds", numbers=("seconds",))
    for each in found.recipes:
        table.add_row(each.name, each.verdict, _moved_text(each.worst), _seconds_text(each))
    lines = [plain_text(table), ""]
    if not found.same_machine:
        ours, here = (" ".join(filter(None, (each.get("cpu"), each.get("gpu")))) for each in found.machines)
        what = "other CPU" if ours != here else "other instruction set"
        lines.append(f"{what}: compared within noise (recorded on {ours}, this is {here})")
    versions = [f"{name} {old or 'none'} -> {new or 'none'}" for name, (old, new) in found.packages.items()]
    if found.python[0] != found.python[1]:
        versions.insert(0, f"Python {found.python[0]} -> {found.python[1]}")
    before, now = (each[:12] if each else "unknown" for each in found.commits)
    if before != now:
        versions.append(f"commit {before} -> {now}")
    lines.append(f"moved since the record: {', '.join(versions)}" if versions else "no version moved since the record")
    lines += _left_out(found.not_run).splitlines()
    if found.not_recorded:
        lines.append(f"not in the record: {', '.join(found.not_recorded)}; posttrain canary record adds them")
    lines += _isolated_lines(found)
    count = counted(len(found.beyond), "recipe")
    lines.append(f"{count} beyond noise: {', '.join(found.beyond)}" if found.beyond else "nothing beyond noise")
    return "\n".join(lines)


def _moved_text(moved: "Moved | None") -> str:
    if moved is None:
        return ""
    if moved.figure == "error":
        return f"it fails: {moved.found}"
    place = f" [{moved.place}]" if moved.place else ""
    before, now = (
        "none" if each is None else each[:12] if isinstance(each, str) else f"{each:.9g}"
        for each in (moved.recorded, moved.found)
    )
    apart = "" if moved.difference is None else f", apart by {moved.difference:.2g}"
    noise = "" if moved.noise is None else f"{apart}, noise {moved.noise:.2g}"
    return f"{moved.figure}{place} was {before}, is {now}{noise}"


_SLOWER = 1.5


def _seconds_text(each: "Compared") -> str:
    before, now = each.seconds
    if not before or not now:
        return ""
    factor = now / before
    speed = f" ({factor:.1f} times the recorded)" if not 1 / _SLOWER < factor < _SLOWER else ""
    return f"{now:.1f}{speed}"


def _isolated_lines(found: "Checked") -> list[str]:
    isolated = found.isolated
    if isolated is None:
        return []
    lines = []
    for cause in isolated.causes:
        versions = (f"{name} {found.packages[name][0]} -> {found.packages[name][1]}" for name in cause.packages)
        why = f" (tried together: {cause.reason})" if cause.reason else ""
        lines.append(f"changed by {' and '.join(versions)}{why}: {', '.join(cause.recipes)}")
    if isolated.only_together:
        lines.append(f"changed by no package alone: {', '.join(isolated.only_together)}")
    if isolated.not_by_packages:
        stay = [*isolated.unavailable, *(name for name, (before, _) in found.packages.items() if before is None)]
        but = f" but {', '.join(stay)}" if stay else ""
        lines.append(
            f"changed with all packages{but} as recorded too, so by {', '.join([*stay, 'the code'])}, Python or the "
            f"machine: {', '.join(isolated.not_by_packages)}"
        )
    lines += [f"could not be installed as recorded: {name} ({why})" for name, why in isolated.unavailable.items()]
    return lines


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

    chosen, budget = [], None
    for option in ("metric", "rounds", "steps", "budget_steps", "budget_money"):
        value, written = getattr(options, option), f"--{option.replace('_', '-')}"
        if value is not None:
            chosen += [written, str(value)]
        if isinstance(value, int | float) and value <= 0:
            raise ConfigError(f"{written} {value}: a number above 0 is accepted")
        if option.startswith("budget_") and value is not None:
            budget = option.removeprefix("budget_"), value
    asked = Tuning(stage=options.name, metric=options.metric, rounds=options.rounds, steps=options.steps, budget=budget)
    sweep = read_tuning(asked, options.overrides, options.config_dir)
    tuner = Tuner(sweep, asked)
    if options.dry_run:
        print(_first_round(tuner, as_json=options.json))
        return 0
    done = conduct(
        sweep, [options.name, *chosen, *recorded_cli_args(options)], tuner.begin, command="tune", accepts_failures=True
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
