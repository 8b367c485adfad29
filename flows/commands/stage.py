"""``posttrain stage``."""

import argparse
from dataclasses import replace

from flows.commands.arguments import add_overrides, words_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="STAGE", help="a stage of the pipeline, whose inputs are finished")
    add_overrides(parser)


def run(options: argparse.Namespace) -> int:
    from flows.declare.config import load_pipeline
    from flows.declare.pipeline import nearest
    from flows.declared import adopt_view, show_declared
    from flows.planning.plan import make_plan
    from flows.planning.verdicts import require_passed
    from flows.run import run_one
    from flows.tracking import complete_record
    from lineage.errors import ArtifactError, ConfigError
    from lineage.store import create_store

    pipeline, name = load_pipeline(options.overrides, options.config_dir), options.name
    if name not in pipeline.stages:
        names = list(pipeline.stages)
        raise ConfigError(f"{name}: no such stage; there are: {', '.join(names)}{nearest(name, names)}")
    create_store(pipeline.store)
    adopt_view(pipeline)
    plan = make_plan(pipeline)
    planned = plan.stage(name)
    for upstream in dict.fromkeys(planned.upstream):
        if plan.stage(upstream).state != "reuse":
            reason = plan.stage(upstream).reason
            raise ArtifactError(
                f"stage {name} reads {upstream}, which is not finished ({reason}); make that first, "
                "or all: posttrain run, dvc repro"
            )
    complete_record(pipeline)
    if planned.state == "reuse":
        plan.entry(planned).require_intact()  # else DVC would take a damaged output for a new one
        print(f"nothing to do: {name} is finished: {plan.entry(planned).output}")
    else:
        run_one(plan, name, words_of(options))
        print(plan.entry(planned).output)
    show_declared(plan, words_of(options), [name])
    require_passed(replace(plan, stages=[planned]))
    return 0
