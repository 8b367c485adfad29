"""``posttrain gc``."""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from flows.commands.arguments import add_json, add_overrides

if TYPE_CHECKING:
    from lineage.gc import Garbage

_UNITS = {"d": 86400.0, "h": 3600.0, "": 86400.0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_overrides(parser)
    add_json(parser)
    parser.add_argument("--yes", action="store_true", help="delete without asking")
    parser.add_argument("--dry-run", action="store_true", help="only show it")
    parser.add_argument("--keep", action="append", default=[], metavar="REF", help="keep this, with its ancestors")
    parser.add_argument(
        "--older-than", type=_seconds, default=_seconds("7d"), metavar="AGE",
        help="only what was not used for so long, such as 30d or 12h; default 7d",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """0, also where nothing is deleted.

    Raises:
        PipelineError: the roots are unknown, so that nothing is deleted.
    """
    from flows.declare.config import load_pipeline
    from flows.declare.store_root import asked_store
    from flows.gc_roots import add_present, find_roots
    from lineage.gc import delete, find

    store = asked_store(options.overrides, options.config_dir)
    pipeline = load_pipeline(options.overrides, options.config_dir)
    roots = find_roots(store, pipeline, options.keep)
    garbage, young = find(store, roots, options.older_than)
    if not options.json:
        _print(store, garbage, young)
    agreed = bool(garbage) and not options.dry_run and (options.yes or _asked(options.json))
    if agreed and not options.yes:  # the answer took its time
        roots = find_roots(store, pipeline, options.keep)
    done = [each for each in garbage if agreed and delete(store, each, partial(add_present, store, roots))]
    if options.json:
        print(json.dumps({**_document(store, garbage, young, roots), "freed": [each.what for each in done]}, indent=2))
    elif agreed:
        rest = len(garbage) - len(done)
        print(
            f"deleted {len(done)} of {len(garbage)}" + (f"; {rest} came into use, or went, meanwhile" if rest else "")
        )
    return 0


def _document(
    store: Path, garbage: "Sequence[Garbage]", young: "Sequence[Garbage]", roots: dict[str, str]
) -> dict[str, object]:
    from lineage.gc import size

    def row(each: "Garbage") -> dict[str, object]:
        return {
            "what": each.what, "why": each.why, "paths": [str(path) for path in each.paths],
            "fingerprint": each.fingerprint, "bytes": size([each]).num_bytes, "freed_bytes": size([each]).freed,
            "last_used": each.last_used,
        }  # fmt: skip

    whole = size(garbage)
    return {
        "store": str(store), "garbage": list(map(row, garbage)), "bytes": whole.num_bytes, "freed_bytes": whole.freed,
        "too_young": list(map(row, young)), "needed": roots,
    }  # fmt: skip


def _print(store: Path, garbage: "Sequence[Garbage]", young: "Sequence[Garbage]") -> None:
    from rich.filesize import decimal
    from rich.text import Text

    from flows.reports.tables import empty_table, plain_text
    from flows.wording import counted, printable_text
    from lineage.gc import size

    lines, whole = [], size(garbage)
    if garbage:
        table = empty_table("what", "size", "why", numbers=("size",))
        for each in garbage:
            table.add_row(Text(each.what), decimal(size([each]).num_bytes), Text(each.why))
        lines.append(plain_text(table))
    if whole.freed < whole.num_bytes:
        lines.append(f"{decimal(whole.num_bytes - whole.freed)} stay on the disk: hard links from elsewhere share them")
    if young:
        names = ", ".join(each.what for each in young[:5])
        used = f"{counted(len(young), 'thing')} ({decimal(size(young).num_bytes)}) used lately"
        lines.append(f"{used} stay: {names}; --older-than 0 takes them too")
    total = f"{counted(len(garbage), 'thing')} to delete in {store}: {decimal(whole.freed)}"
    lines.append(total if garbage else f"nothing to delete in {store}")
    print(printable_text("\n".join(lines)))


def _asked(as_json: bool) -> bool:
    if as_json or not sys.stdin.isatty():
        if not as_json:
            print("nothing is deleted: there is no terminal to ask at; --yes deletes it")
        return False
    return input("delete it? [y/N] ").strip().lower() in ("y", "yes")


def _seconds(word: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([dh]?)", word)
    if not match:
        raise argparse.ArgumentTypeError(f"{word}: not a valid age; give days or hours, such as 30d, 12h, 0")
    return float(match[1]) * _UNITS[match[2]]
