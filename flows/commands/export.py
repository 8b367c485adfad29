"""``posttrain export``."""

import argparse
import json
from pathlib import Path

from flows.commands.arguments import add_json, add_overrides


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", choices=["verl"], help="the program that is to run the stage")
    parser.add_argument("name", metavar="STAGE", help="a stage of GRPO, RLOO or PPO, whose inputs are finished")
    add_overrides(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write; default: verl/STAGE")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of verl, which wins; repeat it"
    )
    parser.add_argument("--ability", default="general", help="the column ability of the rows, such as math")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    from flows.declare.config import load_pipeline
    from flows.declare.pipeline import nearest
    from flows.planning.plan import make_plan
    from flows.verl.export import COMMAND, NOTES, export_verl
    from lineage.errors import ConfigError

    pipeline, name = load_pipeline(options.overrides, options.config_dir), options.name
    if name not in pipeline.stages:
        names = list(pipeline.stages)
        raise ConfigError(f"{name}: no such stage; there are: {', '.join(names)}{nearest(name, names)}")
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
