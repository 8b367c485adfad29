"""``posttrain status``, ``logs`` and ``cancel``."""

import argparse
import contextlib
import json
import sys
import time
from pathlib import Path

from flows.commands.arguments import count_of
from flows.declare.store_root import asked_store, store_root
from flows.reports.run import views
from flows.reports.status import status_dict, status_text
from flows.reports.wording import printable_text
from lineage.errors import StoppedError
from lineage.store import require_store

_WATCH_SECONDS = 1.0


def add_status(parser: argparse.ArgumentParser) -> None:
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object")
    form.add_argument("--watch", action="store_true", help="refresh until Ctrl-C")


def run_status(options: argparse.Namespace) -> int:
    store = store_root(options.overrides, options.config_dir)
    # The first run may be about to create the default store.
    if options.overrides or (store.exists() and any(store.iterdir())):
        require_store(store)
    if options.watch:
        with contextlib.suppress(KeyboardInterrupt):
            _watch(store)
        return StoppedError.exit_code
    shown = views(store)
    print(json.dumps(status_dict(store, *shown), indent=2) if options.json else status_text(store, *shown))
    return 0


def _watch(store: Path) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live(console=Console(highlight=False), auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            live.update(Text(status_text(store, *views(store))), refresh=True)
            time.sleep(_WATCH_SECONDS)


def add_logs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ref", metavar="REF", help="such as dpo, cpt-sft-dpo/dpo, or digits of a fingerprint")
    parser.add_argument(
        "--follow", "-f", action="store_true", help="wait for the stage to start, and print until it ends"
    )
    parser.add_argument("-n", "--lines", type=count_of("lines", 0), metavar="LINES", help="only the last LINES lines")


def run_logs(options: argparse.Namespace) -> int:
    from flows.progress.stage_log import begun_entry, follow_log, read_log, stage_entry

    ref, store = options.ref, asked_store(options.overrides, options.config_dir)
    if not options.follow:
        sys.stdout.writelines(map(printable_text, read_log(stage_entry(ref, store), options.lines)))
        return 0
    with contextlib.suppress(KeyboardInterrupt):
        for line in follow_log(begun_entry(ref, store), options.lines):
            sys.stdout.write(printable_text(line))
            sys.stdout.flush()
        return 0
    return StoppedError.exit_code


def add_cancel(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="its id as in posttrain status, or a part of it; or: latest")


def run_cancel(options: argparse.Namespace) -> int:
    from flows.operate.cancel import cancel, find_run

    store = asked_store(options.overrides, options.config_dir)
    print(cancel(find_run(options.run, store), store))
    return 0
