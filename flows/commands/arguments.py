"""Arguments that several commands share."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from lineage.errors import PipelineError
from lineage.secrets import redacted


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """What states a pipeline: overrides, and a folder of further groups."""
    # The default is argparse's own, stated so that what else is lacking is not said of overrides too.
    parser.add_argument("overrides", nargs="*", default=[], metavar="OVERRIDE", help="e.g. stages.dpo.method.beta=0.2")
    parser.add_argument("--config-dir", type=Path, help="a directory of your own groups: model/, source/ ...")


def add_allow_code(parser: argparse.ArgumentParser) -> None:
    """What lets the overrides of a deployed run name code."""
    parser.add_argument(
        "--allow-code", action="store_true", help="overrides of a run may name _target_, allow_code and python:"
    )


def add_sweep(parser: argparse.ArgumentParser) -> None:
    """What makes a sweep of a run, and what makes a run of the best trial of a sweep."""
    parser.add_argument("--multirun", action="store_true", help="try every value, such as a.b=1,2; see sweep=")
    parser.add_argument(
        "--overrides-from", type=Path, metavar="FILE", help="best.yaml of a sweep, or a patch of diagnose"
    )


def read_overrides(options: argparse.Namespace) -> None:
    """Puts the overrides of ``--overrides-from`` before those of the command line."""
    if options.overrides_from:
        from flows.sweep.folder import read_best

        overrides, config_dir = read_best(options.overrides_from)
        options.overrides = [*overrides, *options.overrides]
        options.config_dir = options.config_dir or config_dir


def name_among(word: str, overrides: Sequence[str]) -> tuple[str, list[str]]:
    """What a command is about, wherever it stands among the overrides; and these.

    Args:
        word: the first, which argparse took for the name.
    """
    words = [word, *overrides]
    name = next((each for each in words if "=" not in each), word)
    words.remove(name)
    return name, words


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def stated_words(options: argparse.Namespace) -> list[str]:
    """What states the pipeline, as words of a further command."""
    return [*(["--config-dir", str(options.config_dir)] if options.config_dir else []), *options.overrides]


def words_of(options: argparse.Namespace) -> list[str]:
    """The same as it is recorded and printed: without the secrets of an address."""
    return list(map(redacted, stated_words(options)))


def write_rendered(parser: argparse.ArgumentParser, file: Path, render: Callable[[argparse.Namespace], str]) -> int:
    """The whole of a ``python -m`` that writes a file; returns the exit code."""
    try:
        file.write_text(render(parser.parse_intermixed_args()))
    except PipelineError as error:
        print(f"posttrain: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{file} is written")
    return 0
