"""``posttrain rebuild``."""

import argparse
import json

from flows.commands.arguments import add_json, add_overrides
from lineage.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_overrides(parser)
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    from flows.declare.config import load_pipeline
    from flows.progress.run_record import silent_drivers
    from lineage.mlflow.registry import refill
    from lineage.store import require_store

    pipeline = load_pipeline(options.overrides, options.config_dir)
    if not pipeline.tracking.mlflow:
        raise ConfigError(
            "tracking.mlflow=false: there is no MLflow to refill; leave tracking as it is, or state tracking.uri"
        )
    require_store(pipeline.store)
    rebuilt = refill(pipeline.tracking.uri, pipeline.store, silent_drivers(pipeline.store))
    if options.json:
        print(json.dumps({"added": rebuilt.added, "present": rebuilt.present}))
        return 0
    counts = ", ".join(f"{count} {name}" for name, count in rebuilt.added.items())
    print(f"MLflow: added {counts}; {rebuilt.present} runs were there")
    return 0
