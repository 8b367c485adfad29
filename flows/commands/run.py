"""``posttrain plan``, ``run``, ``stage`` and ``export``."""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from flows.commands.arguments import add_sweep, read_overrides, recorded_cli_args
from lineage.filesystem.files import local_path

if TYPE_CHECKING:
    from flows.declare.pipeline import Pipeline

WORK = 4  # exit code of plan --exit-code if a run would do something


def add_plan(parser: argparse.ArgumentParser) -> None:
    add_sweep(parser)
    parser.add_argument("--out", type=local_path, metavar="FILE", help="write the plan to a file, for run --plan FILE")
    parser.add_argument(
        "--suggest", type=local_path, metavar="FILE", help="write the overrides that make every stage fit into memory"
    )
    parser.add_argument("--exit-code", action="store_true", help=f"exit with {WORK} if a run would do something")


def run_plan(options: argparse.Namespace) -> int:
    read_overrides(options)
    if options.multirun:
        from flows.reports.sweep import union_dict, union_text
        from flows.sweep.plan import read_sweep

        _refuse_with_sweep(options, "out", "suggest", "exit_code")
        sweep = read_sweep(options.overrides, options.config_dir)
        print(json.dumps(union_dict(sweep), indent=2) if options.json else union_text(sweep))
        return 0
    from flows.declare.config import load_pipeline
    from flows.planning.checks import bf16_notes, column_notes, compile_notes, position_notes
    from flows.planning.estimates import Estimator, History, share_notes
    from flows.planning.fit import require_fits
    from flows.planning.plan import make_plan
    from flows.progress.declared import adopt_view
    from flows.promotion.retrain import has_work, pending
    from flows.reports.run import plan_dict, plan_table

    pipeline = load_pipeline(options.overrides, options.config_dir)
    adopt_view(pipeline)
    plan = make_plan(pipeline)
    to_run = {planned.name: planned.stage for planned in plan.stale}
    faster = [*bf16_notes(to_run), *compile_notes(to_run)]
    shares = share_notes(plan, plan.stale)
    stale = [planned.name for planned in plan.stale]
    positions, columns = position_notes(pipeline, stale), column_notes(plan.pipeline, stale)
    plan = replace(plan, notes=[*plan.notes, *positions, *columns, *shares, *faster, *pending(plan)])
    estimator = Estimator(plan, History.of(plan.home))
    found = estimator.estimates(plan.stale)
    require_fits(plan, found, estimator, options.suggest)
    print(json.dumps(plan_dict(plan, found), indent=2) if options.json else plan_table(plan, found))
    if options.out:
        from flows.planning.plan_file import write_plan

        write_plan(plan, options.out, options.overrides, options.config_dir)
    return WORK if options.exit_code and has_work(plan) else 0


def _refuse_with_sweep(options: argparse.Namespace, *names: str) -> None:
    from lineage.errors import ConfigError

    for name in names:
        if getattr(options, name):
            raise ConfigError(
                f"--{name.replace('_', '-')} with --multirun: it is for the plan of one run; leave one of them out"
            )


def add_run(parser: argparse.ArgumentParser) -> None:
    add_sweep(parser)
    parser.add_argument(
        "--plan", type=local_path, metavar="FILE", help="run the plan that plan --out wrote; refuse if it has changed"
    )


def run_run(options: argparse.Namespace) -> int:
    read_overrides(options)
    if options.multirun:
        from flows.sweep.run import run_sweep

        _refuse_with_sweep(options, "plan")
        return run_sweep(
            options.overrides, options.config_dir, ["--multirun", *recorded_cli_args(options)], as_json=options.json
        )
    from flows.declare.config import load_pipeline
    from flows.planning.estimates import Estimator, History
    from flows.planning.fit import require_fits
    from flows.planning.plan import make_plan
    from flows.planning.plan_file import read_plan, require_approved
    from flows.progress.declared import adopt_view
    from flows.run import run_plan as execute
    from lineage.store import create_store

    approved = read_plan(options.plan) if options.plan else None
    if approved and not options.overrides:
        options.overrides = approved.overrides
        options.config_dir = options.config_dir or approved.config_dir
    pipeline = load_pipeline(options.overrides, options.config_dir)
    if not approved:
        create_store(pipeline.store)
    adopt_view(pipeline)
    plan = make_plan(pipeline)
    estimator = Estimator(plan, History.of(plan.home))
    require_fits(plan, estimator.estimates(plan.stale), estimator)
    if approved:
        require_approved(plan, approved)
        create_store(pipeline.store)
    return execute(plan, recorded_cli_args(options), as_json=options.json)


def add_stage(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="STAGE", help="a stage of the pipeline, whose inputs are finished")


def run_stage(options: argparse.Namespace) -> int:
    from flows.declare.config import load_pipeline
    from flows.planning.plan import make_plan
    from flows.planning.verdicts import require_passed
    from flows.progress.declared import adopt_view, show_declared
    from flows.progress.tracking import complete_record
    from flows.run import run_one
    from lineage.errors import ArtifactError
    from lineage.store import create_store

    pipeline, name = load_pipeline(options.overrides, options.config_dir), options.name
    _require_stage(pipeline, name)
    create_store(pipeline.store)
    adopt_view(pipeline)
    plan = make_plan(pipeline)
    planned = plan.stage(name)
    for upstream in dict.fromkeys(planned.upstream):
        if plan.stage(upstream).state != "reuse":
            reason = plan.stage(upstream).reason
            raise ArtifactError(
                f"stage {name} reads {upstream}, which is not finished ({reason}); run that first, "
                "or everything: posttrain run, dvc repro"
            )
    complete_record(pipeline)
    if planned.state == "reuse":
        plan.entry(planned).require_intact()  # DVC would commit a damaged output as a new one
        print(f"nothing to do: {name} is finished: {plan.entry(planned).output}")
    else:
        run_one(plan, name, recorded_cli_args(options))
        print(plan.entry(planned).output)
    show_declared(plan, recorded_cli_args(options), [name])
    require_passed(replace(plan, stages=[planned]))
    return 0


def _require_stage(pipeline: "Pipeline", name: str) -> None:
    from flows.declare.pipeline import listed
    from lineage.errors import ConfigError

    if name not in pipeline.stages:
        raise ConfigError(f"{name}: no such stage; there are: {listed(name, pipeline.stages)}")


def add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", choices=["verl"], help="the program that is to run the stage")
    parser.add_argument("name", metavar="STAGE", help="a stage of GRPO, RLOO or PPO, whose inputs are finished")
    parser.add_argument("--out", type=local_path, metavar="DIR", help="where to write; default: verl/STAGE")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of verl, which wins; repeat it"
    )
    parser.add_argument("--ability", default="general", help="the column ability of the rows, such as math")


def run_export(options: argparse.Namespace) -> int:
    from flows.declare.config import load_pipeline
    from flows.planning.plan import make_plan
    from flows.verl.export import COMMAND, NOTES, export_verl

    pipeline, name = load_pipeline(options.overrides, options.config_dir), options.name
    _require_stage(pipeline, name)
    out = options.out or Path("verl") / name
    found = export_verl(make_plan(pipeline), name, out, options.set, options.ability)
    if options.json:
        values = {
            "folder": str(found.folder), "rows": found.num_rows, "config": found.config, "overrides": found.overrides,
            "not_exported": found.notes,
        }  # fmt: skip
        print(json.dumps(values, indent=2))
        return 0
    print(f"{found.folder / COMMAND} trains {name} by verl on {found.num_rows['train']} prompts")
    print(f"not carried over ({found.folder / NOTES}):")
    for note in found.notes:
        print(f"  {note}")
    return 0
