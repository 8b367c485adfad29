"""Arguments that several commands share."""

import argparse
from pathlib import Path


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """What states a pipeline: overrides, and a folder of further groups."""
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="e.g. stages.dpo.method.beta=0.2")
    parser.add_argument("--config-dir", type=Path, help="a directory of your own groups: model/, source/ ...")


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def words_of(options: argparse.Namespace) -> list[str]:
    """What states the pipeline, as words of a further command."""
    return [*(["--config-dir", str(options.config_dir)] if options.config_dir else []), *options.overrides]
