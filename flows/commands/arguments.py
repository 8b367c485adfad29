"""Arguments that several commands share."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from flows.reports.wording import printable, relative
from lineage.errors import ConfigError, PipelineError
from lineage.filesystem.files import local_path, refuse_edited
from lineage.secrets import redacted


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Arguments that select a pipeline: overrides, and a folder of further groups."""
    # An explicit default keeps overrides out of argparse's message on missing arguments.
    parser.add_argument("overrides", nargs="*", default=[], metavar="OVERRIDE", help="e.g. stages.sft.method.seed=1")
    parser.add_argument("--config-dir", type=local_path, help="a directory of your own groups: model/, source/ ...")


def add_allow_code(parser: argparse.ArgumentParser) -> None:
    """The option that lets overrides of deployed runs name code."""
    parser.add_argument(
        "--allow-code", action="store_true", help="overrides of a run may name _target_, allow_code and python:"
    )


def add_sweep(parser: argparse.ArgumentParser) -> None:
    """Options for a sweep, and for a run with the best settings of a sweep."""
    parser.add_argument("--multirun", action="store_true", help="try every value, such as a.b=1,2; see sweep=")
    parser.add_argument(
        "--overrides-from", type=local_path, metavar="FILE", help="best.yaml of a sweep, or a patch of diagnose"
    )


def read_overrides(options: argparse.Namespace) -> None:
    """Puts the overrides of ``--overrides-from`` before those of the command line.

    Raises:
        ConfigError: settings of a sweep, and no ``--multirun``.
    """
    for word in () if options.multirun else options.overrides:
        if word.lstrip("+~").partition("=")[0].partition(".")[0] == "sweep":
            raise ConfigError(f"{word}: one run tries nothing; add --multirun, which sweeps, or leave {word} out")
    if options.overrides_from:
        from flows.sweep.folder import read_best

        overrides, config_dir = read_best(options.overrides_from)
        options.overrides = [*overrides, *options.overrides]
        options.config_dir = options.config_dir or config_dir


_OF_POLICIES, _OF_MODELS = ("chat", "serve-model", "export", "blame"), ("promote", "report")


def known_refs(cli_args: Sequence[str]) -> str:
    """What the REF of a command line may be: the models of the store, or all that it has."""
    from flows.declare.project import with_project
    from flows.declare.store_root import asked_store
    from lineage.artifact import MODELS, Kind
    from lineage.graph.index import Index
    from lineage.graph.refs import known_names

    kinds = (Kind.CHECKPOINT,) if cli_args[0] in _OF_POLICIES else MODELS if cli_args[0] in _OF_MODELS else ()
    found = with_project([arg for arg in cli_args if arg.startswith("store=")])
    try:
        store = asked_store([word for word in found if word.startswith("store=")])
    except ConfigError as error:
        return printable(str(error))
    with Index(store) as index:
        names = known_names(index, kinds)
    return printable(f"{store} has {names or 'none; produce one with: posttrain run'}")


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def count_of(what: str, least: int) -> Callable[[str], int]:
    """The type of an option that takes a number of things."""

    def count(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text}: not a valid number of {what}; give {least} or more")
        return int(text)

    return count


def write_output(path: Path, text: str, *, keeps: bool = False) -> None:
    """Writes a file that an option names.

    Args:
        keeps: refuses to replace a file that may have been edited.
    """
    if keeps:
        refuse_edited(path, text)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be written ({error.strerror}); name a file in a folder that exists"
        ) from error


def cli_args(options: argparse.Namespace) -> list[str]:
    """The arguments that select the pipeline, for another command."""
    return [*(["--config-dir", str(options.config_dir)] if options.config_dir else []), *options.overrides]


def recorded_cli_args(options: argparse.Namespace) -> list[str]:
    """``cli_args`` without secrets of URLs, to be recorded and printed."""
    return list(map(redacted, cli_args(options)))


def write_rendered(parser: argparse.ArgumentParser, file: Path, render: Callable[[argparse.Namespace], str]) -> int:
    """Main function of a ``python -m`` module that writes a file; returns the exit code."""
    try:
        file.write_text(render(parser.parse_intermixed_args()))
    except PipelineError as error:
        print(f"posttrain: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{relative(file)} is written")
    return 0
