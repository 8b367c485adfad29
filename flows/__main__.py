"""The command line: ``posttrain plan`` and ``posttrain run``, also ``python -m flows``."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from lineage.errors import PipelineError

STOPPED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code.

    0 done, 2 the input was wrong, 1 a stage failed, 130 stopped.
    """
    sys.path.append(os.getcwd())  # where a method of the user's own may lie
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    unknown = [word for word in rest if word.startswith("-")]
    if unknown:
        parser.error(f"unknown option {unknown[0]}; see posttrain COMMAND --help")
    options.overrides += rest  # argparse stops collecting overrides at the first option
    try:
        return int(options.command(options))
    except PipelineError as error:
        print(f"posttrain: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("posttrain: stopped; run the same command again to go on", file=sys.stderr)
        return STOPPED
    except BrokenPipeError:  # `posttrain plan | head`: all is done but the last of the print
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        print(f"posttrain: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="posttrain", description="Trains language models after pretraining, as one graph."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command, help_text in (
        ("plan", _plan, "show what would run, what is reused, and why; run nothing"),
        ("run", _run, "plan, then run what is not finished"),
    ):
        sub = commands.add_parser(name, help=help_text, description=help_text)
        sub.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="e.g. stages.dpo.method.beta=0.2")
        sub.add_argument(
            "--config-dir", type=Path, help="a directory of your own groups: model/, source/, pipeline/ ..."
        )
        sub.add_argument("--json", action="store_true", help="print one JSON object")
        sub.set_defaults(command=command)
    return parser


def _plan(options: argparse.Namespace) -> int:
    from flows.config import load_pipeline
    from flows.plan import make_plan
    from flows.report import plan_table

    plan = make_plan(load_pipeline(options.overrides, options.config_dir))
    print(json.dumps(plan.to_dict(), indent=2) if options.json else plan_table(plan))
    return 0


def _run(options: argparse.Namespace) -> int:
    from flows.config import load_pipeline
    from flows.plan import make_plan
    from flows.run import run_plan

    words = [*(["--config-dir", str(options.config_dir)] if options.config_dir else []), *options.overrides]
    return run_plan(make_plan(load_pipeline(options.overrides, options.config_dir)), words, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
