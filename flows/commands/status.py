"""``posttrain status``."""

import argparse
import contextlib
import json
import time
from pathlib import Path

from flows.commands.arguments import add_overrides
from flows.declare.store_root import store_root
from flows.reports.run import views
from flows.reports.status import status_dict, status_text
from lineage.errors import StoppedError
from lineage.store import require_store

_WATCH_SECONDS = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_overrides(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object")
    form.add_argument("--watch", action="store_true", help="show it again and again, until Ctrl-C")


def run(options: argparse.Namespace) -> int:
    store = store_root(options.overrides, options.config_dir)
    if options.overrides or (store.exists() and any(store.iterdir())):  # else the first run may be about to create it
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
