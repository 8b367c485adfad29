"""``posttrain logs``."""

import argparse
import contextlib
import sys

from flows.commands.arguments import add_overrides, name_among
from flows.declare.store_root import asked_store
from flows.wording import printable_text
from lineage.errors import StoppedError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ref", metavar="REF", help="such as dpo, cpt-sft-dpo/dpo, or digits of a fingerprint")
    add_overrides(parser)
    parser.add_argument("--follow", "-f", action="store_true", help="go on until the stage ends, from before it begins")
    parser.add_argument("-n", "--lines", type=_count, metavar="LINES", help="the last so many lines; without: all")


def run(options: argparse.Namespace) -> int:
    from flows.progress.stage_log import begun_entry, follow_log, read_log, stage_entry

    ref, overrides = name_among(options.ref, options.overrides)
    store = asked_store(overrides, options.config_dir)
    if not options.follow:
        sys.stdout.writelines(map(printable_text, read_log(stage_entry(ref, store), options.lines)))
        return 0
    with contextlib.suppress(KeyboardInterrupt):
        for line in follow_log(begun_entry(ref, store), options.lines):
            sys.stdout.write(printable_text(line))
            sys.stdout.flush()
        return 0
    return StoppedError.exit_code


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text}: is no number of lines; give one from 0 on")
    return int(text)
